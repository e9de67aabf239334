"""The interval of a median."""

import pytest

from experiments.common import turns


def test_an_interval_holds_the_median_and_one_outlier_does_not_move_its_ends():
    assert turns.median_bounds([1.0, 1.02, 1.01, 1.0]) == pytest.approx((1.0, 1.02))
    low, high = turns.median_bounds([0.9] * 8 + [0.92] * 8 + [9.0])
    assert (low, high) == pytest.approx((0.9, 0.92))
