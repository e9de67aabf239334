"""Ratios of step times: samples by blocks, medians, and their intervals by bootstrap."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.records.measurement import Measurement

BLOCK = 2
"""Steps that follow each other before the other side has its turn (`measure.worker.bench.BLOCK_STEPS`): one sample."""
CONFIDENCE = 0.95
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """One time over another: the estimate and its interval of 95 %."""

    ratio: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether the two may be equal."""
        return self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"{percent(self.ratio)} [{percent(self.low)}, {percent(self.high)}]"


def percent(ratio: float) -> str:
    """`+4.8 %` for 1.048."""
    return f"{100 * (ratio - 1):+.1f} %"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median within its interval of 95 %, in the unit of its samples."""

    middle: float
    low: float
    high: float


def turns(seen: Measurement) -> list[float]:
    """Time over plain eager's of the same turn, a block a sample; seconds alone where eager did not run."""
    steps, eager = blocks(seen.step_seconds), blocks(seen.baseline_seconds)
    return [step / other for step, other in zip(steps, eager, strict=True)] if len(steps) == len(eager) else steps


def blocks(seconds: Sequence[float]) -> list[float]:
    """The mean of each block of steps: steps of one block fail together."""
    return [statistics.fmean(seconds[at : at + BLOCK]) for at in range(0, len(seconds), BLOCK)]


def interval(samples: Sequence[float]) -> Interval:
    """The median of two samples or more with its interval, by percentile bootstrap."""
    import numpy as np

    return Interval(statistics.median(samples), *_bootstrap((np.asarray(samples),), np.median))


def change(now: Sequence[float], before: Sequence[float]) -> Change:
    """Of two samples of ratios to plain eager the median of one over that of the other, by percentile bootstrap."""
    import numpy as np

    def apart(one: Any, other: Any, axis: int = -1) -> Any:
        return np.median(one, axis=axis) - np.median(other, axis=axis)

    samples = np.log(now), np.log(before)
    return Change(*(math.exp(value) for value in (apart(*samples), *_bootstrap(samples, apart))))


def _bootstrap(samples: Sequence[Any], statistic: Any) -> tuple[float, float]:
    """Where the statistic lies, low and high, over resamples that are the same at each call."""
    import numpy as np
    from scipy import stats

    found = stats.bootstrap(
        samples,
        statistic,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
