"""Whether tonight differs from before, and why: statistics of ratios on plain numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.measurement import Measurement

BLOCK = 2
"""Steps that follow each other before the other side has its turn (`harness.procedure.BLOCK_STEPS`): one sample."""
CONFIDENCE = 0.95
RESAMPLES = 1000
ASSUMED_SPREAD = 0.02
"""How far nights lie apart, relative, until enough of them were seen."""
LEAST_SPREAD = 0.005
"""The same at least: a few nights that happen to agree say no more than that."""
ENOUGH_NIGHTS = 3
FAR = 2.0
"""Spreads from the middle of the past nights, beyond which a night is none of them."""
NOTABLE_BYTES = 0.01
"""Share of a step's charge: it hardly varies, so a little more of it is a change of the plan or of the code."""
BUSY = 0.2
"""Share of all cores that others keep busy more than they did, from which a machine is not as quiet as it was."""
SLOWER_MACHINE = 0.1
"""Share by which plain eager itself is slower than it was, from which the machine is not what it was."""


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


def spread(nights: Sequence[float]) -> float:
    """How far past nights' ratios lie from their median, relative, whatever a few bad ones did."""
    if len(nights) < ENOUGH_NIGHTS:
        return ASSUMED_SPREAD
    middle = statistics.median(nights)
    return max(LEAST_SPREAD, 1.4826 * statistics.median(abs(math.log(night / middle)) for night in nights))


class Standing(StrEnum):
    """How a plan stands beside what it did before."""

    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Finding:
    """What tonight's turns say."""

    standing: Standing
    change: Change
    spreads: float
    """How many spreads of the past nights above their median tonight lies."""


def look(now: Sequence[float], record: Sequence[float], nights: Sequence[float], slower: float) -> Finding:
    """Tonight's ratios against those on record, and their median against the past nights'.

    Worse where both say so: the interval lies above the record, the estimate by more than half of `slower` (the change
    that is to be found), and the night lies far from the others. Same where the interval excludes `slower`.
    """
    found = change(now, record)
    spreads = math.log(statistics.median(now) / statistics.median(nights)) / spread(nights)
    if found.low > 1 and found.ratio >= 1 + slower / 2 and spreads > FAR:
        return Finding(Standing.WORSE, found, spreads)
    standing = Standing.SAME if found.high < 1 + slower else Standing.UNCLEAR
    return Finding(standing, found, spreads)


def better(challenger: Sequence[float], champion: Sequence[float], gain: float) -> tuple[bool, Change]:
    """Whether the challenger takes notably less time than the champion did in the same night."""
    found = change(challenger, champion)
    return found.high < 1 and found.ratio <= 1 - gain, found


def decided(found: Change, gain: float) -> bool:
    """Whether more turns would not change who is faster: the interval is clear of a tie, or too narrow for the gain."""
    return not found.tie or found.low > 1 - gain


def more_bytes(now: int, nights: Sequence[int]) -> bool:
    """Whether a step is charged notably more than in any night on record."""
    return bool(nights) and now > (1 + NOTABLE_BYTES) * max(nights)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a night ran on: enough to say afterwards what changed."""

    code: dict[str, str] = field(default_factory=dict)
    """The repository's commit and uncommitted changes, autotune's version, the graph's digest."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions: kernel, driver, Python, packages."""
    device: dict[str, str] = field(default_factory=dict)
    """Silicon, memory, cores: what it is."""
    busy: float = 0.0
    """Share of all cores that others kept busy before anything of ours ran."""
    clock_mhz: float | None = None
    baseline_seconds: float | None = None
    """Of a plain eager step."""


class Cause(StrEnum):
    """What a regression comes from."""

    STALE = "plan stale"
    CODE = "code"
    ENVIRONMENT = "environment"
    DEVICE = "device state"


def cause(now: Conditions, before: Conditions | None) -> tuple[list[Cause], str]:
    """What changed since the last good night, the likeliest first, and in words. By elimination it is the device."""
    if before is None:
        return [Cause.DEVICE], "no good night to compare with"
    told = {
        Cause.DEVICE: _device(now, before),
        Cause.ENVIRONMENT: differences(now.environment, before.environment),
        Cause.CODE: differences(now.code, before.code),
    }
    # another machine explains whatever it shows; a busy one does not explain away a changed version
    order = [Cause.CODE, Cause.ENVIRONMENT, Cause.DEVICE]
    if now.device != before.device:
        order = [Cause.DEVICE, Cause.ENVIRONMENT, Cause.CODE]
    causes = [one for one in order if told[one]]
    if not causes:
        return [Cause.DEVICE], "code, packages and silicon are as in the last good night"
    return causes, "; ".join(part for one in causes for part in told[one])


def differences(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """`torch 2.12.0 -> 2.13.0` for everything that is not as it was."""
    names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def _device(now: Conditions, before: Conditions) -> list[str]:
    found = differences(now.device, before.device)
    if now.busy > before.busy + BUSY:
        found.append(f"cores busy with other work {100 * before.busy:.0f} % -> {100 * now.busy:.0f} %")
    if now.clock_mhz and before.clock_mhz and now.clock_mhz < 0.9 * before.clock_mhz:
        found.append(f"clock {before.clock_mhz:.0f} -> {now.clock_mhz:.0f} MHz")
    if now.baseline_seconds and before.baseline_seconds:
        slower = now.baseline_seconds / before.baseline_seconds
        if slower > 1 + SLOWER_MACHINE:
            found.append(f"plain eager itself {percent(slower)}")
    return found
