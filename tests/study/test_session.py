"""The study on a runner without a device: what is asked for, in which turn, and what survives."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from autotune.errors import (
    ConfigError,
    DeviceLostError,
    InfeasibleError,
    LockedError,
    NumericsError,
    OutOfTimeError,
    PlansFailedError,
    StoreError,
    WorkerError,
)
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.early_stop import MIN_STEPS
from autotune.planners.candidates import Candidate, DevicePlanning
from autotune.predict.bounds import seconds_lower_bound
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.budget import STEP_TOLERANCE, tolerated_bytes
from autotune.records.config import Config, load_config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import lock_run_dir
from autotune.records.trial import Trial, load_trials
from autotune.report.tables import confirmed_rows, trial_rows, trial_verdict
from autotune.study.events import Disturbed, Event, Finished, Logged, Measuring, PhaseStarted, Resolved
from autotune.study.recorded_run import RecordedRun, read_session_end
from autotune.study.runner import MAX_FRUITLESS, MAX_REPEATS, QuietRunner
from autotune.study.session import StudyResult, tune
from autotune.study.verdicts.ranking import NOTABLE_SHARE, TIE_SHARE, plan_hash, ratio_noise
from autotune.testing.fake_runner import DEVICE, FLOOR_BYTES, FakeRunner
from autotune.testing.graphs import training_chain
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]


QUICK = {"recompute": ["keep", "segments"], "reorder": ["keep"], "order": ["traced", "list_by_bytes"]}
"""Planners that answer in milliseconds: the study is looked at here, not they."""


def configured(directory: Path, **fields: object) -> Config:
    given = {"trials": 8, "plans": str(directory / "plans"), "planners": QUICK, **fields}
    return load_config("resnet18", overrides=given)


def run(
    directory: Path,
    runner: FakeRunner | None = None,
    events: list[Event] | None = None,
    *,
    lasting: bool = False,
    **fields: object,
) -> StudyResult:
    """Run a study, by default without what takes most of the time: Optuna's database (`lasting`) and moves."""
    listener = (lambda event: None) if events is None else events.append
    config = configured(directory, **{"moves": False, **fields})
    return tune(config, runner or FakeRunner(), directory / "run", progress=listener, lasting=lasting)


def stored(directory: Path) -> optuna.Study:
    """What someone sees who knows nothing of autotune."""
    return optuna.load_study(study_name=None, storage=f"sqlite:///{directory}/run/optuna.db")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FakeRunner, StudyResult, list[Event]]:
    """One whole study, looked at from many sides."""
    directory, runner, events = tmp_path_factory.mktemp("told"), FakeRunner(), list[Event]()
    return directory, runner, run(directory, runner, events, trials=14, lasting=True, moves=True), events


def test_baseline_then_smallest_then_planners_then_moves_and_sampler_then_confirmation(told):
    _, _, result, events = told
    kinds = [trial.kind for trial in result.trials]
    assert kinds[:3] == ["baseline", "smallest", "planner"]
    assert kinds[-1] == "confirm"
    asked = [kind for kind in kinds[2:] if kind in ("planner", "move", "search")]
    planned = asked.count("planner")
    assert set(asked[:planned]) == {"planner"}
    assert set(asked[planned:]) == {"move", "search"}
    assert len([kind for kind in kinds if kind != "confirm"]) == 14
    phases = [event.phase for event in events if isinstance(event, PhaseStarted)]
    assert phases == ["prepare", "baseline", "smallest", "planners", "search", "confirm"]


def test_smallest_plan_has_the_lowest_estimate_of_all(told):
    trials = told[2].trials
    assert min(trial.estimate.peak_bytes for trial in trials if trial.estimate) == trials[1].estimate.peak_bytes


def test_estimates_over_the_budget_never_reach_the_runner(told):
    _, runner, result, _ = told
    over = [trial for trial in result.trials if trial.estimate and trial.estimate.peak_bytes > result.budget_bytes]
    assert over
    assert not {plan_hash(trial.plan) for trial in over} & set(runner.measured)
    assert all(trial.measurement.outcome is Outcome.OVER_BUDGET for trial in over)
    assert set(runner.budgets) == {tolerated_bytes(result.budget_bytes, STEP_TOLERANCE)}


def test_no_plan_runs_twice_but_to_be_confirmed(told):
    _, runner, result, _ = told
    confirmed = [plan_hash(trial.plan) for trial in result.trials if trial.kind == "confirm"]
    searched = runner.measured[: len(runner.measured) - len(confirmed)]
    assert len(searched) == len(set(searched))
    assert runner.measured[len(searched) :] == confirmed
    assert runner.renewed == len(confirmed)


def test_a_plan_seen_before_is_told_what_it_did_then(told):
    trials = told[2].trials
    repeats = [trial for trial in trials if trial.kind == "repeat"]
    assert repeats
    for repeat in repeats:
        first = next(trial for trial in trials if trial.plan == repeat.plan)
        assert repeat.measurement.step_seconds[:8] == first.measurement.step_seconds
        assert f"trial {first.number}" in repeat.measurement.detail


def test_plain_optuna_opens_the_study_and_finds_every_trial(told):
    directory, _, result, _ = told
    study = stored(directory)
    assert [trial.number for trial in study.trials] == [trial.number for trial in result.trials]
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert study.metric_names == ["time_ratio"]
    for ours, theirs in zip(result.trials, study.trials, strict=True):
        assert theirs.user_attrs["outcome"] == ours.measurement.outcome
        assert set(theirs.constraints) == {"memory", "numerics"}
        fits = ours.measurement.outcome in (Outcome.OK, Outcome.STOPPED_EARLY) and ours.kind != "baseline"
        assert all(violation <= 0 for violation in theirs.constraints.values()) == fits
    # of plans within the noise the smallest wins, whichever of them Optuna saw first
    best = result.trials[study.best_trial.number].measurement
    apart = ratio_noise(best) + ratio_noise(result.best.measurement)
    assert study.best_value == pytest.approx(result.best.measurement.time_ratio, rel=apart)


def test_a_knob_is_a_parameter_only_with_its_planner(told):
    for trial in stored(told[0]).trials:
        for key in trial.params:
            kind, _, knob = key.partition(".")
            assert not knob or knob.startswith(trial.params[kind] + ".")


def test_the_winner_has_fresh_numbers_fits_and_is_written_twice(told):
    directory, _, result, _ = told
    assert result.best.kind == "confirm"
    assert result.best.measurement.step_charged_bytes <= result.budget_bytes
    assert result.plan_path == directory / "plans" / "run.json"
    file = planfile.read(result.plan_path)
    graph, costs = planfile.read_records(result.plan_path, file)
    assert (graph.digest, costs.matches(graph)) == (file.graph_digest, True)
    assert file == planfile.read(directory / "run" / "plan.json")
    assert (file.plan, file.settings) == (result.best.plan, result.best.settings)
    assert file.budget_bytes == result.budget_bytes
    assert file.measurement == result.best.measurement
    assert file.verified == "bit-equal to eager"


def test_optunas_study_names_the_confirmed_winner(told):
    directory, _, result, _ = told
    assert stored(directory).user_attrs["winner"] == result.best.number


def test_the_run_directory_holds_what_a_report_needs(told):
    names = {path.name for path in (told[0] / "run").iterdir()}
    assert names >= {
        "config.yaml",
        "graph.json",
        "costs.json",
        "device.json",
        "trials.jsonl",
        "study.json",
        "optuna.db",
    }
    assert load_config(str(told[0] / "run" / "config.yaml")) == configured(told[0], trials=14)


def test_listener_hears_every_trial_once_and_each_new_leader(told):
    _, _, result, events = told
    heard = [event for event in events if isinstance(event, Finished)]
    assert [event.trial for event in heard] == list(result.trials)
    assert not any(event.resumed for event in heard)
    assert next(event.trial.number for event in heard if event.leads) == 1


def test_listener_hears_which_plan_is_run_before_it_is_and_of_none_that_is_not(told):
    _, _, result, events = told
    run_at = {event.trial.number: at for at, event in enumerate(events) if isinstance(event, Measuring)}
    ended_at = {event.trial.number: at for at, event in enumerate(events) if isinstance(event, Finished)}
    assert set(run_at) == {
        trial.number for trial in result.trials if trial.kind not in ("baseline", "repeat") and trial.was_run
    }
    assert all(at < ended_at[number] for number, at in run_at.items())
    assert all(
        event.trial.plan == result.trials[event.trial.number].plan for event in events if isinstance(event, Measuring)
    )


def test_percentage_is_of_what_eager_needs_without_its_allocators_waste(tmp_path):
    wasteful = FakeRunner(overhead=0.3)
    result = run(tmp_path, wasteful, budget="80%", trials=3)
    assert result.budget_bytes == int(0.8 * result.baseline.measurement.step_peak_bytes)


def test_what_no_plan_can_be_faster_than_is_proved_for_the_budget_itself_not_for_what_planners_aim_at(tmp_path):
    runner = FakeRunner(overhead=0.2)
    result = run(tmp_path, runner, trials=6)
    proved, aimed = (
        seconds_lower_bound(runner.graph, runner.costs, room)
        for room in (result.budget_bytes, int(result.budget_bytes / 1.2))
    )
    assert proved < aimed
    assert {trial.estimate.lower_bound_seconds for trial in result.trials if trial.plan} == {proved}


def test_planners_aim_lower_after_a_wasteful_plan(tmp_path):
    result = run(tmp_path, FakeRunner(overhead=0.2), budget="70%", trials=6)
    planned = [trial for trial in result.trials if trial.kind == "planner"]
    assert planned
    assert all(trial.estimate.peak_bytes * 1.2 <= result.budget_bytes for trial in planned)


def test_planners_are_asked_again_where_all_that_they_answered_was_charged_too_much(tmp_path, monkeypatch):
    def only_the_smallest_wastes_nothing(runner: FakeRunner) -> None:
        runner.overhead = 0.0 if len(runner.measured) == 1 else 0.05

    monkeypatch.setattr("autotune.study.session.PLANNED", 1)
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take CP-SAT seconds each
    runner = FakeRunner(before_measure=only_the_smallest_wastes_nothing)
    planners = {"recompute": ["greedy"], "reorder": ["keep"], "order": ["traced"], "update": ["at_end"]}
    result = run(tmp_path, runner, budget="70%", trials=8, planners=planners)
    first, second = [trial for trial in result.trials if trial.kind == "planner"]
    assert [trial.measurement.outcome for trial in (first, second)] == [Outcome.OVER_BUDGET, Outcome.OK]
    assert second.estimate.peak_bytes < first.estimate.peak_bytes <= result.budget_bytes


def test_a_resumed_study_asks_the_planners_for_less_where_all_that_they_answered_before_was_charged_too_much(
    tmp_path, monkeypatch
):
    def only_the_smallest_wastes_nothing(runner: FakeRunner) -> None:
        runner.overhead = 0.0 if len(runner.measured) == 1 else 0.05

    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take CP-SAT seconds each
    runner = FakeRunner(before_measure=only_the_smallest_wastes_nothing)
    run(tmp_path, runner, budget="70%", trials=3, planners=GREEDY)
    result = run(tmp_path, FakeRunner(overhead=0.05), budget="70%", trials=4, planners=GREEDY)
    first, second = [trial for trial in result.trials if trial.kind == "planner"]
    assert [trial.measurement.outcome for trial in (first, second)] == [Outcome.OVER_BUDGET, Outcome.OK]
    assert second.target_bytes < first.target_bytes


def test_a_budget_that_another_plan_than_the_smallest_meets_is_tuned_and_one_that_none_meets_is_refused(tmp_path):
    class Coarse(DevicePlanning):
        """Its smallest plan changes nothing."""

        def find_smallest(self):
            plan = Plan.traced(self.graph)
            return Candidate({}, plan, simulate(self.graph, lower(self.graph, plan), self.costs))

    result = tune(configured(tmp_path, trials=4), FakeRunner(), tmp_path / "run", planning=Coarse, lasting=False)
    first = result.trials[1]
    assert first.kind == "smallest"
    assert first.plan != Plan.traced(FakeRunner().graph)
    assert first.estimate.peak_bytes <= result.budget_bytes
    with pytest.raises(InfeasibleError, match="with the smallest plan"):
        tune(configured(tmp_path, budget="20%"), FakeRunner(), tmp_path / "low", planning=Coarse, lasting=False)


def test_answers_that_cannot_be_laid_out_are_measured_only_where_none_can(tmp_path):
    class Tight(DevicePlanning):
        """All layouts but those of the chosen plans take twice their bytes."""

        def estimate_layout(self, candidate):
            wasteful = replace(
                candidate.estimate,
                layout_bytes=2 * candidate.estimate.peak_bytes,
                layout_live_bytes=candidate.estimate.peak_bytes,
            )
            return candidate.estimate if candidate.plan in good else wasteful

    good: list[Plan] = []
    config = configured(tmp_path, trials=6, moves=False)
    none = tune(config, runner := FakeRunner(), tmp_path / "run", planning=Tight, lasting=False)
    planned = [trial for trial in none.trials if trial.kind == "planner"]
    assert len(planned) == 1
    assert plan_hash(planned[0].plan) in runner.measured
    good += [trial.plan for trial in run(tmp_path / "others", trials=4).trials if trial.kind == "planner"][1:]
    some = tune(config, FakeRunner(), tmp_path / "again", planning=Tight, lasting=False)
    assert {trial.plan for trial in some.trials if trial.kind == "planner"} <= set(good)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.OUT_OF_MEMORY,
        pytest.param(Outcome.TIMEOUT, marks=pytest.mark.slow),
        pytest.param(Outcome.CRASHED, marks=pytest.mark.slow),
        Outcome.DISK_FULL,
    ],
)
def test_a_failure_is_told_complete_with_violated_memory_and_predicted_time(tmp_path, outcome):
    failing: list[str] = []

    def fail_once(plan: Plan) -> Outcome:
        failing.append(plan_hash(plan))
        return outcome if failing[1:2] == [plan_hash(plan)] else Outcome.OK

    result = run(tmp_path, FakeRunner(outcome_of=fail_once), trials=5, lasting=True)
    failed = next(trial for trial in result.trials if trial.measurement.outcome is outcome)
    theirs = stored(tmp_path).trials[failed.number]
    assert theirs.state is optuna.trial.TrialState.COMPLETE
    assert theirs.constraints["memory"] > 0
    assert theirs.user_attrs["imputed"] is True
    assert theirs.value == pytest.approx(failed.estimate.seconds / sum(FakeRunner().costs.seconds))
    assert result.best.plan != failed.plan


def test_a_store_that_fails_one_plan_leaves_the_study_the_others_and_a_resumed_one_does_not_try_it_again(tmp_path):
    def no_room_for_the_smallest(plan: Plan) -> Outcome:
        known.append(plan)
        if plan == known[0]:
            raise StoreError("ssd store: /disk cannot take 3.0 GiB")
        return Outcome.OK

    known: list[Plan] = []
    result = run(tmp_path, FakeRunner(outcome_of=no_room_for_the_smallest), trials=4)
    smallest = result.trials[1]
    assert smallest.measurement.outcome is Outcome.CRASHED
    assert smallest.measurement.detail == "ssd store: /disk cannot take 3.0 GiB"
    assert result.best is not None
    run(tmp_path, again := FakeRunner(), trials=6)
    assert plan_hash(smallest.plan) not in again.measured


def test_a_wrong_result_never_wins(tmp_path):
    seen: list[Plan] = []

    def error(plan: Plan) -> float:
        seen.append(plan)
        return 0.0 if plan == seen[0] else 1e-3

    result = run(tmp_path, FakeRunner(error_of=error), lasting=True)
    assert result.best.plan == result.trials[1].plan == seen[0]
    violated = [trial for trial in stored(tmp_path).trials if trial.constraints["numerics"] > 0]
    assert len(violated) >= 2


def test_all_wrong_is_a_numerics_error(tmp_path):
    with pytest.raises(NumericsError, match=r"no plan passed: results differ .* by 0.001"):
        run(tmp_path, FakeRunner(error_of=lambda plan: 1e-3))
    assert not (tmp_path / "plans").exists()


def test_a_place_where_plans_cannot_be_written_is_told_before_anything_is_prepared(tmp_path):
    class Unprepared(FakeRunner):
        def prepare(self):
            raise AssertionError("it was told too late")

    (tmp_path / "plans").touch()
    runner = Unprepared()
    with pytest.raises(ConfigError, match=r"plans is not a directory; name another directory by plans: in the config"):
        run(tmp_path, runner)
    assert runner.closed == 1


def test_a_plan_that_can_be_written_only_beside_its_records_is_told_where_and_the_report_is_made(tmp_path):
    def in_the_way(runner: FakeRunner) -> None:
        (tmp_path / "plans").touch()

    reported: list[Path] = []
    runner = FakeRunner(before_measure=in_the_way)
    with pytest.raises(ConfigError, match=r"plans/run.json: cannot write the plan .*; copy it from .*/run/plan.json"):
        tune(
            configured(tmp_path, trials=3), runner, tmp_path / "run",
            write_report=lambda run_dir: reported.append(run_dir) or run_dir,
        )  # fmt: skip
    assert planfile.read(tmp_path / "run" / "plan.json").plan is not None
    assert reported == [tmp_path / "run"]


def test_a_runner_that_fails_to_close_costs_neither_the_plan_nor_the_summary_nor_the_report(tmp_path):
    class Unclosable(FakeRunner):
        def close(self):
            raise WorkerError("the device does not answer")

    reported: list[Path] = []
    with pytest.raises(WorkerError, match="the device does not answer"):
        tune(
            configured(tmp_path, trials=3, moves=False), Unclosable(), tmp_path / "run", lasting=False,
            write_report=lambda run_dir: reported.append(run_dir) or run_dir,
        )  # fmt: skip
    assert planfile.read(tmp_path / "plans" / "run.json").plan is not None
    assert json.loads((tmp_path / "run" / "study.json").read_text())["best"] is not None
    assert reported == [tmp_path / "run"]


def lose_the_device(runner: FakeRunner) -> None:
    if len(runner.measured) == 2:
        raise DeviceLostError("no device of the class is left")


@pytest.mark.parametrize(
    ("runner", "error", "interrupted"),
    [
        (FakeRunner(outcome_of=lambda plan: Outcome.OUT_OF_MEMORY), InfeasibleError, 0),
        (FakeRunner(outcome_of=lambda plan: Outcome.CRASHED), PlansFailedError, 0),
        (FakeRunner(before_measure=lose_the_device), DeviceLostError, None),
    ],
    ids=["infeasible", "failed", "lost"],
)
def test_a_search_that_an_error_cut_short_is_recorded_as_such_and_one_that_found_no_plan_as_ended(
    tmp_path, runner, error, interrupted
):
    with pytest.raises(error):
        run(tmp_path, runner, trials=3)
    assert json.loads((tmp_path / "run" / "study.json").read_text())["interrupted"] == interrupted


def test_infeasible_names_the_op_the_lowest_peak_and_the_next_move(tmp_path):
    runner = FakeRunner()
    with pytest.raises(InfeasibleError, match=r"needs \d.* at (dw|dx|loss|dloss|fwd)\d* .*20%.*--store ssd=DIR"):
        run(tmp_path, runner, budget="20%")
    assert runner.measured == []
    assert [trial.kind for trial in load_trials(tmp_path / "run" / "trials.jsonl")] == ["baseline"]
    assert not (tmp_path / "plans").exists()


def test_a_budget_below_the_floor_is_infeasible(tmp_path):
    with pytest.raises(InfeasibleError, match="of the whole process and leaves the step 0 B; step:500000B is"):
        run(tmp_path, budget="500000B")


def test_bytes_bind_the_whole_process(tmp_path):
    runner = FakeRunner()
    result = run(tmp_path, runner, budget="5000000B")
    assert result.budget_bytes == 5_000_000 - FLOOR_BYTES
    assert set(runner.budgets) == {5_000_000 - FLOOR_BYTES}


def test_a_baseline_that_does_not_fit_is_skipped_and_simulated(tmp_path):
    class NoBaseline(FakeRunner):
        def baseline(self):
            raise AssertionError("it does not fit")

    events = list[Event]()
    result = run(tmp_path, NoBaseline(baseline_fits=False), events)
    assert result.baseline.measurement.outcome is Outcome.OUT_OF_MEMORY
    traced_peak = 4_605_001  # 0.5 MB static, 39 activations, two gradients, one of a weight, the loss
    assert result.budget_bytes == int(0.65 * traced_peak)
    assert result.best is not None
    assert [event.profile_ratio for event in events if isinstance(event, Resolved)] == [None]


def test_listener_hears_how_the_profile_compares_with_the_plain_step(tmp_path):
    class Busy(FakeRunner):
        def baseline(self):
            seen = super().baseline()
            return replace(seen, step_seconds=tuple(seconds / 3 for seconds in seen.step_seconds))

    events = list[Event]()
    run(tmp_path, Busy(), events, trials=2)
    assert [event.profile_ratio for event in events if isinstance(event, Resolved)] == [pytest.approx(3.0, rel=0.01)]


def test_pareto_minimises_bytes_and_time(tmp_path):
    result = run(tmp_path, FakeRunner(spread=0.0), objective="pareto", budget="90%", lasting=True)
    study = stored(tmp_path)
    assert study.metric_names == ["step_bytes", "time_ratio"]
    assert len(study.trials) == len(result.trials)
    smallest = min(study.best_trials, key=lambda trial: trial.values[0])
    assert smallest.values[0] == result.trials[1].measurement.step_charged_bytes
    assert all(trial.values[1] <= smallest.values[1] for trial in study.best_trials)


def test_a_store_adds_offload_to_the_search(tmp_path):
    result = run(tmp_path, FakeRunner(store=True), budget="45%", lasting=True)
    assert result.best.plan.offload
    assert "offload.window.store" in stored(tmp_path).trials[result.best.number].params


def test_a_search_without_gain_stops_by_itself(tmp_path):
    one = {"order": ["traced"], "update": ["at_end"], "recompute": ["keep"]}
    result = run(tmp_path, trials=None, budget="120%", planners=one, patience=2)
    assert [trial.kind for trial in result.trials].count("repeat") == 8


def test_a_plan_that_cannot_win_is_stopped_early_and_told_with_what_was_seen_of_it(tmp_path):
    known: list[Plan] = []

    def all_but_two_are_slow(plan: Plan) -> float:
        known.append(plan)
        return 1.01 if plan in known[:2] else 1.5

    runner = FakeRunner(slowdown_of=all_but_two_are_slow)
    result = run(tmp_path, runner, trials=6, lasting=True)
    stopped = [trial for trial in result.trials if trial.measurement.outcome is Outcome.STOPPED_EARLY]
    assert stopped
    assert {len(trial.measurement.step_seconds) for trial in stopped} == {MIN_STEPS}
    assert result.best.plan not in [trial.plan for trial in stopped]
    assert all(
        trial.measurement.time_ratio > result.best.measurement.time_ratio * (1 + TIE_SHARE)
        for trial in stopped
        if trial.kind != "repeat"
    )
    theirs = stored(tmp_path).trials[stopped[0].number]
    assert theirs.user_attrs["imputed"] is False
    assert theirs.value == pytest.approx(stopped[0].measurement.time_ratio)
    confirmed = sum(trial.kind == "confirm" for trial in result.trials)
    assert runner.beats[0] is None  # nothing led yet
    assert runner.beats[-confirmed:] == [None] * confirmed
    assert all(beat is not None for beat in runner.beats[1:-confirmed])


def test_the_best_plans_take_turns_afresh_and_each_has_its_verdict(tmp_path):
    result = run(tmp_path, trials=10)
    fresh = [trial for trial in result.trials if trial.kind == "confirm"]
    told = {one.trial.plan: one for one in result.confirmed}
    assert {trial.plan for trial in fresh} == set(told)
    assert result.confirmed[0].label == "BEST"
    assert result.confirmed[0].trial == result.best
    assert all(one.rounds == sum(trial.plan == plan for trial in fresh) for plan, one in told.items())
    assert len(result.best.measurement.step_seconds) == 8 * told[result.best.plan].rounds
    written = json.loads((tmp_path / "run" / "confirmed.json").read_text())
    assert [one["verdict"] for one in written] == [one.label for one in result.confirmed]


def test_a_plan_that_kept_the_budget_is_measured_afresh_whatever_its_layout_is_predicted_to_take(tmp_path):
    class Wide(DevicePlanning):
        """No layout fits any budget."""

        def estimate_layout(self, candidate):
            peak = candidate.estimate.peak_bytes
            return replace(candidate.estimate, layout_bytes=10 * peak, layout_live_bytes=peak)

    result = tune(
        configured(tmp_path, trials=5, moves=False), runner := FakeRunner(), tmp_path / "run", planning=Wide,
        lasting=False,
    )  # fmt: skip
    fresh = [trial for trial in result.trials if trial.kind == "confirm"]
    assert fresh
    assert {trial.measurement.outcome for trial in fresh} == {Outcome.OK}
    assert runner.measured[-len(fresh) :] == [plan_hash(trial.plan) for trial in fresh]
    assert result.confirmed[0].block_ratios


class SlowRunner(FakeRunner):
    """Each measurement, and the preparation, takes ten seconds of a clock that nothing else moves."""

    now = 0.0

    def prepare(self):
        self.now += 10
        return super().prepare()

    def measure(self, plan, *, budget_bytes, beat=None):
        self.now += 10
        return super().measure(plan, budget_bytes=budget_bytes, beat=beat)


@pytest.fixture
def slow(monkeypatch) -> SlowRunner:
    runner = SlowRunner()
    for module in ("session", "runner"):
        clock = SimpleNamespace(monotonic=lambda: runner.now, time=time.time)
        monkeypatch.setattr(f"autotune.study.{module}.time", clock)
    return runner


@pytest.mark.parametrize(
    ("limit", "kinds"),
    [
        ("11s", ["smallest"]),
        ("21s", ["smallest", "planner"]),
        ("31s", ["smallest", "planner", "confirm"]),
    ],
)
def test_no_trial_begins_after_the_time_limit_and_the_one_in_flight_ends(tmp_path, slow, limit, kinds):
    result = run(tmp_path, slow, trials=None, time=limit, planners={**QUICK, "order": ["traced"]})
    assert [trial.kind for trial in result.trials[1:] if trial.kind != "repeat"] == kinds
    assert result.best is not None
    assert result.plan_path.exists()


def test_planning_ends_with_the_time_of_the_study(tmp_path, slow, monkeypatch):
    proposed, allowed = [], []
    propose = DevicePlanning.propose

    def take_three_seconds(planning, budget_bytes, seconds):
        allowed.append(seconds)
        for candidate in propose(planning, budget_bytes, seconds):
            slow.now += 3
            proposed.append(candidate)
            yield candidate

    monkeypatch.setattr(DevicePlanning, "propose", take_three_seconds)
    run(tmp_path, slow, trials=None, time="22s")  # of which 2 s are left, and a fifth of it would be 4.4 s
    assert len(proposed) == 1
    assert max(allowed) <= 2


def test_without_time_for_a_plan_the_baseline_is_kept_and_the_study_can_be_resumed(tmp_path, slow):
    with pytest.raises(OutOfTimeError, match="the time limit of 10s was over before a plan was measured; continue"):
        run(tmp_path, slow, trials=None, time="10s")
    assert [trial.kind for trial in load_trials(tmp_path / "run" / "trials.jsonl")] == ["baseline"]
    assert run(tmp_path, slow, trials=None, time="1m").best is not None


def test_a_smallest_plan_over_the_budget_at_the_end_of_the_time_leaves_the_budget_open(tmp_path, slow):
    slow.overhead = 3.0
    with pytest.raises(OutOfTimeError, match=r"11s was over before a plan of the planners was measured; .* resume"):
        run(tmp_path, slow, trials=None, time="11s")
    with pytest.raises(InfeasibleError, match="with the smallest plan"):
        run(tmp_path, slow, trials=5, time="10m")


def test_a_result_names_what_ended_its_search(tmp_path, slow):
    assert run(tmp_path / "first", trials=4).ended == "its maximum of 4 trials is reached"
    timed = run(tmp_path / "second", slow, trials=None, time="31s", planners={**QUICK, "order": ["traced"]})
    assert timed.ended == (
        "its time is used up before a first setting was tried: the phases before the search took 30 s of 31s, "
        "and re-measuring needs the rest; give it more --time"
    )


def test_one_slow_trial_costs_its_own_time_and_no_more_of_the_search(tmp_path, slow, monkeypatch):
    measure = SlowRunner.measure

    def measure_slowly_at_first(runner, plan, **options):
        runner.now += 100 * (len(runner.measured) == 0)
        return measure(runner, plan, **options)

    monkeypatch.setattr(SlowRunner, "measure", measure_slowly_at_first)
    result = run(tmp_path, slow, trials=None, time="10m", patience=1000, moves=False)
    confirmed = sum(trial.kind == "confirm" for trial in result.trials)
    # 480 s are left, of which one more trial and the confirmation reserve 80
    assert 40 <= len(slow.measured) - confirmed <= 41
    assert slow.now <= 600


def test_ties_go_to_a_notably_lower_charge(tmp_path):
    result = run(tmp_path, trials=6)
    ratios = {trial.number: trial.measurement.time_ratio for trial in result.trials if trial.plan}
    charges = {trial.number: trial.measurement.step_charged_bytes for trial in result.trials if trial.plan}
    near = [number for number, ratio in ratios.items() if ratio and ratio <= result.best.measurement.time_ratio]
    assert charges[result.best.number] <= (1 + NOTABLE_SHARE) * min(charges[number] for number in near)


# -- resuming -----------------------------------------------------------------------------------------------------


def test_settings_of_another_run_are_measured_here_before_the_planners_are_asked(told, tmp_path):
    directory, _, before, _ = told
    runner = FakeRunner()
    result = run(tmp_path, runner, seed_from=str(directory / "run"), lasting=True)
    kinds = [trial.kind for trial in result.trials]
    seeded = [trial for trial in result.trials if trial.kind == "seed"]
    assert seeded
    assert set(kinds[2 : kinds.index("planner")]) <= {
        "seed",
        "repeat",
    }  # the smallest plan's settings may make it again
    assert "seed" not in kinds[kinds.index("planner") :]
    known = [trial.settings for trial in before.trials if trial.kind != "repeat"]
    assert all(trial.settings in known for trial in seeded)
    assert {plan_hash(trial.plan) for trial in seeded} <= set(runner.measured)
    study = stored(tmp_path)
    assert study.trials[seeded[0].number].params["recompute"] == seeded[0].settings["recompute"]["planner"]


def test_seeds_that_were_measured_are_not_asked_for_again(told, tmp_path):
    source = str(told[0] / "run")
    first = run(tmp_path, seed_from=source, trials=4, lasting=True)
    again = FakeRunner()
    second = run(tmp_path, again, seed_from=source, trials=6, lasting=True)
    numbers = [trial.number for trial in first.trials if trial.kind == "seed"]
    assert numbers
    assert [trial.number for trial in second.trials if trial.kind == "seed"] == numbers


def test_seeds_that_come_after_the_first_plans_are_named_as_not_read(told, tmp_path):
    run(tmp_path, trials=4)
    events: list[Event] = []
    config = configured(tmp_path, moves=False, trials=6, seed_from=str(told[0] / "run"))
    late = tune(config, FakeRunner(), tmp_path / "run", progress=events.append, lasting=False, requested_time="8m")
    (note,) = (event for event in events if isinstance(event, Logged) and event.store == "seeds")
    assert note.message.startswith(f"{told[0] / 'run'} is not read: run chose its first plans already")
    assert not [trial for trial in late.trials if trial.kind == "seed"]
    assert load_config(str(tmp_path / "run" / "config.yaml")).seed_from is None


def test_seeds_of_which_none_can_be_planned_here_are_named(told, tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take CP-SAT seconds each
    events, source = list[Event](), str(told[0] / "run")
    result = run(tmp_path, FakeRunner(), events, trials=3, planners=GREEDY, seed_from=source)
    (note,) = (event for event in events if isinstance(event, Logged) and event.store == "seeds")
    assert note.message == "none of the settings of --seed-from can be planned here"
    assert not [trial for trial in result.trials if trial.kind == "seed"]


def test_a_seed_that_is_no_run_stops_the_study_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no plan was measured here"):
        run(tmp_path, seed_from=str(tmp_path))


def test_a_resumed_study_whose_recorded_seeds_are_gone_goes_on_without_them(told, tmp_path):
    source, path = tmp_path / "source", tmp_path / "run" / "trials.jsonl"
    shutil.copytree(told[0] / "run", source)
    run(tmp_path, trials=3, seed_from=str(source))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))  # as if killed before the seeds
    shutil.rmtree(source)
    events: list[Event] = []
    result = run(tmp_path, FakeRunner(), events, trials=4, seed_from=str(source))
    (note,) = (event for event in events if isinstance(event, Logged) and event.store == "seeds")
    assert note.message.startswith(f"the recorded seeds are left out: {source}: ")
    assert not [trial for trial in result.trials if trial.kind == "seed"]


def test_a_finished_study_runs_nothing_again(tmp_path):
    first = run(tmp_path, lasting=True)
    again = FakeRunner()
    events: list[Event] = []
    second = run(tmp_path, again, events, lasting=True)
    assert again.measured == []
    assert second == first
    assert all(event.resumed for event in events if isinstance(event, Finished))


def test_a_study_in_a_budget_of_the_process_keeps_its_plan_where_the_idle_process_is_larger_later(tmp_path):
    first = run(tmp_path, budget="5000000B", trials=6)
    again, events = FakeRunner(floor_bytes=FLOOR_BYTES + 400_000), list[Event]()
    assert run(tmp_path, again, events, budget="5000000B", trials=6) == first
    assert again.measured == []
    (note,) = (event for event in events if isinstance(event, Logged))
    assert "when earlier plans were judged; the step keeps 3.8 MiB of 5000000B, as for these; to divide" in note.message


@pytest.mark.parametrize("ours", [True, False])
def test_a_plan_that_fails_after_it_was_handed_back_is_taken_back_unless_the_file_is_anothers(tmp_path, ours):
    def interrupted(runner: FakeRunner) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    first = run(tmp_path, FakeRunner(before_measure=interrupted))
    kept, handed = tmp_path / "run" / "plan.json", first.plan_path
    assert first.interrupted
    assert handed.read_bytes() == kept.read_bytes()
    if not ours:
        handed.write_text("{}")
    with pytest.raises(InfeasibleError):
        run(tmp_path, FakeRunner(outcome_of=lambda plan: Outcome.OUT_OF_MEMORY))
    assert not kept.exists()
    assert handed.exists() != ours


def test_a_study_that_its_patience_ended_searches_again_when_it_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.study.session.select_next_run", lambda *_, **options: None)  # a new leader is a gain
    one = {"order": ["traced"], "update": ["at_end"], "recompute": ["keep"]}
    first, second = (run(tmp_path, trials=None, budget="120%", planners=one, patience=2) for _ in range(2))
    assert first.ended == second.ended == "no gain in 2 trials"
    assert second.trials[: len(first.trials)] == first.trials
    assert [[trial.kind for trial in each.trials].count("repeat") for each in (first, second)] == [8, 16]


def test_more_trials_go_on_where_it_ended(tmp_path):
    first = run(tmp_path, trials=4, lasting=True)
    second = run(tmp_path, trials=9, lasting=True)
    assert second.trials[: len(first.trials)] == first.trials
    assert len(second.trials) > len(first.trials)
    assert len(stored(tmp_path).trials) == len(second.trials)


@pytest.mark.parametrize("damage", ["missing", "torn", "partly overwritten", "of another version"])
def test_optuna_is_rebuilt_from_the_trials_on_disk(tmp_path, damage):
    moves = damage == "missing"  # once: what is rebuilt is the same
    first = run(tmp_path, lasting=True, moves=moves)
    database = tmp_path / "run" / "optuna.db"
    if damage == "missing":
        database.unlink()
    elif damage == "torn":
        database.write_bytes(b"not a database" * 1000)
    elif damage == "partly overwritten":
        with closing(sqlite3.connect(database)) as connection:
            ((page,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'")
            ((nbytes,),) = connection.execute("PRAGMA page_size")
        with database.open("r+b") as file:
            file.seek((page - 1) * nbytes)
            file.write(bytes(nbytes))
    else:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = 'v2.6.0.a'")
    run(tmp_path, runner := FakeRunner(), lasting=True, moves=moves)
    assert runner.measured == []
    assert [trial.user_attrs["outcome"] for trial in stored(tmp_path).trials] == [
        trial.measurement.outcome for trial in first.trials
    ]


def test_another_budget_or_graph_is_refused(tmp_path):
    run(tmp_path, trials=3)
    with pytest.raises(ConfigError, match="contains a study for budget 65%, not 70%"):
        run(tmp_path, trials=3, budget="70%")
    with pytest.raises(ConfigError, match=r"contains trials of resnet18.*tune under another --name"):
        run(tmp_path, FakeRunner(graph=training_chain(5)), trials=3)


def test_a_damaged_record_of_trials_closes_the_runner(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trials.jsonl").write_text("damaged\n{}\n")
    runner = FakeRunner()
    with pytest.raises(ConfigError, match=r"trials\.jsonl"):
        run(tmp_path, runner)
    assert runner.closed == 1


def test_a_locked_directory_names_the_process_and_exits_75(tmp_path):
    with (
        lock_run_dir(tmp_path / "run"),
        pytest.raises(LockedError, match=f"process {os.getpid()} works here") as caught,
    ):
        run(tmp_path)
    assert caught.value.exit_code == 75


CHILD = """
import os, sys, time
from pathlib import Path
from autotune.study.session import tune
from autotune.testing.fake_runner import FakeRunner
from tests.study.test_session import configured

def slow(runner):
    with open(sys.argv[1] + "/measured", "a") as file:
        file.write(runner.measured[-1] + "\\n")
    time.sleep(float(sys.argv[2]) if len(runner.measured) > 1 else 0)

directory = Path(sys.argv[1])
report = lambda run_dir: (run_dir / "report.html").write_text("made") and run_dir / "report.html"
result = tune(configured(directory), FakeRunner(before_measure=slow), directory / "run", write_report=report)
print(result.interrupted, len(result.trials), result.best is not None)
"""


@pytest.fixture
def child():
    """Start a session in a process of its own; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path, seconds: float) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", CHILD, str(directory), str(seconds)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def unfinished_reruns(directory: Path, trials: tuple[Trial, ...]) -> int:
    """How many plans reached the device without a record: at most the one that ran when a session was killed."""
    ran = [trial for trial in trials if trial.plan and trial.measurement.charged_bytes and trial.kind != "repeat"]
    return len(lines(directory / "measured")) - len(ran)


@pytest.mark.slow
def test_killed_at_any_moment_no_finished_trial_is_lost_or_repeated(tmp_path, child):
    dice, kills = random.Random(7), 3
    records = tmp_path / "run" / "trials.jsonl"
    kept: list[str] = []
    for _ in range(kills):
        process, target = child(tmp_path, 0.02), len(lines(records)) + dice.randint(0, 2)
        wait_for(lambda: len(lines(records)) > target or process.poll() is not None)  # noqa: B023
        time.sleep(dice.random() * 0.1)
        process.kill()
        process.communicate()
        assert lines(records)[: len(kept)] == kept
        kept = lines(records)[: len(load_trials(records))]
    result = run(tmp_path, runner := FakeRunner(), lasting=True)
    assert lines(records)[: len(kept)] == kept
    assert 0 <= unfinished_reruns(tmp_path, result.trials) + len(runner.measured) <= kills
    numbers = [json.loads(line)["number"] for line in lines(records)]
    assert len(set(numbers)) == len(numbers)
    finished = [trial for trial in stored(tmp_path).trials if trial.state.name == "COMPLETE"]
    assert [trial.number for trial in finished] == sorted(numbers)
    assert not [trial for trial in stored(tmp_path).trials if trial.state.name == "RUNNING"]


def run_until_signalled(directory: Path, runner: FakeRunner, *signals: signal.Signals) -> StudyResult:
    """Run a study that gets signals, and makes a report, while its second plan is measured."""

    def send(runner: FakeRunner) -> None:
        if len(runner.measured) == 2:
            for number in signals:
                signal.raise_signal(number)

    def report(run_dir: Path) -> Path:
        (run_dir / "report.html").write_text("made")
        return run_dir / "report.html"

    runner.before_measure = send
    return tune(configured(directory, moves=False), runner, directory / "run", write_report=report)


def test_one_sigint_finishes_the_trial_and_writes_the_report(tmp_path):
    result = run_until_signalled(tmp_path, FakeRunner(), signal.SIGINT)
    assert (result.interrupted, len(result.trials)) == (signal.SIGINT, 3)
    assert result.best is not None
    assert (tmp_path / "run" / "report.html").exists()
    assert len(load_trials(tmp_path / "run" / "trials.jsonl")) == 3
    assert planfile.read(tmp_path / "plans" / "run.json").plan is not None


def test_one_sigint_ends_the_repeats_of_a_disturbed_measurement(tmp_path):
    runner = FakeRunner(disturbed=lambda number: number > 1)
    result = run_until_signalled(tmp_path, runner, signal.SIGINT)
    assert (len(result.trials), len(runner.measured)) == (3, 2)


@pytest.mark.parametrize("signals", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_second_sigint_or_sigterm_gives_the_trial_up_and_the_next_session_runs_it(tmp_path, signals):
    result = run_until_signalled(tmp_path, first := FakeRunner(), *signals)
    assert (result.interrupted, len(result.trials)) == (signals[-1], 2)
    assert result.best is not None
    assert len(load_trials(tmp_path / "run" / "trials.jsonl")) == 2
    assert (tmp_path / "run" / "report.html").exists()
    run(tmp_path, second := FakeRunner(), trials=4, lasting=True)
    assert second.measured[0] == first.measured[-1]


def test_a_signal_before_the_budget_is_known_exits_with_its_number(tmp_path):
    class Interrupted(FakeRunner):
        def prepare(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().prepare()

    runner = Interrupted()
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, runner)
    assert stopped.value.code == 143
    assert runner.closed == 1


GREEDY = {"recompute": ["greedy"], "reorder": ["keep"], "order": ["traced"], "update": ["at_end"]}
"""Planners whose plans meet the target to a few kilobytes."""


def test_no_finalist_is_dropped_because_a_new_process_is_charged_a_little_more(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)  # windows take CP-SAT seconds each
    runner = FakeRunner(spread=0.004)
    result = run(tmp_path, runner, budget="64.4%", trials=8, planners=GREEDY)
    confirmed = [trial for trial in result.trials if trial.kind == "confirm"]
    assert {trial.measurement.outcome for trial in confirmed} == {Outcome.OK}
    charges = {trial.plan: set() for trial in confirmed}
    for trial in result.trials:
        if trial.plan in charges and trial.was_run and trial.kind != "repeat":
            charges[trial.plan].add(trial.step_charged_bytes)
    assert min(map(len, charges.values())) > 1  # the charge does vary
    fastest = min(trial.measurement.time_ratio for trial in result.trials if trial.plan and trial.was_run)
    assert result.best.measurement.time_ratio < 1.02 * fastest
    assert result.best.plan != result.trials[1].plan
    recorded = json.loads((tmp_path / "run" / "study.json").read_text())
    assert recorded["budget_tolerance"] == STEP_TOLERANCE
    assert 0 < recorded["charge_spread"] <= 0.01


def test_a_finalist_that_misses_an_absolute_budget_by_little_is_planned_again_for_fewer_bytes(tmp_path, monkeypatch):
    def charge_more_after_the_search(runner: FakeRunner) -> None:
        runner.overhead = 0.024 if runner.renewed else 0.02

    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)
    runner = FakeRunner(spread=0.0, before_measure=charge_more_after_the_search)
    result = run(tmp_path, runner, budget="3965500B", trials=4, planners=GREEDY)
    missed = [
        trial for trial in result.trials if trial.kind == "confirm" and trial.measurement.outcome is not Outcome.OK
    ]
    assert missed
    assert all("bytes (0.14 %) over the budget" in trial.measurement.detail for trial in missed)
    lowered = [trial for trial in result.trials if trial.kind == "lowered"]
    assert lowered
    assert all(trial.settings in [other.settings for other in missed] for trial in lowered)
    assert result.best.kind == "confirm"
    assert result.best.plan in [trial.plan for trial in lowered]
    assert result.best.step_charged_bytes <= result.budget_bytes
    assert result.best.measurement.time_ratio < 1.02 * min(trial.measurement.time_ratio for trial in missed)


# -- other work on the machine -------------------------------------------------------------------------------------


def test_a_disturbed_measurement_is_repeated_and_the_undisturbed_one_is_recorded(tmp_path):
    events = list[Event]()
    runner = FakeRunner(disturbed=lambda number: number in (1, 3, 4))
    result = run(tmp_path, runner, events, trials=5)
    ran = [trial for trial in result.trials[1:] if trial.was_run and trial.kind != "repeat"]
    assert len(runner.measured) == len(ran) + 3
    assert not any(trial.measurement.disturbed for trial in ran)
    assert max(trial.measurement.time_ratio for trial in ran) < 2, "a disturbed measurement's times are doubled"
    assert [event.reason for event in events if isinstance(event, Disturbed)] == [
        "other processes used 50 % of the CPUs"
    ] * 3  # fmt: skip


def test_on_a_machine_that_stays_busy_repeats_end_and_every_record_says_so(tmp_path):
    runner = FakeRunner(disturbed=lambda number: True)
    result = run(tmp_path, runner, trials=5)
    ran = [trial for trial in result.trials[1:] if trial.was_run and trial.kind != "repeat"]
    assert len(runner.measured) == len(ran) + MAX_FRUITLESS
    assert all(trial.measurement.disturbed for trial in ran)
    said = f"{len(ran)} of {len(ran) + 1} measurements, such as: other processes used 50 % of the CPUs"
    assert json.loads((tmp_path / "run" / "study.json").read_text())["disturbed"] == said
    assert [row.cells[-1] for row in trial_rows(result.trials)[1:] if row.trial in ran] == [
        f"{trial_verdict(trial)}, disturbed" for trial in ran
    ]
    confirmed = confirmed_rows(result.confirmed, result.baseline)[1:]
    assert confirmed
    assert all(row.cells[-1].endswith(", disturbed") for row in confirmed)


def test_a_repeat_that_fails_leaves_the_measurement_that_it_was_to_replace():
    outcomes = iter([Outcome.OK, Outcome.CRASHED])
    fake = FakeRunner(disturbed=lambda number: True, outcome_of=lambda plan: next(outcomes))
    seen = QuietRunner(fake, lambda seconds: True, lambda reason: None).measure(
        Plan.traced(fake.graph), budget_bytes=10**9
    )
    assert (seen.outcome, len(fake.measured)) == (Outcome.OK, 2)


@pytest.mark.parametrize("outcome", [Outcome.OVER_BUDGET, Outcome.WRONG_RESULT, Outcome.OUT_OF_MEMORY])
def test_a_repeat_that_refutes_a_plan_replaces_the_disturbed_measurement(outcome):
    outcomes = iter([Outcome.OK, outcome])
    fake = FakeRunner(disturbed=lambda number: True, outcome_of=lambda plan: next(outcomes))
    seen = QuietRunner(fake, lambda seconds: True, lambda reason: None).measure(
        Plan.traced(fake.graph), budget_bytes=10**9
    )
    assert (seen.outcome, len(fake.measured)) == (outcome, 2)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.CRASHED])
def test_nothing_is_repeated_without_time_for_it_or_after_a_failure(outcome):
    noted: list[str] = []
    fake = FakeRunner(disturbed=lambda number: True, outcome_of=lambda plan: outcome)
    runner = QuietRunner(fake, lambda seconds: outcome is not Outcome.OK, noted.append)
    runner.measure(Plan.traced(fake.graph), budget_bytes=10**9)
    assert (len(fake.measured), noted) == (1, [])


# -- processes that are killed from outside -------------------------------------------------------------------------


@dataclass
class KilledRunner(FakeRunner):
    """Runner of which something else kills the process of chosen measurements."""

    kills: Callable[["KilledRunner"], bool] = lambda runner: True

    def measure(self, plan, *, budget_bytes, beat=None):
        result = super().measure(plan, budget_bytes=budget_bytes, beat=beat)
        return (
            Measurement(Outcome.CRASHED, "killed by SIGKILL: end of log", device=DEVICE) if self.kills(self) else result
        )


@pytest.mark.parametrize(("kills", "outcome"), [(1, Outcome.OK), (9, Outcome.CRASHED)])
def test_a_plan_whose_process_is_killed_is_measured_again_while_repeats_are_left(kills, outcome):
    noted: list[str] = []
    fake = KilledRunner(kills=lambda runner: len(runner.measured) <= kills)
    seen = QuietRunner(fake, lambda seconds: True, noted.append).measure(Plan.traced(fake.graph), budget_bytes=10**9)
    assert (seen.outcome, len(fake.measured)) == (outcome, 1 + min(kills, MAX_REPEATS))
    assert set(noted) == {"a process was killed by SIGKILL"}


def test_a_kill_in_a_re_measurement_costs_a_repeat_and_not_the_plan(tmp_path):
    killed: list[str] = []

    def kill_once(runner: KilledRunner) -> bool:
        if runner.renewed and not killed:
            killed.append(runner.measured[-1])
            return True
        return False

    result = run(tmp_path, KilledRunner(kills=kill_once), trials=4)
    assert killed
    assert {trial.measurement.outcome for trial in result.trials if trial.kind == "confirm"} == {Outcome.OK}


def test_a_resumed_study_without_a_winner_measures_killed_plans_again(tmp_path):
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL; continue with: autotune resume .*run$"):
        run(tmp_path, KilledRunner(), trials=4, lasting=True)
    before = load_trials(tmp_path / "run" / "trials.jsonl")
    result = run(tmp_path, again := FakeRunner(), trials=4, lasting=True)
    assert again.measured[0] == plan_hash(before[1].plan)
    assert result.best is not None
    records = load_trials(tmp_path / "run" / "trials.jsonl")
    assert records[: len(before)] == before
    assert RecordedRun.load(tmp_path / "run").best == result.best
    assert run(tmp_path, FakeRunner(), trials=4, lasting=True).best == result.best


def test_the_summary_of_a_resumed_study_counts_the_killed_trials_that_it_dropped(tmp_path):
    with pytest.raises(WorkerError):
        run(tmp_path, KilledRunner(), trials=4, lasting=True)
    result = run(tmp_path, trials=4, lasting=True)
    recorded = load_trials(tmp_path / "run" / "trials.jsonl")
    assert len(recorded) > len(result.trials)
    assert read_session_end(tmp_path / "run", len(recorded))["best"] == result.best.number
