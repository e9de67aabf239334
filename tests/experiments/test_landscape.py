"""Searches on recorded landscapes: near the best known within 25 measured trials, and hardly any of 60 lost to memory."""

from pathlib import Path

import pytest

from autotune.study.offline.landscape import Landscape, read_landscape
from autotune.study.offline.replay import ReplayResult, replay
from experiments.benchmarks.landscape import __main__ as landscape_script
from tests.experiments.paths import BENCHMARKS

RESULTS = BENCHMARKS / "landscape" / "results"
RECORDED = sorted(RESULTS.glob("*.json"))
"""Whatever lies there is searched; `NAME-simulated.json` was measured by nobody."""
SEEDS = 3
NEAR, LOST = 0.02, 3
NONE = pytest.param(
    None,
    marks=pytest.mark.skip(
        reason="nothing is recorded: python -m experiments.benchmarks.landscape, or the same with --simulated"
    ),
    id="none",
)


@pytest.fixture(scope="module", params=[pytest.param(path, id=path.stem) for path in RECORDED] or [NONE])
def recorded(request: pytest.FixtureRequest) -> tuple[Path, Landscape]:
    return request.param, read_landscape(request.param)


@pytest.fixture(scope="module")
def searches(recorded: tuple[Path, Landscape]) -> list[ReplayResult]:
    """As `tune` makes them."""
    return [replay(recorded[1], "auto", seed, 60) for seed in range(SEEDS)]


@pytest.mark.slow
def test_within_2_percent_of_the_best_known_after_25_measured_trials(searches):
    for one in searches:
        assert one.fastest_gaps[:25][-1] <= NEAR


@pytest.mark.slow
def test_of_60_trials_at_most_3_are_lost_to_memory(searches):
    for one in searches:
        assert one.lost[-1] <= LOST


def test_a_landscape_holds_enough_plans_to_lose_the_way_in(recorded):
    known = recorded[1]
    plans = {point.plan: worth for point in known.points if (worth := known.ratio_of(point)) is not None}
    assert len(plans) >= 30
    assert sorted(plans.values())[len(plans) // 2] > (1 + NEAR) * known.best_ratio


def test_what_nobody_measured_says_so_in_its_name_and_in_its_source(recorded):
    path, known = recorded
    meters = {point.measurement.meter for point in known.points if point.measurement.meter}
    if path.stem.endswith("-simulated"):
        assert known.source.startswith("simulated")
        assert meters == {"simulated"}
    else:
        assert known.source.startswith("measured")
        assert "simulated" not in meters


def test_noise_and_errors_are_the_recorded_ones():
    recorded = landscape_script.RecordedNoise.from_results(BENCHMARKS / "frontier" / "results")
    assert len(recorded.bytes_off) == len(recorded.seconds_off) == len(recorded.ratios) >= 40
    assert max(recorded.bytes_off) < 0.02
    assert 0.85 < min(recorded.seconds_off) < 1 < max(recorded.seconds_off) < 1.15
