"""Run directories below `runs/`, complete or broken."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from autotune.records.run_dir import find_active_process
from dashboards.discovery import Unreadable, file_stamps, find_runs, relative_name, split_unreadable, try_read
from dashboards.studies import read_progress, read_study
from tests.dashboards import sample_runs


def test_runs_and_entries_are_told_apart_at_any_depth_the_latest_run_first(tmp_path: Path) -> None:
    old, new = sample_runs.study(tmp_path, "old"), sample_runs.study(tmp_path, "new")
    os.utime(new / "trials.jsonl", (2e9, 2e9))
    entry = sample_runs.nights(tmp_path)
    nightly = sample_runs.study(entry, "n4_chain")
    for path in (old, nightly):
        for name in path.iterdir():
            os.utime(name, (1e9, 1e9))
    (tmp_path / "nightly" / "lock").write_text("1")
    (tmp_path / "nightly" / "nights" / "n4").mkdir(parents=True)
    (tmp_path / "profile.json").write_text("{}")
    index = find_runs(tmp_path)
    assert [relative_name(path, tmp_path) for path in index.runs] == ["new", "nightly/chain/n4_chain", "old"]
    assert [relative_name(path, tmp_path) for path in index.entries] == ["nightly/chain"]


def test_the_running_study_of_an_entry_in_its_first_night_is_found_below_the_lock_of_the_entry(tmp_path: Path) -> None:
    entry = tmp_path / "nightly" / "chain@a100"
    run_dir = entry / "n0_chain"
    (entry / "logs").mkdir(parents=True)
    (tmp_path / "nightly" / "nights").mkdir()
    for place in (entry.parent, entry):
        (place / "lock").write_text("1")
    assert find_runs(tmp_path).runs == (entry,)
    run_dir.mkdir()
    (run_dir / "lock").write_text("1")
    assert find_runs(tmp_path).runs == (run_dir,)


def test_a_run_behind_a_link_is_found(tmp_path: Path) -> None:
    path = sample_runs.study(tmp_path / "disk", "linked")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(path, target_is_directory=True)
    assert [run.name for run in find_runs(tmp_path / "runs").runs] == ["linked"]


def test_copies_that_mlflow_keeps_are_no_runs(tmp_path: Path) -> None:
    sample_runs.study(tmp_path / "mlruns" / "1" / "artifacts", "run")
    assert find_runs(tmp_path).runs == ()


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "none").runs == ()


def test_whatever_cannot_be_read_is_named_with_its_reason(tmp_path: Path) -> None:
    reasons = sample_runs.broken(tmp_path)
    _, broken = split_unreadable(try_read(path, read_study) for path in find_runs(tmp_path).runs)
    unreadable = {place.path.name: place.reason for place in broken}
    assert set(unreadable) == set(reasons) - {"torn"}
    for name, reason in unreadable.items():
        assert reasons[name] in reason
        assert "\n" not in reason


@pytest.mark.parametrize("name", ["trials.jsonl", "graph.json", "costs.json", "config.yaml", "device.json"])
def test_a_file_cut_off_anywhere_in_a_run_is_a_named_run_or_a_whole_page(name: str, tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    whole = (run_dir / name).read_bytes()
    for part in (0, 1, len(whole) // 3, len(whole) - 2):
        (run_dir / name).write_bytes(whole[:part])
        study = try_read(run_dir, read_study)
        assert isinstance(study, Unreadable) or study.headline


def test_a_change_of_any_file_of_a_run_is_seen(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    before = file_stamps(run_dir)
    os.utime(run_dir / "trials.jsonl", (2e9, 2e9))
    assert file_stamps(run_dir) != before


# -- who works there -----------------------------------------------------------------------------------------------


def test_a_run_is_at_work_as_long_as_the_process_of_its_lock_lives(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    assert find_active_process(run_dir) is None
    with subprocess.Popen(["sleep", "60"]) as other:
        (run_dir / "study.json").unlink()
        (run_dir / "lock").write_text(str(other.pid))
        assert find_active_process(run_dir) == other.pid
        other.kill()
        other.wait()
        assert find_active_process(run_dir) is None


def test_a_process_that_went_on_to_another_study_does_not_work_in_the_first(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    sample_runs.begin(run_dir)
    assert find_active_process(run_dir) == os.getpid()
    (run_dir / "study.json").write_text("{}")
    assert find_active_process(run_dir) is None


def test_a_number_that_was_given_to_a_later_process_is_not_at_work(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    sample_runs.begin(run_dir)
    os.utime(run_dir / "lock", (1e9, 1e9))
    assert find_active_process(run_dir) is None


def test_how_far_a_study_is_follows_the_limit_that_ends_it_first(tmp_path: Path, monkeypatch) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    assert read_progress(run_dir, 10, {}).text == "ended after 10 trials"
    sample_runs.begin(run_dir)
    now = read_progress(run_dir, 10, {"trials": 40, "time": "10m"})
    assert now.share == 0.25
    assert "10 trials of 40" in now.text
    assert str(os.getpid()) in now.text
    monkeypatch.setattr("dashboards.studies.find_active_process", lambda run_dir: 1)
    begun = time.time() - 300
    os.utime(run_dir / "lock", (begun, begun))
    assert read_progress(run_dir, 10, {"trials": 40, "time": "10m"}).share == pytest.approx(0.5, abs=0.05)


def test_a_resumed_study_beyond_the_time_of_its_first_session_shows_no_time_limit(tmp_path: Path, monkeypatch) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    sample_runs.begin(run_dir)
    monkeypatch.setattr("dashboards.studies.find_active_process", lambda run_dir: 1)
    begun = time.time() - 300
    os.utime(run_dir / "lock", (begun, begun))
    now = read_progress(run_dir, 10, {"time": "2m"})
    assert (now.running, now.share) == (True, None)
    assert " of " not in now.text
    assert read_progress(run_dir, 10, {"trials": 40, "time": "2m"}).share == 0.25


def test_a_study_that_was_stopped_or_cut_off_says_how_to_go_on(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    (run_dir / "study.json").write_text('{"interrupted": 15}')
    assert read_progress(run_dir, 1, {}).text.startswith(
        "interrupted by signal 15 after 1 trial; go on with: autotune resume"
    )
    (run_dir / "study.json").unlink()
    assert read_progress(run_dir, 2, {}).text.startswith("cut off after 2 trials; go on with: autotune resume")
