"""Searches on recorded landscapes: near the best known within 25 measured trials, and hardly any of 60 lost to memory."""

from pathlib import Path

import pytest

from autotune.landscape import Landscape, read
from autotune.replay import Replayed, replay
from tests.experiments.scripts import EXPERIMENTS, script

RESULTS = EXPERIMENTS / "landscape" / "results"
SIMULATED = sorted(RESULTS.glob("*-simulated.json"))
MEASURED = [path for path in sorted(RESULTS.glob("*.json")) if path not in SIMULATED]
SEEDS = 3
NEAR, LOST = 0.02, 3


def name(path: Path) -> str:
    return path.stem


@pytest.fixture(scope="module", params=[*SIMULATED, *MEASURED], ids=name)
def searched(request: pytest.FixtureRequest) -> tuple[Landscape, list[Replayed]]:
    """A landscape, and searches of it as `tune` makes them."""
    known = read(request.param)
    return known, [replay(known, "auto", seed, 60) for seed in range(SEEDS)]


def test_within_2_percent_of_the_best_known_after_25_measured_trials(searched):
    for one in searched[1]:
        assert one.found[:25][-1] <= NEAR


def test_of_60_trials_at_most_3_are_lost_to_memory(searched):
    for one in searched[1]:
        assert one.lost[-1] <= LOST


def test_a_landscape_holds_enough_plans_to_lose_the_way_in(searched):
    known, _ = searched
    plans = {point.plan for point in known.points if known.worth(point) is not None}
    worths = sorted(known.worth(point) for point in known.points if known.worth(point) is not None)
    assert len(plans) >= 30
    assert worths[len(worths) // 2] > (1 + NEAR) * known.known_best


def test_a_landscape_that_nobody_measured_says_so_in_its_name_and_in_its_source():
    assert SIMULATED
    assert all(read(path).source.startswith("simulated") for path in SIMULATED)
    assert all(read(path).source.startswith("measured") for path in MEASURED)


@pytest.mark.skipif(not MEASURED, reason="python experiments/landscape/run.py was not run on a quiet machine yet")
def test_a_measured_landscape_was_measured_by_a_meter():
    for path in MEASURED:
        assert {point.measurement.meter for point in read(path).points} - {"simulated"}


def test_noise_and_errors_are_the_recorded_ones():
    recorded = script("landscape/run.py").Recorded.of(EXPERIMENTS / "frontier" / "results")
    assert len(recorded.bytes_off) == len(recorded.seconds_off) == len(recorded.ratios) >= 40
    assert max(recorded.bytes_off) < 0.02
    assert 0.85 < min(recorded.seconds_off) < 1 < max(recorded.seconds_off) < 1.15
