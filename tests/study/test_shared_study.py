"""Copies of Optuna studies in a database that several runs share."""

import sqlite3
import threading
from pathlib import Path

import optuna
import pytest

from autotune.api.launch import _share_within
from autotune.errors import ConfigError
from autotune.records.run_dir import RunDir
from autotune.study.session import tune
from autotune.study.shared_study import share_study
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import make_config


def run(run_dir: Path, trials: int) -> None:
    tune(make_config(run_dir.parent, trials=trials), FakeRunner(), run_dir)


def count_trials(address: str) -> list[int]:
    return sorted(summary.n_trials for summary in optuna.get_all_study_summaries(address))


def test_runs_of_one_workload_are_studies_of_their_own_and_later_sessions_add_their_trials(tmp_path: Path):
    address = f"sqlite:///{tmp_path}/shared.db"
    runs = [tmp_path / machine / "runs" / "same-name" for machine in ("one", "other")]
    for run_dir in runs:
        run(run_dir, 3)
        assert "trials copied to sqlite:///" in share_study(address, run_dir)
    counts = [len(RunDir(run_dir).trials.read_bytes().splitlines()) for run_dir in runs]
    assert count_trials(address) == sorted(counts)
    assert share_study(address, runs[0]).startswith("0 trials copied")
    run(runs[0], 5)
    share_study(address, runs[0])
    added = len(RunDir(runs[0]).trials.read_bytes().splitlines())
    assert added > counts[0]
    assert count_trials(address) == sorted([added, counts[1]])
    (own,) = optuna.get_all_study_summaries(f"sqlite:///{RunDir(runs[0]).optuna}")
    name = next(summary.study_name for summary in optuna.get_all_study_summaries(address) if summary.n_trials == added)
    assert name.startswith(f"{own.study_name}.same-name.")
    copy = optuna.load_study(study_name=name, storage=address)
    original = optuna.load_study(study_name=own.study_name, storage=f"sqlite:///{RunDir(runs[0]).optuna}")
    assert [(trial.number, trial.values, trial.params) for trial in copy.trials] == [
        (trial.number, trial.values, trial.params) for trial in original.trials
    ]
    assert copy.user_attrs == original.user_attrs


def test_a_trial_that_waits_keeps_no_later_trial_from_the_copy_and_changes_no_number(tmp_path: Path):
    """An interrupted trial is enqueued again, and trials that Optuna does not suggest may end before it runs."""
    run_dir, address = tmp_path / "run", f"sqlite:///{tmp_path}/shared.db"
    run(run_dir, 3)
    original = optuna.load_study(study_name=None, storage=f"sqlite:///{RunDir(run_dir).optuna}")
    original.enqueue_trial({"recompute": "keep"}, user_attrs={"retry_of": 2})
    original.add_trial(optuna.trial.create_trial(value=0.5))
    share_study(address, run_dir)
    copy = optuna.load_study(study_name=None, storage=address)
    finished = {trial.number: trial.values for trial in original.trials if trial.state.is_finished()}
    complete = [trial for trial in copy.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    assert {trial.number: trial.values for trial in complete} == finished
    assert share_study(address, run_dir).startswith("0 trials copied")


def test_a_study_below_a_directory_with_characters_of_an_address_is_kept_and_copied(tmp_path: Path):
    run_dir = tmp_path / "50%41 {x}" / "what?"
    run(run_dir, 3)
    assert RunDir(run_dir).optuna.is_file()
    address = f"sqlite:///{tmp_path}/shared.db"
    assert "trials copied to sqlite:///" in share_study(address, run_dir)
    assert count_trials(address) == [len(RunDir(run_dir).trials.read_bytes().splitlines())]


def test_a_database_that_cannot_be_used_is_a_line_without_secrets_and_no_error(tmp_path: Path):
    assert share_study("sqlite:///x.db", tmp_path / "run").startswith("nothing to copy to sqlite:///x.db: ")
    run(tmp_path / "run", 3)
    line = share_study(f"sqlite:///{tmp_path}/absent/shared.db", tmp_path / "run")
    assert line.startswith(f"not copied to sqlite:///{tmp_path}/absent/shared.db: ")
    assert line.endswith("; the next session copies what is missing")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
    assert "the database holds the tables of another program" in share_study(
        f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    )
    line = share_study("postgresql://me:S3CRET@127.0.0.1:1/db", tmp_path / "run")
    assert line.startswith("not copied to postgresql://me:***@127.0.0.1:1/db: ")
    assert "S3CRET" not in line


def test_an_address_with_a_password_is_refused_in_a_config(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"optuna_storage: contains a password, .* leave it out and set PGPASSWORD$"):
        make_config(tmp_path, optuna_storage="postgresql://me:secret@server/db")


def test_a_database_that_stops_answering_does_not_keep_a_study_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = threading.Event()
    monkeypatch.setattr("autotune.study.shared_study.share_study", lambda *_: answers.wait())
    line = _share_within(0.05, "postgresql://user:secret@host/studies", tmp_path)
    answers.set()
    assert line.startswith("not copied to postgresql://")
    assert "secret" not in line
    assert line.endswith("no complete answer within 0.05 s; the next session copies what is missing")
