"""What lies under `runs/`, whole or not."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from autotune.records.run_dir import at_work
from dashboards.found import Broken, attempt, called, look, parted, stamp
from dashboards.studies import read, standing
from tests.dashboards import made


def test_runs_and_entries_are_told_apart_at_any_depth_the_latest_run_first(tmp_path: Path) -> None:
    old, new = made.study(tmp_path, "old"), made.study(tmp_path, "new")
    os.utime(new / "trials.jsonl", (2e9, 2e9))
    entry = made.nights(tmp_path)
    nightly = made.study(entry, "n4_chain")
    for path in (old, nightly):
        for name in path.iterdir():
            os.utime(name, (1e9, 1e9))
    (tmp_path / "nightly" / "lock").write_text("1")
    (tmp_path / "nightly" / "nights" / "n4").mkdir(parents=True)
    (tmp_path / "profile.json").write_text("{}")
    found = look(tmp_path)
    assert [called(path, tmp_path) for path in found.runs] == ["new", "nightly/chain/n4_chain", "old"]
    assert [called(path, tmp_path) for path in found.entries] == ["nightly/chain"]


def test_copies_that_mlflow_keeps_are_no_runs(tmp_path: Path) -> None:
    made.study(tmp_path / "mlruns" / "1" / "artifacts", "run")
    assert look(tmp_path).runs == ()


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert look(tmp_path / "none").runs == ()


def test_whatever_cannot_be_read_is_named_with_its_reason(tmp_path: Path) -> None:
    said = made.broken(tmp_path)
    _, broken = parted(attempt(path, read) for path in look(tmp_path).runs)
    found = {one.path.name: one.why for one in broken}
    assert set(found) == set(said) - {"torn"}
    for name, why in found.items():
        assert said[name] in why
        assert "\n" not in why


@pytest.mark.parametrize("name", ["trials.jsonl", "graph.json", "costs.json", "config.yaml", "device.json"])
def test_a_file_cut_off_anywhere_in_a_run_is_a_named_run_or_a_whole_page(name: str, tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    whole = (run_dir / name).read_bytes()
    for part in (0, 1, len(whole) // 3, len(whole) - 2):
        (run_dir / name).write_bytes(whole[:part])
        found = attempt(run_dir, read)
        assert isinstance(found, Broken) or found.headline


def test_a_change_of_any_file_of_a_run_is_seen(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    before = stamp(run_dir)
    os.utime(run_dir / "trials.jsonl", (2e9, 2e9))
    assert stamp(run_dir) != before


# -- who works there -----------------------------------------------------------------------------------------------


def test_a_run_is_at_work_as_long_as_the_process_of_its_lock_lives(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    assert at_work(run_dir) is None
    with subprocess.Popen(["sleep", "60"]) as other:
        (run_dir / "study.json").unlink()
        (run_dir / "lock").write_text(str(other.pid))
        assert at_work(run_dir) == other.pid
        other.kill()
        other.wait()
        assert at_work(run_dir) is None


def test_a_process_that_went_on_to_another_study_does_not_work_in_the_first(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    made.begin(run_dir)
    assert at_work(run_dir) == os.getpid()
    (run_dir / "study.json").write_text("{}")
    assert at_work(run_dir) is None


def test_a_number_that_was_given_to_a_later_process_is_not_at_work(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    made.begin(run_dir)
    os.utime(run_dir / "lock", (1e9, 1e9))
    assert at_work(run_dir) is None


def test_how_far_a_study_is_follows_the_limit_that_ends_it_first(tmp_path: Path, monkeypatch) -> None:
    run_dir = made.study(tmp_path, "run")
    assert standing(run_dir, 10, {}).words == "ended after 10 trials"
    made.begin(run_dir)
    now = standing(run_dir, 10, {"trials": 40, "time": "10m"})
    assert now.share == 0.25
    assert "10 trials of 40" in now.words
    assert str(os.getpid()) in now.words
    monkeypatch.setattr("dashboards.studies.at_work", lambda run_dir: 1)
    begun = time.time() - 300
    os.utime(run_dir / "lock", (begun, begun))
    assert standing(run_dir, 10, {"trials": 40, "time": "10m"}).share == pytest.approx(0.5, abs=0.05)
    assert standing(run_dir, 10, {"time": "2m"}).share == 1.0


def test_a_study_that_was_stopped_or_cut_off_says_how_to_go_on(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    (run_dir / "study.json").write_text('{"interrupted": 15}')
    assert standing(run_dir, 1, {}).words.startswith(
        "interrupted by signal 15 after 1 trial; go on with: autotune resume"
    )
    (run_dir / "study.json").unlink()
    assert standing(run_dir, 2, {}).words.startswith("cut off after 2 trials; go on with: autotune resume")
