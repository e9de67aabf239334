"""A landscape: made of a run, written and read back, and how far settings lie from each other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.planners.knobs import Settings
from autotune.records.budget import STEP_TOLERANCE, tolerated_bytes
from autotune.records.measurement import Outcome
from autotune.records.trial import load_trials
from autotune.study.offline import landscape
from autotune.study.offline.landscape import (
    Landscape,
    find_nearest,
    landscape_from_run,
    read_landscape,
    write_landscape,
)
from autotune.study.priors.distance import settings_distance
from autotune.study.verdicts.ranking import plan_hash
from autotune.testing.fake_runner import FakeRunner
from tests.study.test_session import run

KEEP: Settings = {"recompute": {"planner": "keep"}, "order": {"planner": "traced"}}
HALF: Settings = {
    "recompute": {"planner": "greedy", "share": 0.5, "greed": 1.75, "windows": 0},
    "order": {"planner": "traced"},
}


def with_knobs(**knobs: float) -> Settings:
    return {**HALF, "recompute": {**HALF["recompute"], **knobs}}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Landscape]:
    """A whole study, and its landscape."""
    directory = tmp_path_factory.mktemp("recorded")
    run(directory, trials=14, moves=False)
    return directory / "run", landscape_from_run(directory / "run")


def test_every_trial_of_the_search_is_a_point_and_confirmations_add_no_samples_from_beside_another_eager(recorded):
    run_dir, known = recorded
    trials = load_trials(run_dir / "trials.jsonl")
    searched = [trial for trial in trials if trial.plan and trial.kind != "confirm"]
    assert [(point.settings, point.plan) for point in known.points] == [
        (trial.settings, plan_hash(trial.plan)) for trial in searched
    ]
    best = next(trial for trial in reversed(trials) if trial.kind == "confirm")
    samples = [point.measurement.step_seconds for point in known.points if point.plan == plan_hash(best.plan)]
    once = {trial.measurement.step_seconds for trial in searched if trial.plan == best.plan and trial.kind != "repeat"}
    assert {tuple(round(seconds, 6) for seconds in one) for one in once} == set(samples)


def test_a_plan_that_a_move_made_is_no_point_since_its_settings_make_another(tmp_path):
    moved = [trial for trial in run(tmp_path, trials=14, moves=True).trials if trial.move]
    assert {trial.kind for trial in moved} == {"move", "confirm"}
    points = landscape_from_run(tmp_path / "run").points
    assert points
    assert not {plan_hash(trial.plan) for trial in moved} & {point.plan for point in points}


def test_a_point_that_the_simulator_refused_has_no_worth(recorded):
    known = recorded[1]
    refused = [point for point in known.points if point.estimate.peak_bytes > known.budget_bytes]
    assert refused
    assert {known.ratio_of(point) for point in refused} == {None}
    assert known.best_ratio == min(known.ratio_of(point) for point in known.points if known.ratio_of(point) is not None)


def test_a_plan_within_the_tolerance_of_a_share_budget_has_a_worth(recorded):
    known = recorded[1]
    assert known.budget_tolerance == STEP_TOLERANCE
    point = next(point for point in known.points if known.ratio_of(point) is not None)
    charged = point.measurement.floor_bytes + tolerated_bytes(known.budget_bytes, STEP_TOLERANCE)
    highest = replace(point, measurement=replace(point.measurement, charged_bytes=charged))
    over = replace(point, measurement=replace(point.measurement, charged_bytes=charged + 1))
    assert known.ratio_of(highest) == known.ratio_of(point)
    assert known.ratio_of(over) is None
    assert replace(known, budget_tolerance=0.0).ratio_of(highest) is None


def test_where_plain_pytorch_did_not_fit_plans_are_worth_their_time_over_the_predicted_one(tmp_path):
    class NoBaseline(FakeRunner):
        def measure(self, plan, *, budget_bytes, beat=None):
            return replace(super().measure(plan, budget_bytes=budget_bytes, beat=beat), baseline_seconds=())

    run(tmp_path, NoBaseline(baseline_fits=False))
    known = landscape_from_run(tmp_path / "run")
    ran = [point for point in known.points if point.measurement.step_seconds]
    fit = [point for point in ran if point.measurement.step_charged_bytes <= known.budget_bytes]
    assert fit
    for point in fit:
        assert known.ratio_of(point) == point.measurement.median_seconds / known.traced_seconds
    assert known.best_ratio == min(map(known.ratio_of, fit))


def test_it_comes_back_from_its_file_with_a_line_for_each_point(recorded, tmp_path):
    known = recorded[1]
    write_landscape(tmp_path / "one.json", known)
    assert read_landscape(tmp_path / "one.json") == known
    text = (tmp_path / "one.json").read_text()
    assert sum(line.startswith('{"kind"') for line in text.splitlines()) == len(known.points)
    assert len(text) < 2000 * len(known.points)


def test_a_plan_that_went_wrong_once_stays_wrong(recorded, tmp_path):
    run_dir = recorded[0]
    trials = load_trials(run_dir / "trials.jsonl")
    spoilt = next(trial for trial in trials if trial.kind == "confirm")
    spoilt = replace(spoilt, measurement=replace(spoilt.measurement, outcome=Outcome.OUT_OF_MEMORY))
    points = landscape._points([spoilt if trial.number == spoilt.number else trial for trial in trials])
    outcomes = {point.measurement.outcome for point in points if point.plan == plan_hash(spoilt.plan)}
    assert outcomes == {Outcome.OUT_OF_MEMORY}


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (HALF, 0.0),
        (KEEP, 1.0),
        ({**KEEP, "order": {"planner": "beam", "width": 3}}, 2.0),
        (with_knobs(share=1.0), 0.5 / 3),  # half of one of three knobs' range
        (with_knobs(greed=3.0, windows=16), (0.5 + 0.5) / 3),
    ],
)
def test_another_planner_counts_one_and_knobs_count_by_the_share_of_their_range(other: Settings, distance: float):
    assert settings_distance(HALF, other) == pytest.approx(distance)
    assert settings_distance(other, HALF) == pytest.approx(distance)


def test_a_knob_that_is_searched_by_its_logarithm_is_compared_by_it():
    one, ten, hundred = ({"recompute": {"planner": "segments", "count": count}} for count in (1, 8, 64))
    assert settings_distance(one, ten) == pytest.approx(settings_distance(ten, hundred)) == pytest.approx(0.5)


def test_of_points_as_near_the_first_is_taken(recorded):
    points = [replace(recorded[1].points[0], settings=settings) for settings in (KEEP, HALF, KEEP)]
    assert find_nearest(points, KEEP) == (points[0], 0.0)
    assert find_nearest(points, with_knobs(share=0.4))[0] is points[1]


def test_a_run_that_ended_before_a_plan_was_measured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run is recorded here"):
        read_landscape(tmp_path)

    class Interrupted(FakeRunner):
        def measure(self, plan, *, budget_bytes, beat=None):
            raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        run(tmp_path, Interrupted())
    with pytest.raises(ConfigError, match="contains no measured plan"):
        landscape_from_run(tmp_path / "run")


def test_a_file_of_another_schema_is_refused_by_name(recorded, tmp_path):
    write_landscape(tmp_path / "one.json", recorded[1])
    document = json.loads((tmp_path / "one.json").read_text())
    (tmp_path / "one.json").write_text(json.dumps(document | {"schema": 99}))
    with pytest.raises(ConfigError, match="landscape schema 99; this version reads 1"):
        read_landscape(tmp_path / "one.json")
