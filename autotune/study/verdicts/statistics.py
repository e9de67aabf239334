"""Compute medians of step-time ratios with confidence intervals; samples are means of blocks of steps."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.measure.messages import BLOCK_STEPS
from autotune.records.measurement import Measurement

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
MIN_BOOTSTRAP = 6
"""Minimum number of samples to resample, as for a 95 % interval by order statistics."""
RESAMPLES = 1000
"""Number of bootstrap resamples."""


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
    """Return the median of the samples over the median of the reference, with the interval by percentile bootstrap.

    Both are ratios to plain eager. Where either has fewer than `MIN_BOOTSTRAP`, the ends are those of the ratios of any
    two samples: a resample of so few is no more certain than their range. Where even that range would exclude equal times in
    more than 5 % of comparisons of two equal plans, as with three samples of each, the interval has no end.

    The samples are not paired: each plan ran in turns of its own. With six to 24 samples of normal, skewed or spiky noise
    the interval contained the true ratio in 93 to 97 % of simulated comparisons; of noise with two levels, in 91 %.
    """
    import numpy as np

    if min(len(samples), len(reference)) < MIN_BOOTSTRAP:
        ratio = statistics.median(samples) / statistics.median(reference)
        # of all orders of equally distributed samples, in two each sample of one side lies above all of the other
        if 2 / math.comb(len(samples) + len(reference), len(samples)) > 1 - CONFIDENCE:
            return RatioInterval(ratio, 0.0, math.inf)
        return RatioInterval(ratio, min(samples) / max(reference), max(samples) / min(reference))

    def difference(left: Any, right: Any, axis: int = -1) -> Any:
        return np.median(left, axis=axis) - np.median(right, axis=axis)

    logs = np.log(samples), np.log(reference)
    return RatioInterval(*(math.exp(value) for value in (difference(*logs), *_bootstrap(logs, difference))))


def _bootstrap(samples: Sequence[Any], statistic: Any, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the ends of the statistic's interval; the resamples are the same at each call."""
    import numpy as np
    from scipy import stats

    interval = stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)
