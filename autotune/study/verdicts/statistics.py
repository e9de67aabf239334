"""Compute medians of step-time ratios with confidence intervals; samples are means of blocks of steps."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.measure.messages import BLOCK_STEPS
from autotune.records.measurement import Measurement

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
MOST_COUNTED = 120
"""Largest number of samples of two sides together for which the rank-sum statistic is counted."""


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """One time over another: the estimate with its confidence interval, from 0 to infinity where samples are too few."""

    ratio: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """True if the interval includes equal times."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{format_percent(self.ratio)} [too few blocks]"
        return f"{format_percent(self.ratio)} [{format_percent(self.low)}, {format_percent(self.high)}]"


def format_percent(ratio: float) -> str:
    """Format a ratio as a signed difference in percent.

    >>> format_percent(1.048)
    '+4.8 %'
    """
    return f"{100 * (ratio - 1):+.1f} %"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its confidence interval, in the unit of its samples; the range of too few samples."""

    middle: float
    low: float
    high: float
    samples: int = 0
    """Number of samples; 0 where it is unknown."""
    confidence: float | None = None
    """Confidence level that the number of samples allows; None for a range."""

    @property
    def basis(self) -> str:
        """Basis of the ends, as `95 % of 8` or `range of 3`; empty where it is unknown."""
        if not self.samples:
            return ""
        return f"range of {self.samples}" if self.confidence is None else f"{100 * CONFIDENCE:.0f} % of {self.samples}"


def block_ratios(measurement: Measurement) -> list[float]:
    """Return the plan's time over plain eager's of the same turn, one per block.

    Where eager ran another number of steps, its median stands for every block. Where eager did not run, the blocks'
    seconds are returned. Ratios and seconds never mix.
    """
    steps, eager = block_means(measurement.step_seconds), block_means(measurement.baseline_seconds)
    if len(steps) == len(eager):
        return [step / other for step, other in zip(steps, eager, strict=True)]
    return [step / statistics.median(eager) for step in steps] if eager else steps


def block_means(seconds: Sequence[float]) -> list[float]:
    """Return the mean of each block of steps: noise hits the steps of one block together.

    >>> block_means([1.0, 3.0, 5.0])
    [2.0, 5.0]
    """
    return [statistics.fmean(seconds[start : start + BLOCK_STEPS]) for start in range(0, len(seconds), BLOCK_STEPS)]


def median_interval(samples: Sequence[float], level: float = CONFIDENCE) -> Interval:
    """Return the median with the narrowest order statistics that contain it with at least this confidence.

    The interval holds for every distribution of independent samples. A level of 95 % needs six samples; fewer give
    their range, without a confidence level.

    >>> median_interval([1.0, 3.0, 2.0]).basis
    'range of 3'
    """
    ordered, count = sorted(samples), len(samples)
    for rank in range(count // 2, 0, -1):
        confidence = 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
        if confidence >= level:
            return Interval(statistics.median(ordered), ordered[rank - 1], ordered[count - rank], count, confidence)
    return Interval(statistics.median(ordered), ordered[0], ordered[-1], count)


def compare_ratios(samples: Sequence[float], reference: Sequence[float]) -> RatioInterval:
    """Return by which factor the samples lie above the reference, with the exact interval of the rank-sum test.

    The estimate is that of Hodges and Lehmann: the median of the ratios of any sample to any of the reference. The
    interval holds the factors that the test of Mann and Whitney does not reject. It has no end where samples are too few
    for this level: two of each, or three. Both are ratios to plain eager. They are not paired: each plan ran in turns of
    its own.

    It requires independent samples, and noise of one distribution on both sides, whichever that is. From 15 samples of
    each on it needs two thirds of the samples that an interval of the medians needs, fewer where noise is skewed.

    >>> str(compare_ratios([1.02, 1.03, 1.01, 1.04], [1.0, 0.99, 1.01, 1.0]))
    '+2.5 % [+0.0 %, +5.1 %]'
    """
    import numpy as np

    # logarithms: a sample in percent above another one is a distance
    distances = np.sort(np.subtract.outer(np.log(samples), np.log(reference)), axis=None)
    ratio = math.exp(float(np.median(distances)))
    rank = _count_rejected(len(samples), len(reference))
    if rank == 0:
        return RatioInterval(ratio, 0.0, math.inf)
    return RatioInterval(ratio, math.exp(float(distances[rank - 1])), math.exp(float(distances[-rank])))


@functools.cache
def _count_rejected(left: int, right: int, level: float = CONFIDENCE) -> int:
    """Return the number of values of the rank-sum statistic U that a two-sided test rejects at each end.

    U is the number of pairs in which the sample of one side is the larger one, of so many samples of either side. Its
    distribution is counted, and that of many samples is normal.
    """
    import numpy as np

    if left + right > MOST_COUNTED:
        deviation = math.sqrt(left * right * (left + right + 1) / 12)
        return max(0, math.floor(left * right / 2 - statistics.NormalDist().inv_cdf((1 + level) / 2) * deviation))

    # row n, column s: number of sets of n ranks, counted from 0, with the sum s
    sets = np.zeros((left + 1, left * (left + right) + 1))
    sets[0, 0] = 1
    for rank in range(left + right):
        # the right-hand side is complete before it is added, so no rank counts twice
        sets[1:, rank:] += sets[:-1, : sets.shape[1] - rank].copy()
    lowest = left * (left - 1) // 2
    below = np.cumsum(sets[left, lowest : lowest + left * right + 1]) / math.comb(left + right, left)
    return int(np.searchsorted(below, (1 - level) / 2, side="right"))
