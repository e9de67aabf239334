"""Compare a night's measurements with the champion's record, with past nights, and with a challenger."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.study.verdicts.statistics import RatioInterval, compare_ratios

ASSUMED_SPREAD = 0.02
"""Relative spread of nights, assumed until `MIN_NIGHTS` are recorded, and in part until `ENOUGH_NIGHTS` are."""
MIN_SPREAD = 0.005
"""Lower limit of the estimated spread: a few nights may agree by accident."""
MIN_NIGHTS = 3
"""Number of nights needed to estimate their spread."""
ENOUGH_NIGHTS = 8
"""Number of nights from which the estimate stands alone: three nights that agree by accident say little."""
MAX_SPREADS = 2.0
"""Distance from the median of past nights, in spreads, above which a night counts as an outlier."""
NOTABLE_BYTES = 0.01
"""Relative increase of charged bytes that counts as a regression: they hardly vary from night to night."""


def estimate_spread(nights: Sequence[float]) -> float:
    """Return the relative spread of past nights' ratios around their median, robust against outliers."""
    if len(nights) < MIN_NIGHTS:
        return ASSUMED_SPREAD
    middle, count = statistics.median(nights), len(nights)
    # 1.4826 scales the median absolute deviation to a standard deviation; of few nights it is too small
    scale = 1.4826 * (count / (count - 0.8) if count < ENOUGH_NIGHTS else 1)
    estimate = scale * statistics.median(abs(math.log(night / middle)) for night in nights)
    assumed = max(0.0, 1 - count / ENOUGH_NIGHTS)
    return max(MIN_SPREAD, math.sqrt(assumed * ASSUMED_SPREAD**2 + (1 - assumed) * estimate**2))


class Standing(StrEnum):
    """Result of comparing a plan with its past."""

    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class HistoryComparison:
    """One night compared with a champion's history."""

    standing: Standing
    change: RatioInterval
    """Ratio to the record."""
    spreads: float
    """Distance above the median of the past nights, in their spreads."""


def compare_with_history(
    now: Sequence[float], record: Sequence[float], nights: Sequence[float], slower: float
) -> HistoryComparison:
    """Compare a night's ratios with those on record, and their median with the medians of past nights.

    WORSE needs three signs: the interval lies above the record, the estimate is above half of `slower`, and the night
    is an outlier among the past nights. SAME means that the interval excludes a slowdown of `slower`.
    """
    change = compare_ratios(now, record)
    spreads = math.log(statistics.median(now) / statistics.median(nights)) / estimate_spread(nights)
    if change.low > 1 and change.ratio >= 1 + slower / 2 and spreads > MAX_SPREADS:
        return HistoryComparison(Standing.WORSE, change, spreads)
    standing = Standing.SAME if change.high < 1 + slower else Standing.UNCLEAR
    return HistoryComparison(standing, change, spreads)


def compare_challenger(
    challenger: Sequence[float], champion: Sequence[float], gain: float
) -> tuple[bool, RatioInterval]:
    """Return (true if the challenger saves at least `gain` of the champion's time, ratio of the two)."""
    change = compare_ratios(challenger, champion)
    return change.high < 1 and change.ratio <= 1 - gain, change


def is_decided(change: RatioInterval, gain: float) -> bool:
    """Return true if more samples would not change the faster plan: the interval excludes a tie, or excludes the gain."""
    return not change.tie or change.low > 1 - gain


def is_memory_regression(now: int, nights: Sequence[int]) -> bool:
    """Return true if a step is charged notably more bytes than in any of these nights."""
    return bool(nights) and now > (1 + NOTABLE_BYTES) * max(nights)
