"""Calibration: measured trials correct what was predicted, and more so nearby."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from autotune.study.priors.discrepancy import ASSUMED, Calibration
from autotune.study.priors.observations import PriorSource
from autotune.study.verdicts.ranking import plan_hash
from tests.study.priors.synthetic import RULES, draw, measured, misleading_log, observe, true_log, useful_log

SETTINGS = draw(30, 3)
OTHERS = draw(60, 4)


def calibration(predict, source: PriorSource = PriorSource.SIMULATED) -> Calibration:
    return Calibration([observe(chosen, predict(chosen), source) for chosen in OTHERS], RULES)


def trials(predict, count: int, truth=true_log):
    return [measured(number, chosen, truth(chosen), predict(chosen)) for number, chosen in enumerate(SETTINGS[:count])]


def error(predict, count: int) -> float:
    """Mean absolute error of the calibrated logarithms."""
    result = calibration(predict).update(trials(predict, count))
    return sum(abs(math.log(one.time_ratio) - true_log(one.observation.settings)) for one in result) / len(result)


@pytest.mark.parametrize("source", list(PriorSource))
def test_without_a_measured_trial_the_order_stays_and_values_move_towards_the_mean(source: PriorSource):
    result = calibration(useful_log, source).update([])
    before = [useful_log(one.observation.settings) for one in result]
    after = [math.log(one.time_ratio) for one in result]
    assert [one.number for one in result] == list(range(len(OTHERS)))
    assert sorted(range(60), key=before.__getitem__) == sorted(range(60), key=after.__getitem__)
    assert max(after) - min(after) < max(before) - min(before)
    assert sum(after) == pytest.approx(sum(before))


def test_the_less_certain_a_source_the_narrower_are_its_values():
    def width(source: PriorSource) -> float:
        ratios = [math.log(one.time_ratio) for one in calibration(useful_log, source).update([])]
        return max(ratios) - min(ratios)

    by_certainty = sorted(PriorSource, key=lambda source: ASSUMED[source].setting)
    widths = [width(source) for source in by_certainty]
    assert widths == sorted(widths, reverse=True)
    assert by_certainty[-1] is PriorSource.OTHER_GRAPH_AND_DEVICE


def test_an_error_that_all_predictions_share_is_learnt_from_a_few_trials():
    def shifted(chosen):
        return true_log(chosen) + 0.3

    assert error(shifted, 0) > 0.25
    assert error(shifted, 4) < 0.05


def test_predictions_that_are_upside_down_are_turned_around_by_trials():
    errors = [error(misleading_log, count) for count in (0, 10, 30)]
    assert errors == sorted(errors, reverse=True)
    result = calibration(misleading_log).update(trials(misleading_log, 30))
    ranked = sorted(result, key=lambda one: one.time_ratio)
    fastest, slowest = ranked[:10], ranked[-10:]
    assert max(true_log(one.observation.settings) for one in fastest) < min(
        true_log(one.observation.settings) for one in slowest
    )


def test_a_surprise_moves_settings_nearby_more_than_others():
    def truth(chosen):
        slow = 0.3 if chosen["recompute"]["planner"] == "per_block" else 0.0
        return useful_log(chosen) + slow

    result = calibration(useful_log).update(trials(useful_log, 30, truth))
    residuals = {True: [], False: []}
    for one in result:
        is_slow = one.observation.settings["recompute"]["planner"] == "per_block"
        residuals[is_slow].append(math.log(one.time_ratio) - useful_log(one.observation.settings))
    assert sum(residuals[True]) / len(residuals[True]) > 0.1 + sum(residuals[False]) / len(residuals[False])


def test_the_same_list_comes_back_until_another_trial_is_measured():
    made, done = calibration(useful_log), trials(useful_log, 4)
    first = made.update(done[:3])
    assert made.update(done[:3]) is first
    assert made.update(done) is not first


def test_an_observation_leaves_once_its_plan_was_measured():
    observations = [observe(chosen, 0.0) for chosen in OTHERS[:3]]
    done = trials(useful_log, 2)
    observations[1] = replace(observations[1], plan=plan_hash(done[1].plan))
    assert [one.number for one in Calibration(observations, RULES).update(done)] == [0, 2]


@limits(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True), st.sampled_from(list(PriorSource)))
def test_trial_by_trial_or_all_at_once_gives_the_same_bits(numbers: list[int], source: PriorSource):
    """A resumed study sees all trials at once, where the first session saw them one by one."""
    done = [measured(number, SETTINGS[number], true_log(SETTINGS[number]), 0.1) for number in numbers]
    step_by_step = calibration(useful_log, source)
    for count in range(len(done) + 1):
        last = step_by_step.update(done[:count])
    assert last == calibration(useful_log, source).update(done)
    assert all(math.isfinite(one.time_ratio) and one.error > 0 for one in last)
