"""Temporary directories of killed sessions go at the next start; those of live ones stay."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from autotune.fleet.local import open_harness
from autotune.measure.children import Children
from autotune.measure.scratch import Scratch, remove_dead, temporary_root
from autotune.measure.spec import Spec
from autotune.records.config import load_config
from autotune.study.interrupts import Interrupts
from autotune.workloads.reference import WorkloadRef


def create_and_die(parent: Path) -> None:
    """Create a directory in a process that SIGKILL ends."""
    child = os.fork()
    if child == 0:
        (Scratch(parent, "scratch-").path / "initial-1").write_bytes(b"1" * 100)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(parent.glob("scratch-*/initial-1"))


def test_the_next_session_removes_scratch_of_a_killed_one_and_keeps_that_of_a_live_one(tmp_path: Path) -> None:
    with Scratch(tmp_path, "scratch-") as live:
        create_and_die(tmp_path)
        (tmp_path / "eager-1.log").touch()
        children = Children(Spec(WorkloadRef("zoo"), tmp_path))
        assert set(tmp_path.iterdir()) == {live.path, children.scratch, tmp_path / "eager-1.log"}
        children.close()
        children.close()
    assert [path.name for path in tmp_path.iterdir()] == ["eager-1.log"]


def test_scratch_of_another_user_and_a_link_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "scratch-link").symlink_to(tmp_path / "other")
    remove_dead(tmp_path, "scratch-")
    assert (tmp_path / "scratch-link").is_symlink()
    assert (tmp_path / "other").is_dir()


def test_a_directory_that_another_session_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdtemp, made = tempfile.mkdtemp, list[str]()

    def make(**options: object) -> str:
        made.append(mkdtemp(**options))
        if len(made) == 1:
            os.rmdir(made[0])  # noqa: PTH106
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with Scratch(tmp_path, "scratch-") as scratch:
        assert scratch.path == Path(made[1])
        assert scratch.path.is_dir()
    assert len(made) == 2


def test_temporary_files_stores_and_caches_stay_where_they_are_if_a_workload_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdtemp = tempfile.mkdtemp
    monkeypatch.chdir(tmp_path)
    # relative for a relative parent, as before Python 3.12
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: os.path.relpath(mkdtemp(**options)))
    with Scratch(Path(), "scratch-") as scratch:
        assert scratch.path.parent == tmp_path
    config = load_config("resnet18", overrides={"runs": "runs", "stores": {"ssd": "."}})
    with open_harness(config, Path("logs")) as harness:
        spec = harness._spec
        assert (spec.log_dir, spec.stores) == (tmp_path / "logs", {"ssd": tmp_path})
        assert spec.profile_cache is not None
        assert spec.profile_cache.is_relative_to(tmp_path / "runs")


def test_temporary_files_leave_a_directory_in_memory_that_the_user_did_not_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = {tmp_path}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("autotune.measure.scratch.is_in_memory", in_memory.__contains__)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_root() == tmp_path
    monkeypatch.delenv("TMPDIR")
    assert temporary_root() == Path("/var/tmp")
    in_memory.clear()
    assert temporary_root() == tmp_path


def test_a_sighup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)
