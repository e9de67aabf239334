"""Find the Pareto front of charged bytes and step time among measured plans, with a proof for every point."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autotune.ir.plan import Plan
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.confirm import MAX_ROUNDS, MIN_ROUNDS, pooled_ratio, select_failed_run
from autotune.study.verdicts.plan_runs import count_rounds, group_runs, pool_ratios, pool_seconds
from autotune.study.verdicts.ranking import NOTABLE_SHARE, Rules, ratio_noise, select_fitting
from autotune.study.verdicts.statistics import Interval, RatioInterval, compare_ratios, median_interval

FRONT_PLANS = 12
"""Maximum number of plans that are re-measured for the front at one time."""
FRONT_GAIN = 0.02
"""Least share of time by which a larger plan has to be faster to be re-measured for the front."""
FRONT_RUNS = FRONT_PLANS * MIN_ROUNDS
"""Number of re-measured trials of a whole front."""


class FrontStatus(StrEnum):
    """Result of comparing a re-measured plan with all plans that need no more bytes."""

    FRONT = "front"
    """The plan is faster than every plan of no more bytes, and each interval excludes equal time."""
    UNCERTAIN = "uncertain"
    """A plan of no more bytes may be as fast: the interval includes equal time."""
    DOMINATED = "dominated"
    """A plan of no more bytes is as fast or faster."""
    FAILED = "failed"
    """A run of the plan exceeded the limit, or failed."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A re-measured plan, and its place relative to the Pareto front."""

    number: int
    """Number of the trial that measured the plan first; it stays the same when a study is resumed."""
    trial: Trial
    """All re-measurements of the plan, pooled."""
    status: FrontStatus
    rounds: int
    """Number of re-measurements, each in new processes."""
    block_ratios: tuple[float, ...]
    """Step time over plain eager's of the same turn, one value per block of steps; step seconds where eager does not fit."""
    rival: int | None = None
    """Number of the plan that dominates this one or may be as fast; None for a point of the front."""
    versus_rival: RatioInterval | None = None
    """Time over the rival's."""
    block_seconds: tuple[float, ...] = ()
    """Seconds of a step, one per block."""

    @property
    def charged_bytes(self) -> int:
        """Highest charge of the step in all re-measurements, without the floor."""
        return self.trial.step_charged_bytes or self.trial.step_bytes or 0

    @property
    def ratio(self) -> Interval | None:
        """Time over plain eager's, with its interval; None where eager does not fit, or too few steps ran."""
        return pooled_ratio(self.trial, self.block_ratios)

    @property
    def seconds(self) -> Interval | None:
        """Seconds of one step, with their interval; None where too few steps ran."""
        return median_interval(self.block_seconds) if len(self.block_seconds) > 1 else None

    @property
    def label(self) -> str:
        """Text for people: `front`, `dominated by 7`, `uncertain, beside 7`, or the reason of a failure."""
        if self.status is FrontStatus.FAILED and self.trial.measurement is not None:
            return self.trial.measurement.outcome.value.replace("_", " ")
        words = {FrontStatus.DOMINATED: "dominated by", FrontStatus.UNCERTAIN: "uncertain, beside"}
        return self.status.value if self.rival is None else f"{words[self.status]} {self.rival}"


def assess_front(trials: Sequence[Trial], rules: Rules) -> list[FrontPoint]:
    """Return every re-measured plan with its status, the smallest first, then the plans that failed.

    A point of the front is certainly faster than every re-measured plan of no more bytes. No plan of the search is
    certainly faster at no more bytes either. Charges that differ by less than `NOTABLE_SHARE` count as equal where the
    larger plan is certainly faster. Each comparison has a confidence of 95 %.
    """
    samples = _pool_samples(trials, rules)
    points = [_assess(sample, samples) for sample in sorted(samples, key=_by_bytes) if sample.rounds]
    return [*_drop_near_bytes(points), *_list_failed(trials, {sample.trial.plan for sample in samples})]


def select_front_run(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """Return the plan to re-measure next for the front, the one with the fewest runs first; None once all are conclusive.

    Each contender runs `MIN_ROUNDS` times. Then points that ran less often, and uncertain plans with their rivals, run again, up
    to `MAX_ROUNDS` times.
    """
    contenders = select_front_contenders(trials, rules)
    rounds = count_rounds(trials)
    waiting = [trial for trial in contenders if rounds[trial.plan] < MIN_ROUNDS]
    if not waiting:
        points = assess_front(trials, rules)
        once = {point.number for point in points if point.status is FrontStatus.FRONT and point.rounds < MIN_ROUNDS}
        unclear = once | {point.number for point in points if point.status is FrontStatus.UNCERTAIN}
        unclear |= {point.rival for point in points if point.number in unclear and point.rival is not None}
        waiting = [point.trial for point in points if point.number in unclear and rounds[point.trial.plan] < MAX_ROUNDS]
    return min(waiting, key=lambda trial: rounds[trial.plan], default=None)


def select_front_contenders(trials: Sequence[Trial], rules: Rules) -> list[Trial]:
    """Return the plans that may be on the front, at most `FRONT_PLANS`: the smallest, the fastest, then the largest gaps.

    Plans that were re-measured already and still may be on the front come first.
    """
    samples = _select_notable(_pool_samples(trials, rules))
    ordered = [samples[rank] for rank in spread([(sample.nbytes, math.log(sample.cost)) for sample in samples])]
    ordered.sort(key=lambda sample: sample.rounds == 0)
    return [sample.trial for sample in ordered[:FRONT_PLANS]]


def count_missing_runs(trials: Sequence[Trial], rules: Rules) -> int:
    """Return the number of runs that the contenders for the front still need, with those of one further plan."""
    contenders, rounds = select_front_contenders(trials, rules), count_rounds(trials)
    return MIN_ROUNDS + sum(max(0, MIN_ROUNDS - rounds[trial.plan]) for trial in contenders)


def compute_front_stop_ratio(trials: Sequence[Trial], trial: Trial, rules: Rules) -> float | None:
    """Return the time ratio above which the plan of a trial is no point: that of the fastest smaller plan, with its noise.

    None where no plan is surely smaller: one that was charged less than the estimated peak of this one.
    """
    if trial.estimate is None:
        return None
    peak_bytes = trial.estimate.peak_bytes
    smaller = [sample.trial for sample in _pool_samples(trials, rules) if sample.nbytes < peak_bytes]
    return min(
        (
            other.measurement.time_ratio * (1 + ratio_noise(other.measurement))
            for other in smaller
            if other.measurement is not None and other.measurement.time_ratio is not None
        ),
        default=None,
    )


def extends_front(trials: Sequence[Trial], rules: Rules) -> bool:
    """Return true if the last trial's plan is new and notably reduces bytes or time of the front so far."""
    last = trials[-1]
    if last.plan is None or not last.was_run or last.kind in (TrialKind.REPEAT, TrialKind.CONFIRM):
        return False
    return any(sample.trial.plan == last.plan for sample in _select_notable(_pool_samples(trials, rules)))


def spread(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Order the positions of points so that any first part of the order covers the range of every coordinate.

    The lowest point comes first, then the highest, then each time the one farthest from all before. Coordinates are
    scaled to their ranges; the distance of two points is the largest difference of a coordinate.

    >>> spread([(0,), (1,), (2,), (3,), (4,)])
    [0, 4, 2, 1, 3]
    """
    widths = [max(column) - min(column) or 1 for column in zip(*points, strict=True)]
    scaled = [tuple(value / width for value, width in zip(point, widths, strict=True)) for point in points]
    left = sorted(range(len(points)), key=lambda rank: scaled[rank])
    chosen = [left.pop(index) for index in (0, -1) if left]
    while left:
        farthest = max(left, key=lambda rank: min(_distance(scaled[rank], scaled[other]) for other in chosen))
        chosen.append(farthest)
        left.remove(farthest)
    return chosen


def _distance(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    return max(abs(left - right) for left, right in zip(first, second, strict=True))


@dataclass(frozen=True, slots=True)
class _Sample:
    """One plan that kept the limit in all of its runs."""

    number: int
    trial: Trial
    rounds: int
    nbytes: int
    blocks: tuple[float, ...]
    seconds: tuple[float, ...]
    """Seconds of a step, one per block."""
    cost: float
    """Median of the blocks."""


def _pool_samples(trials: Sequence[Trial], rules: Rules) -> list[_Sample]:
    runs = group_runs(trials)
    samples = []
    for trial in select_fitting(trials, rules):
        assert trial.plan is not None
        same = runs[trial.plan]
        confirmed = [run for run in same if run.kind == TrialKind.CONFIRM]
        counted = confirmed or same
        blocks = pool_ratios(counted)
        if blocks and trial.step_bytes is not None:
            nbytes = trial.step_charged_bytes or trial.step_bytes
            cost = statistics.median(blocks)
            samples.append(_Sample(same[0].number, trial, len(confirmed), nbytes, blocks, pool_seconds(counted), cost))
    return samples


def _by_bytes(sample: _Sample) -> tuple[int, float, int]:
    return sample.nbytes, sample.cost, sample.number


def _assess(sample: _Sample, samples: Sequence[_Sample]) -> FrontPoint:
    """Compare one re-measured plan with all plans of no more bytes."""
    point = FrontPoint(
        sample.number, sample.trial, FrontStatus.FRONT, sample.rounds, sample.blocks, block_seconds=sample.seconds
    )
    smaller = [other for other in samples if _by_bytes(other) < _by_bytes(sample)]
    for other in sorted(smaller, key=lambda other: other.cost):
        versus = _compare(sample.blocks, other.blocks)
        status = _judge(versus, is_remeasured=other.rounds > 0)
        if status is not FrontStatus.FRONT:
            return replace(point, status=status, rival=other.number, versus_rival=versus)
    return point


def _judge(versus: RatioInterval, *, is_remeasured: bool) -> FrontStatus:
    """Return the status of a plan that is compared with one of no more bytes; `versus` is its time over that one's."""
    if not is_remeasured:
        # a measurement of the search is evidence only where it is certain: the fastest of many is partly lucky
        return FrontStatus.DOMINATED if versus.low > 1 else FrontStatus.FRONT
    if versus.high < 1:
        return FrontStatus.FRONT
    return FrontStatus.DOMINATED if versus.ratio >= 1 else FrontStatus.UNCERTAIN


def _drop_near_bytes(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Mark a point of the front as dominated if the next larger one, which is faster, charges the same within the noise."""
    kept: list[FrontPoint] = []
    following: FrontPoint | None = None
    for point in reversed(points):
        if point.status is FrontStatus.FRONT:
            if following is not None and following.charged_bytes <= (1 + NOTABLE_SHARE) * point.charged_bytes:
                versus = _compare(point.block_ratios, following.block_ratios)
                dominated = FrontStatus.DOMINATED
                kept.append(replace(point, status=dominated, rival=following.number, versus_rival=versus))
                continue
            following = point
        kept.append(point)
    return kept[::-1]


def _list_failed(trials: Sequence[Trial], fitting: set[Plan | None]) -> list[FrontPoint]:
    """Return the re-measured plans of which some run failed or exceeded the limit."""
    failed = []
    rounds = count_rounds(trials)
    for plan, runs in group_runs(trials).items():
        if plan not in fitting and rounds[plan]:
            failure = select_failed_run([run for run in runs if run.kind == TrialKind.CONFIRM] or runs)
            failed.append(FrontPoint(runs[0].number, failure, FrontStatus.FAILED, rounds[plan], ()))
    return failed


def _select_notable(samples: Sequence[_Sample]) -> list[_Sample]:
    """Return the plans of the front by the medians alone, the smallest first, without neighbours within the noise."""
    steps: list[_Sample] = []
    for sample in sorted(samples, key=_by_bytes):
        if not steps or sample.cost < (1 - FRONT_GAIN) * steps[-1].cost:
            steps.append(sample)
    notable: list[_Sample] = []
    for sample in reversed(steps):
        if not notable or notable[-1].nbytes > (1 + NOTABLE_SHARE) * sample.nbytes:
            notable.append(sample)
    return notable[::-1]


@functools.lru_cache(maxsize=4096)
def _compare(samples: tuple[float, ...], reference: tuple[float, ...]) -> RatioInterval:
    """Return the ratio with its interval, unlimited for one block; cached, since reports compare the same plans."""
    if min(len(samples), len(reference)) < 2:
        return RatioInterval(statistics.median(samples) / statistics.median(reference), 0.0, float("inf"))
    return compare_ratios(samples, reference)
