"""Paths of a run directory, replacing a file in one step, and the lock."""

import os
from pathlib import Path

import pytest

from autotune.errors import ConfigError, LockedError
from autotune.records.run_dir import RunDir, find_active_process, lock_file, lock_run_dir, with_name, write_text


def test_a_directory_is_recorded_once_it_has_a_config_or_a_trial(tmp_path: Path):
    files = RunDir(tmp_path)
    assert not files.is_recorded
    files.trials.touch()
    assert files.is_recorded


def test_a_write_that_fails_leaves_the_old_text_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_text(path := tmp_path / "file", "old")
    synced: list[tuple[int, str]] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_size, path.read_text())))
    write_text(path, "newer")
    assert synced == [(5, "old")]
    assert path.read_text() == "newer"


def test_two_containers_in_which_one_process_id_writes_one_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, sync = tmp_path / "file", os.fsync

    def write_meanwhile(number: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_text(path, "of the other one")

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    write_text(path, "of this one")
    assert path.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_keeps_its_place_and_the_file_that_it_names_gets_the_text(tmp_path: Path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    (tmp_path / "ahead").symlink_to("later")
    write_text(tmp_path / "ahead", "first")
    assert (tmp_path / "later").read_text() == "first"


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()


def test_a_second_lock_names_the_process_and_the_remedy(tmp_path: Path):
    with lock_run_dir(tmp_path):
        assert find_active_process(tmp_path) == os.getpid()
        refused = pytest.raises(LockedError, match=f"process {os.getpid()} works here; wait for it or go elsewhere")
        with refused, lock_run_dir(tmp_path, "go elsewhere"):
            pass


def test_a_directory_whose_study_failed_has_no_active_process_while_that_process_lives_on(tmp_path: Path):
    with pytest.raises(ConfigError), lock_run_dir(tmp_path):
        raise ConfigError("the plan cannot be written")
    assert find_active_process(tmp_path) is None


def test_a_lock_of_another_machine_names_it_and_is_no_process_of_this_one(tmp_path: Path):
    files = RunDir(tmp_path)
    with lock_file(files.lock, wait=False) as file:
        file.write(f"node7:{os.getpid()}")
        file.flush()
        assert find_active_process(tmp_path) is None
        refused = pytest.raises(LockedError, match=f"process {os.getpid()} of node7 works here; wait for it or go")
        with refused, lock_run_dir(tmp_path, "go elsewhere"):
            pass


def test_a_lock_is_free_again_after_its_block(tmp_path: Path):
    for _ in range(2):
        with lock_file(tmp_path / "lock", wait=False):
            pass


def test_a_run_directory_that_is_the_working_one_or_above_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (below := tmp_path / "runs" / "first" / "front").mkdir(parents=True)
    for place, text in ((below.parent, "."), (below, "..")):
        monkeypatch.chdir(place)
        assert with_name(Path(text)) == tmp_path / "runs" / "first"


def test_a_link_to_a_run_has_the_run_s_own_name(tmp_path: Path):
    (tmp_path / "first").mkdir()
    (tmp_path / "last").symlink_to("first")
    assert with_name(tmp_path / "last") == tmp_path / "first"
