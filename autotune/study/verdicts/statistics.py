"""Compute medians of step-time ratios with bootstrap confidence intervals; samples are means of blocks of steps."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.measure.messages import BLOCK_STEPS
from autotune.records.measurement import Measurement

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
RESAMPLES = 1000
"""Number of bootstrap resamples."""


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """One time over another: the estimate with its confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """True if the interval includes equal times."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"{format_percent(self.ratio)} [{format_percent(self.low)}, {format_percent(self.high)}]"


def format_percent(ratio: float) -> str:
    """Format a ratio as a signed difference in percent.

    >>> format_percent(1.048)
    '+4.8 %'
    """
    return f"{100 * (ratio - 1):+.1f} %"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its confidence interval, in the unit of its samples."""

    middle: float
    low: float
    high: float


def block_ratios(measurement: Measurement) -> list[float]:
    """Return the plan's time over plain eager's of the same turn, one per block.

    Where eager did not run, the blocks' seconds are returned.
    """
    steps, eager = block_means(measurement.step_seconds), block_means(measurement.baseline_seconds)
    return [step / other for step, other in zip(steps, eager, strict=True)] if len(steps) == len(eager) else steps


def block_means(seconds: Sequence[float]) -> list[float]:
    """Return the mean of each block of steps: noise hits the steps of one block together.

    >>> block_means([1.0, 3.0, 5.0])
    [2.0, 5.0]
    """
    return [statistics.fmean(seconds[start : start + BLOCK_STEPS]) for start in range(0, len(seconds), BLOCK_STEPS)]


def median_interval(samples: Sequence[float], *, resamples: int = RESAMPLES) -> Interval:
    """Return the median of the samples with its confidence interval, by percentile bootstrap.

    A single sample is its own interval.
    """
    import numpy as np

    if len(samples) == 1:
        return Interval(*samples, *samples, *samples)
    return Interval(statistics.median(samples), *_bootstrap((np.asarray(samples),), np.median, resamples))


def compare_ratios(samples: Sequence[float], reference: Sequence[float]) -> RatioInterval:
    """Return the median of the samples over the median of the reference, with the interval by percentile bootstrap.

    Both are ratios to plain eager, two or more each.
    """
    import numpy as np

    def difference(one: Any, other: Any, axis: int = -1) -> Any:
        return np.median(one, axis=axis) - np.median(other, axis=axis)

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
