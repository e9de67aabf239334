"""StudyCopies of studies for optuna-dashboard: what is in them, and what they leave alone."""

import os
import shutil
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from dashboards.optuna_copies import StudyCopies

FLOAT = {"x": optuna.distributions.FloatDistribution(0, 1)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose fastest trial is over its budget."""
    directory = tmp_path / "runs" / "night.1"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("workload: chain\n")
    study = opened(directory)
    study.set_user_attr("budget", "65%")
    add(study, 1.0, memory=-0.1)
    add(study, 0.5, memory=0.2)
    return directory


def opened(run_dir: Path, name: str = "autotune.chain") -> optuna.Study:
    return optuna.create_study(storage=f"sqlite:///{run_dir}/optuna.db", study_name=name, load_if_exists=True)


def add(study: optuna.Study, value: float, *, memory: float) -> None:
    trial = optuna.trial.create_trial(
        value=value, params={"x": 0.5}, distributions=FLOAT, constraints={"memory": memory}
    )
    study.add_trial(trial)


def copied(copies: StudyCopies, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=copies.storage)


def test_a_study_is_named_as_its_run_and_a_plan_over_its_budget_does_not_lead(run_dir: Path) -> None:
    copies = StudyCopies(run_dir.parent)
    assert copies.refresh() == []
    study = copied(copies, "night.1")
    assert study.user_attrs == {"budget": "65%"}
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.best_trial.number == 0
    assert [trial.state for trial in opened(run_dir).trials] == [TrialState.COMPLETE] * 2


def test_trials_that_are_new_are_added_under_their_own_numbers_once_they_end(run_dir: Path) -> None:
    (run_dir / "lock").write_text(str(os.getpid()))
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    study = opened(run_dir)
    running = study.ask(FLOAT)
    add(study, 0.8, memory=-0.1)
    later(run_dir, 1)
    copies.refresh()
    assert len(copied(copies, "night.1").trials) == 2
    study.tell(running, 0.9)
    later(run_dir, 2)
    copies.refresh()
    assert [trial.value for trial in copied(copies, "night.1").trials] == [1.0, 0.5, 0.9, 0.8]


def test_a_trial_that_no_process_finishes_is_copied_as_failed_until_a_session_finishes_it(run_dir: Path) -> None:
    study = opened(run_dir)
    running = study.ask(FLOAT)
    study.enqueue_trial({"x": 0.1})
    add(study, 0.8, memory=-0.1)
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    assert [trial.value for trial in copied(copies, "night.1").trials] == [1.0, 0.5, None, None, 0.8]
    study.tell(running, 0.9)
    later(run_dir, 1)
    copies.refresh()
    trials = copied(copies, "night.1").trials
    assert [trial.value for trial in trials] == [1.0, 0.5, 0.9, None, 0.8]
    assert trials[3].state is TrialState.FAIL


def test_the_confirmed_winner_leads_and_a_plan_that_was_stopped_early_is_pruned(run_dir: Path) -> None:
    study = opened(run_dir)
    add(study, 0.7, memory=-0.1)  # lucky: its plan was slower when re-measured
    add(study, 0.6, memory=-0.1)
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    assert copied(copies, "night.1").best_trial.number == 3
    stopped = optuna.trial.create_trial(value=0.65, user_attrs={"outcome": "stopped_early"})
    study.add_trial(stopped)
    add(study, 0.9, memory=-0.1)
    study.set_user_attr("winner", 5)
    later(run_dir, 1)
    copies.refresh()
    shown = copied(copies, "night.1")
    assert shown.best_trial.number == 5
    assert [trial.state.name for trial in shown.trials] == ["COMPLETE", *["PRUNED"] * 4, "COMPLETE"]
    assert shown.trials[4].value == 0.65


def test_a_second_study_of_a_run_has_a_name_of_its_own(run_dir: Path) -> None:
    add(opened(run_dir, "autotune.chain.other"), 0.7, memory=-1.0)
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    assert optuna.get_all_study_names(copies.storage) == ["night.1", "night.1 (2)"]


def test_a_run_that_is_made_anew_under_its_name_replaces_the_copy_and_a_deleted_one_has_none(run_dir: Path) -> None:
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    (run_dir / "optuna.db").unlink()
    study = opened(run_dir)
    for value in (0.4, 0.3, 0.2):
        add(study, value, memory=-0.1)
    later(run_dir, 1)
    copies.refresh()
    assert [trial.value for trial in copied(copies, "night.1").trials] == [0.4, 0.3, 0.2]
    shutil.rmtree(run_dir)
    copies.refresh()
    assert optuna.get_all_study_names(copies.storage) == []


def test_a_copy_that_somebody_deleted_on_a_page_does_not_end_the_updates_when_its_run_is_deleted(run_dir: Path) -> None:
    copies = StudyCopies(run_dir.parent)
    copies.refresh()
    optuna.delete_study(study_name="night.1", storage=copies.storage)
    shutil.rmtree(run_dir)
    assert copies.refresh() == []


def test_a_file_that_is_no_database_is_named_once_and_the_others_are_copied(run_dir: Path) -> None:
    torn = run_dir.parent / "torn"
    torn.mkdir()
    (torn / "config.yaml").write_text("")
    (torn / "optuna.db").write_bytes(b"not a database at all, but long enough to be looked at" * 10)
    copies = StudyCopies(run_dir.parent)
    (broken,) = copies.refresh()
    assert broken.path == torn / "optuna.db"
    assert "not a database" in broken.reason
    assert optuna.get_all_study_names(copies.storage) == ["night.1"]
    assert copies.refresh() == []


def later(run_dir: Path, seconds: int) -> None:
    """Two changes within the clock's grain would be one."""
    (path,) = run_dir.glob("optuna.db")
    os.utime(path, (2e9 + seconds, 2e9 + seconds))
