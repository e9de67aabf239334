"""Statistics of ratios, on numbers made by hand."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from autotune.measure.messages import BLOCK_STEPS
from autotune.nightly.comparison import (
    ASSUMED_SPREAD,
    MIN_SPREAD,
    Standing,
    compare_challenger,
    compare_with_history,
    estimate_spread,
    is_decided,
    is_memory_regression,
)
from autotune.nightly.diagnosis import Cause, Conditions, diagnose, list_differences
from autotune.records.measurement import Measurement, Outcome
from autotune.study.verdicts import statistics as module
from autotune.study.verdicts.statistics import (
    RatioInterval,
    block_ratios,
    compare_ratios,
    median_interval,
)

STEADY = [1.0, 1.001, 0.999, 1.002, 0.998, 1.0]
WILD = [1.0, 1.4, 0.7, 1.2, 0.9, 1.0]


def times(factor: float, samples: list[float]) -> list[float]:
    return [factor * sample for sample in samples]


def test_a_change_is_the_factor_between_samples_within_its_interval():
    found = compare_ratios(times(1.05, STEADY), STEADY)
    assert found.ratio == pytest.approx(1.05)
    assert 1.04 < found.low < 1.05 < found.high < 1.06
    assert str(found).startswith("+5.0 % [+4.")


def test_blocks_are_ratios_to_eager_s_also_where_eager_ran_another_number_of_steps_and_seconds_without_eager():
    steps, eager = (3.0,) * (2 * BLOCK_STEPS), (2.0,) * (2 * BLOCK_STEPS)
    assert block_ratios(Measurement(Outcome.OK, step_seconds=steps, baseline_seconds=eager)) == [1.5, 1.5]
    assert block_ratios(Measurement(Outcome.OK, step_seconds=steps, baseline_seconds=eager[:BLOCK_STEPS])) == [1.5, 1.5]
    assert block_ratios(Measurement(Outcome.OK, step_seconds=steps)) == [3.0, 3.0]


def test_a_change_is_the_same_each_time_it_is_computed():
    assert compare_ratios(WILD, STEADY) == compare_ratios(WILD, STEADY)


def test_one_bad_sample_of_six_does_not_move_a_change():
    assert compare_ratios([*STEADY[:5], 9.0], STEADY).ratio == pytest.approx(1.0, abs=0.002)


def test_wide_samples_are_a_tie_and_narrow_ones_are_not():
    assert compare_ratios(times(1.02, WILD), WILD).tie
    assert not compare_ratios(times(1.02, STEADY), STEADY).tie


@pytest.mark.parametrize("count", [6, 16])
def test_the_interval_of_a_ratio_contains_the_true_one_about_as_often_as_it_states(count: int):
    generator = np.random.default_rng(1)

    def noise() -> list[float]:
        spikes = np.where(generator.random(count) < 0.1, generator.random(count), 0)
        return list(np.exp(0.02 * generator.standard_normal(count) + spikes))

    changes = [compare_ratios(times(1.1, noise()), noise()) for _ in range(200)]
    assert sum(change.low <= 1.1 <= change.high for change in changes) >= 0.93 * len(changes)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
)
def test_the_interval_holds_exactly_the_factors_that_the_rank_sum_test_does_not_reject(left, right):
    # no two pairs have one distance: every factor has its own rank
    samples = [math.exp(0.01 * value + 1e-5 * 1.37**number) for number, value in enumerate(left)]
    reference = [math.exp(0.01 * value - 1e-5 * 1.73**number) for number, value in enumerate(right)]
    found = compare_ratios(samples, reference)

    def is_rejected(factor: float) -> bool:
        test = stats.mannwhitneyu(samples, times(factor, reference), method="exact")
        return bool(test.pvalue <= 0.05)

    assert not is_rejected(found.ratio)
    distances = sorted(one / other for one in samples for other in reference)
    between = [math.sqrt(low * high) for low, high in itertools.pairwise(distances)]
    for factor in [distances[0] / 2, *between, 2 * distances[-1]]:
        assert is_rejected(factor) == (not found.low <= factor <= found.high), factor


def test_the_rank_of_many_samples_joins_that_of_fewer(monkeypatch: pytest.MonkeyPatch):
    for left, right in ((60, 60), (20, 100), (5, 110)):
        counted = module._count_rejected.__wrapped__(left, right)
        with monkeypatch.context() as patch:
            patch.setattr(module, "MOST_COUNTED", 0)
            assert module._count_rejected.__wrapped__(left, right) == pytest.approx(counted, abs=2)


def test_the_interval_is_narrower_than_one_of_medians_on_normal_noise():
    generator = np.random.default_rng(3)
    pairs = [np.exp(0.03 * generator.standard_normal((2, 20))) for _ in range(100)]

    def width(one, other) -> float:
        change = compare_ratios(one, other)
        return math.log(change.high / change.low)

    def width_of_medians(one, other) -> float:
        draws = [np.log(generator.choice(side, (500, 20))) for side in (one, other)]
        low, high = np.quantile(np.median(draws[0], axis=1) - np.median(draws[1], axis=1), (0.025, 0.975))
        return float(high - low)

    mine, theirs = (statistics.fmean(itertools.starmap(each, pairs)) for each in (width, width_of_medians))
    assert mine < 0.95 * theirs


@pytest.mark.parametrize(("left", "right"), [(2, 2), (2, 9), (3, 3), (3, 5), (4, 4), (5, 5)])
def test_two_equal_plans_of_few_blocks_are_told_apart_in_no_more_than_one_of_twenty_comparisons(left: int, right: int):
    generator = np.random.default_rng(2)
    drawn = [
        (np.exp(0.03 * generator.standard_normal(left)), np.exp(0.03 * generator.standard_normal(right)))
        for _ in range(2000)
    ]
    told_apart = sum(not compare_ratios(list(one), list(other)).tie for one, other in drawn)
    assert told_apart <= 0.06 * len(drawn)
    assert (told_apart == 0) == ((left, right) in [(2, 2), (3, 3)])


def test_an_interval_without_ends_says_why():
    assert str(compare_ratios([1.2, 1.2], [1.0, 1.0])) == "+20.0 % [too few blocks]"


def test_spread_is_robust_bounded_below_and_assumed_in_part_until_eight_nights():
    assert estimate_spread([1.0, 1.2]) == ASSUMED_SPREAD
    assert MIN_SPREAD < estimate_spread([1.0, 1.0, 1.0]) < ASSUMED_SPREAD
    assert estimate_spread([1.0] * 8) == MIN_SPREAD
    assert estimate_spread([1.0, 1.02, 0.98, 1.02, 0.98]) == pytest.approx(0.0306, abs=0.001)
    assert estimate_spread([1.0, 1.02, 0.98, 1.02, 0.98, 5.0]) == pytest.approx(0.0313, abs=0.001)


def test_three_nights_that_agree_by_accident_do_not_make_the_spread_small():
    """The spread decides what counts as an outlier: an estimate of half of it would be a false alarm in one of ten nights."""
    drawn = random.Random(1)
    for spread, nights in itertools.product((0.01, 0.02), (3, 4, 5, 7)):
        estimates = sorted(
            estimate_spread([math.exp(drawn.gauss(0, spread)) for _ in range(nights)]) for _ in range(500)
        )
        assert estimates[25] > 0.4 * spread, "of twenty estimates one may be lower"
        assert 0.7 * spread < estimates[250] < 2 * spread


@pytest.mark.parametrize(
    ("now", "record", "nights", "standing"),
    [
        (times(1.05, STEADY), STEADY, [1.0] * 5, Standing.WORSE),
        (times(1.05, STEADY), STEADY, [1.0, 1.1, 0.9, 1.05, 0.95], Standing.UNCLEAR),  # among the past nights
        (times(1.01, STEADY), STEADY, [1.0] * 5, Standing.SAME),  # less than half of what is to be found
        (STEADY, STEADY, [0.95] * 5, Standing.SAME),  # far from the last nights, not from the record
        (times(1.05, WILD), WILD, [1.0] * 5, Standing.UNCLEAR),
        (WILD, WILD, [1.0] * 5, Standing.UNCLEAR),
        (times(0.9, STEADY), STEADY, [1.0] * 5, Standing.SAME),
    ],
)
def test_worse_needs_the_record_and_the_history_and_same_excludes_what_is_to_be_found(now, record, nights, standing):
    assert compare_with_history(now, record, nights, slower=0.03).standing is standing


def test_better_is_a_gain_above_the_asked_one_with_its_interval_below_a_tie():
    assert compare_challenger(times(0.95, STEADY), STEADY, 0.01)[0]
    assert not compare_challenger(times(0.995, STEADY), STEADY, 0.01)[0]
    assert not compare_challenger(times(0.95, WILD), WILD, 0.01)[0]


@pytest.mark.parametrize(
    ("found", "done"),
    [
        (RatioInterval(0.9, 0.85, 0.95), True),
        (RatioInterval(1.1, 1.05, 1.15), True),
        (RatioInterval(1.0, 0.995, 1.005), True),  # no gain of 1 % can hide in it
        (RatioInterval(0.98, 0.9, 1.1), False),
    ],
)
def test_more_turns_are_taken_while_a_gain_may_hide_in_the_interval(found: RatioInterval, done: bool):
    assert is_decided(found, 0.01) is done


def test_bytes_are_more_only_above_every_night_on_record_by_one_percent():
    assert is_memory_regression(10_101, [9_000, 10_000])
    assert not is_memory_regression(10_100, [9_000, 10_000])
    assert not is_memory_regression(10_100, [])


def test_differences_name_what_came_went_and_changed():
    assert list_differences({"a": "1", "b": "2", "d": "4"}, {"a": "1", "b": "1", "c": "3"}) == [
        "b 1 -> 2", "c 3 -> none", "d none -> 4",
    ]  # fmt: skip


def test_without_a_good_night_the_cause_says_so():
    assert diagnose(Conditions(), None) == ([Cause.DEVICE], "no good night to compare with")


def test_a_machine_that_was_as_busy_before_explains_nothing():
    busy = Conditions(busy=0.9)
    assert diagnose(busy, busy)[1] == "code, packages and silicon are the same as in the last good night"


def test_an_interval_of_a_median_states_a_confidence_only_where_its_samples_allow_one():
    few, enough = median_interval([1.0, 1.2, 1.1]), median_interval(WILD)
    assert (few.low, few.high, few.confidence, few.basis) == (1.0, 1.2, None, "range of 3")
    assert (enough.low, enough.high, enough.confidence) == (0.7, 1.4, pytest.approx(1 - 2 / 2**6))
    many = median_interval([float(number) for number in range(1, 21)])
    assert (many.low, many.high) == (6.0, 15.0)  # order statistics 6 and 15 of 20, by the binomial table
    assert many.basis == "95 % of 20"


def test_a_ratio_of_too_few_samples_is_as_wide_as_any_two_of_them():
    found = compare_ratios([1.0, 1.0, 1.0, 1.1], [1.0, 1.0, 1.0, 0.8])
    assert (found.low, found.high) == pytest.approx((1.0, 1.1 / 0.8))
