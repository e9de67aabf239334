"""What is foretold: plans that none beats, bars around what is predicted, and when a search ends."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.survey import WorkloadSurvey
from autotune.planners.candidates import Candidate
from autotune.planners.space import space_for_device
from autotune.records.config import load_config
from autotune.records.measurement import Outcome
from autotune.study.offline import forecast
from autotune.study.offline.calibration import CHARGE_NOISE_BYTES
from autotune.study.offline.forecast import (
    MIN_TRIALS,
    forecast_frontier,
    forecast_point,
    forecast_search,
    simulate_traced,
)
from autotune.study.offline.study_forecast import forecast_study
from autotune.testing.fake_runner import DEVICE
from autotune.testing.graphs import training_chain
from tests.study.test_calibration import ARENA, EXPECTED, measured

MIB = 2**20
GRAPH = training_chain(12, 20 * MIB, MIB)
COSTS = Costs(tuple(0.01 for _ in GRAPH.ops), tuple(0 for _ in GRAPH.ops))
PLANNERS = {"recompute": ["keep", "greedy"], "reorder": ["keep"], "order": ["traced"]}
SEARCHED = space_for_device({**dict.fromkeys(("update", "inplace", "offload", "allocator")), **PLANNERS}, "cpu", {})


def peaks(found: Sequence[Candidate]) -> list[int]:
    return [one.estimate.peak_bytes for one in found]


def test_no_plan_of_the_frontier_beats_another_and_it_spans_from_the_lowest_peak_to_the_traced_pace() -> None:
    found = forecast_frontier(GRAPH, COSTS, SEARCHED)
    assert len(found) >= 3
    assert peaks(found) == sorted(set(peaks(found)))
    seconds = [one.estimate.seconds for one in found]
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == pytest.approx(simulate_traced(GRAPH, COSTS).seconds)
    assert peaks(found)[0] < 0.6 * simulate_traced(GRAPH, COSTS).peak_bytes


def test_a_budget_that_is_asked_for_is_planned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(graph: TrainGraph, costs: Costs, budget: int, *others: Any, **options: Any) -> Candidate:
        planned[budget] = best_plan(graph, costs, budget, *others, **options)
        return planned[budget]

    planned: dict[int, Candidate] = {}
    best_plan = forecast.best_plan
    monkeypatch.setattr(forecast, "best_plan", spy)
    forecast_frontier(GRAPH, COSTS, SEARCHED)
    plain = set(planned)
    asked = sum(sorted(plain)[:2]) // 2
    assert asked not in plain
    planned.clear()
    front = [one.estimate for one in forecast_frontier(GRAPH, COSTS, SEARCHED, [asked])]
    assert set(planned) == plain | {asked}
    own = planned[asked].estimate
    assert any(one.peak_bytes <= own.peak_bytes and one.seconds <= own.seconds for one in front)


def made(**changes: float) -> Candidate:
    return Candidate(ARENA, Plan.traced(GRAPH), replace(EXPECTED, peak_bytes=100 * MIB, **changes))  # type: ignore[arg-type]


def test_bars_lie_around_what_is_predicted_and_never_closer_than_two_processes_differ() -> None:
    reference = replace(EXPECTED, seconds=0.5)
    one = forecast_point(made(), reference, [], 0.0)
    assert one.ratio == 2.0
    assert one.nbytes[0] < 100 * MIB < one.nbytes[1]
    assert one.seconds[0] < 1.0 < one.seconds[1]
    assert one.ratios[0] < 2.0 < one.ratios[1]
    exact = [[measured(number, peak=1000, charged=1000) for number in range(9)]]
    assert forecast_point(made(), reference, exact, 0.0).nbytes == (
        100 * MIB - CHARGE_NOISE_BYTES,
        100 * MIB + CHARGE_NOISE_BYTES,
    )


def test_waits_for_a_store_may_be_half_or_twice_as_long() -> None:
    always = [[measured(number, seconds=1.0) for number in range(9)]]
    one = forecast_point(made(seconds=1.4, stall_seconds=0.4), EXPECTED, always, 0.0)
    assert one.seconds == pytest.approx((1.2, 1.8))


@pytest.mark.parametrize(
    ("fields", "trials", "ended_by"),
    [
        ({"time": "10m"}, 14, "--time"),
        ({"time": "10m", "trials": 5}, 12, "--trials"),
        ({"time": "10h"}, 55, "no gain"),
        ({"time": "1s"}, MIN_TRIALS, "--time"),
    ],
)
def test_a_search_ends_by_whatever_comes_first(fields: dict[str, object], trials: int, ended_by: str) -> None:
    past = [[measured(number) for number in range(3)]]  # 40 s each
    told = forecast_search(load_config("resnet18", overrides=fields), 1.0, past)
    assert (told.trials, told.trial_seconds, told.ended_by) == (trials, 40.0, ended_by)
    assert told.seconds == (trials + 1) * 40.0


def test_a_measured_step_of_a_loop_that_accumulates_is_a_whole_update(tmp_path: Path) -> None:
    config = load_config("resnet18", overrides={"planners": PLANNERS, "runs": str(tmp_path)})
    alone, eight = (
        forecast_study(config, WorkloadSurvey(GRAPH, COSTS, DEVICE, 0, loop)).search.trial_seconds
        for loop in ("", "accumulate=8")
    )
    assert eight > 4 * alone


def test_without_a_past_a_longer_step_makes_longer_trials() -> None:
    config = load_config("resnet18")
    short, long = (forecast_search(config, seconds, []).trial_seconds for seconds in (0.1, 1.0))
    assert short < long
    assert long > 4 * config.samples


@pytest.mark.slow
def test_three_plans_of_the_predicted_frontier_are_measured_within_their_bars(tmp_path: Path) -> None:
    from tests.measure.harness.test_run import harness

    with harness(tmp_path, "wide") as runner:
        surveyed = runner.survey()
        graph, costs = surveyed.graph, surveyed.costs
        searched = space_for_device(dict.fromkeys(SEARCHED), "cpu", {})
        found = forecast_frontier(graph, costs, searched)
        chosen = {one.estimate.peak_bytes: one for one in (found[0], found[len(found) // 2], found[-1])}
        assert len(chosen) == 3
        for one in chosen.values():
            told = forecast_point(one, simulate_traced(graph, costs), [], 0.0)
            seen = runner.measure(one.plan)
            assert seen.outcome is Outcome.OK
            assert seen.step_charged_bytes is not None
            assert seen.step_peak_bytes is not None
            assert told.nbytes[0] <= seen.step_charged_bytes <= told.nbytes[1]
            assert seen.step_peak_bytes <= told.nbytes[1]
