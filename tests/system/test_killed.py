"""kill -9 of a session at every point of every record, and of a worker in the middle of a trial: nothing is lost or run twice."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from autotune.measure.children import ChildRole
from autotune.records.measurement import Outcome
from autotune.records.trial import load_trials
from autotune.study.session import tune
from autotune.study.verdicts.ranking import plan_hash
from tests.measure.harness.test_run import harness, kill_at_its_turn
from tests.study.test_session import configured, lines, stored

ROOT = Path(__file__).parents[2]
POINTS = ["measured", "torn", "recorded", "told"]
"""A session dies before its trial's line is written, with half of it on disk, before Optuna is told, or after that."""

DRIVER = """
import os, signal, sys
from pathlib import Path

from autotune.records import trial
from autotune.study.verdicts.ranking import plan_hash
from autotune.study.trial_store import TrialStore
from autotune.study.session import tune
from autotune.testing.fake_runner import FakeRunner
from tests.study.test_session import configured

directory = Path(sys.argv[1])
records = directory / "run" / "trials.jsonl"
append, record = trial.append_line, TrialStore.record


def note(name, text):
    with open(directory / name, "a") as file:
        file.write(text + "\\n")


def whole():
    kept = records.read_bytes() if records.exists() else b""
    return kept[: kept.rfind(b"\\n") + 1]


def session(point):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def appending(path, one):
        if point in ("measured", "torn") and one.plan is not None and one.kind != "repeat" and one.was_run:
            note("lost", plan_hash(one.plan))
        if point == "measured":
            die()
        before = len(whole())
        append(path, one)
        if point == "torn":
            os.truncate(path, (before + path.stat().st_size) // 2)
        if point in ("torn", "recorded"):
            die()

    def recording(self, *given):
        record(self, *given)
        if point == "told":
            die()

    trial.append_line, TrialStore.record = appending, recording
    runner = FakeRunner(before_measure=lambda runner: note("measured", runner.measured[-1]))
    tune(configured(directory, trials=5), runner, directory / "run")


for point in sys.argv[2:]:
    before = whole()
    child = os.fork()
    if child == 0:
        session(point)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert whole().startswith(before), f"{point}: a finished trial is lost"
    print(point, ended, flush=True)
"""


@pytest.mark.slow
def test_killed_at_every_point_of_every_record_no_finished_trial_is_lost_or_run_again(tmp_path: Path):
    """One driver forks a session for each kill, so that what sessions import is imported once."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *POINTS * 4, "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    ended = [line.split() for line in done.stdout.splitlines()]
    killed = Counter(point for point, code in ended if code == "-9")
    assert min(killed[point] for point in POINTS) >= 3
    assert ended[-1] == ["none", "0"]

    trials = load_trials(tmp_path / "run" / "trials.jsonl")
    assert len(lines(tmp_path / "run" / "trials.jsonl")) == len(trials)
    recorded = Counter(plan_hash(one.plan) for one in trials if one.plan and one.kind != "repeat" and one.was_run)
    # what ran more often than it was recorded ran in a session that was killed before it could write the line
    assert Counter(lines(tmp_path / "measured")) - recorded == Counter(lines(tmp_path / "lost"))
    searched = Counter(plan_hash(one.plan) for one in trials if one.plan and one.kind not in ("repeat", "confirm"))
    ran = Counter({plan: count for plan, count in searched.items() if plan in recorded})
    assert set(ran.values()) == {1}
    finished = [one.number for one in stored(tmp_path).trials if one.state.name == "COMPLETE"]
    assert finished == [one.number for one in trials]
    assert not [one for one in stored(tmp_path).trials if one.state.name == "RUNNING"]


@pytest.mark.slow
def test_a_worker_killed_in_a_trial_is_that_trials_outcome_and_the_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planners = {"recompute": ["segments"], "order": ["traced"], "reorder": ["keep"]}
    monkeypatch.setattr("autotune.study.runner.MAX_REPEATS", 0)  # on a busy machine the second turn would be a repeat
    monkeypatch.setattr("autotune.study.verdicts.confirm.MIN_ROUNDS", 1)  # a round takes as long as a trial
    monkeypatch.setattr("autotune.study.verdicts.confirm.MAX_ROUNDS", 1)
    config = configured(tmp_path, trials=3, budget="95%", samples=2, planners=planners)
    with harness(tmp_path, "wide", {"batch": 1 << 14}) as runner:
        runner.prepare()
        kill_at_its_turn(monkeypatch, runner, ChildRole.PLAN_SECONDS, 1, plan=2)
        with monkeypatch.context() as patch:
            patch.setattr(runner, "close", lambda: None)  # so that another session need not prepare again
            first = tune(config, runner, tmp_path / "run")
        second = tune(config, runner, tmp_path / "run")
    killed = [one for one in first.trials if one.measurement.outcome is Outcome.CRASHED]
    assert [one.measurement.detail.startswith("killed by SIGKILL") for one in killed] == [True]
    kinds = [one.kind for one in first.trials[killed[0].number :]]
    assert (kinds[0], set(kinds[1:])) == ("planner", {"confirm"})
    assert first.best is not None
    assert first.best.plan != killed[0].plan
    assert stored(tmp_path).trials[killed[0].number].constraints["memory"] > 0
    assert second.trials == first.trials
