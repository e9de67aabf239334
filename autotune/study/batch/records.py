"""Record of a search for the batch size: what was estimated, what was measured, and what was chosen."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.records.budget import Budget, format_step_budget, tolerated_bytes
from autotune.records.config import Config
from autotune.records.json_codec import read_whole, write_whole
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir
from autotune.study.batch.estimate import BatchEstimate
from autotune.study.verdicts.ranking import ratio_noise
from autotune.study.verdicts.statistics import block_means, median_interval

SCHEMA = 1
RESOLUTION = 0.02
"""Gap between the largest size that fits and the smallest that does not, as a share of the former, that ends the search."""


def largest_gap(size: int) -> int:
    """Return the distance to the first size that fails within which a size that fits counts as the largest."""
    return max(1, int(RESOLUTION * size))


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """Samples of one micro-batch, and micro-batches per update.

    >>> str(StepSize(16)), str(StepSize(16, 4)), StepSize(16, 4).samples
    ('16', '16 x 4', 64)
    """

    batch: int
    """Value of the factory's argument: samples per forward and backward pass."""
    accumulate: int = 1

    @property
    def samples(self) -> int:
        """Samples per update."""
        return self.batch * self.accumulate

    def __str__(self) -> str:
        return f"{self.batch} x {self.accumulate}" if self.accumulate > 1 else str(self.batch)


@dataclass(frozen=True, slots=True)
class SampleRate:
    """Samples per second: the median of blocks of steps, with its interval."""

    middle: float
    low: float
    high: float
    basis: str = ""
    """Basis of the interval: `95 % of 8`, `range of 4` for too few blocks, or `expected noise` for one."""

    @classmethod
    def from_seconds(cls, samples: int, seconds: Sequence[float]) -> "SampleRate | None":
        """Return the rate of steps of so many samples; None without a timed step.

        With micro-batches, `seconds` are those of an update divided by the number of micro-batches.

        >>> SampleRate.from_seconds(8, [2.0, 2.0, 4.0, 4.0])
        SampleRate(middle=2.6666666666666665, low=2.0, high=4.0, basis='range of 2')
        """
        if not seconds:
            return None
        interval = median_interval(block_means(seconds))
        if interval.samples == 1:  # one block does not show its noise
            noise = ratio_noise(Measurement(Outcome.OK, step_seconds=tuple(seconds)))
            low, high = interval.middle * (1 - noise), interval.middle * (1 + noise)
            interval = replace(interval, low=low, high=high, samples=0)
        basis = interval.basis or "expected noise"
        return cls(samples / interval.middle, samples / interval.high, samples / interval.low, basis)

    def __str__(self) -> str:
        return f"{self.middle:.1f} samples/s ({self.low:.1f} to {self.high:.1f})"


@dataclass(frozen=True, slots=True)
class SideResult:
    """Measurement of plain eager, or of a plan, at one size."""

    outcome: Outcome
    charged_bytes: int | None = None
    """Charge of the step, without the floor; for a plan that was not run, its estimated peak."""
    rate: SampleRate | None = None
    detail: str = ""
    disturbed: str = ""

    @property
    def fits(self) -> bool:
        """True if the step ran to its end within the budget."""
        return self.outcome is Outcome.OK

    @classmethod
    def from_measurement(cls, size: StepSize, measurement: Measurement) -> "SideResult":
        """Return the result of a measurement with timed steps of this size."""
        return cls(
            measurement.outcome,
            measurement.step_charged_bytes,
            SampleRate.from_seconds(size.batch, measurement.step_seconds),
            measurement.detail.partition("\n")[0],
            measurement.disturbed,
        )


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """Measurements at one batch size, under the enforced limit."""

    size: StepSize
    eager: SideResult | None = None
    plan: SideResult | None = None
    """None where plain eager alone was measured."""
    estimated_bytes: int | None = None
    """Estimated peak of the plan."""
    verified: str = ""
    """Method by which the plan's results were compared with eager's."""
    limit: str = ""
    """Mechanism that enforced the limit; empty for none."""
    seconds: float = 0.0
    """Duration of capture, planning and measurement."""

    @property
    def has_estimated_charge(self) -> bool:
        """True if the plan did not run, so that its charge is its estimated peak."""
        if self.plan is None or self.plan.rate is not None or self.estimated_bytes is None:
            return False
        return self.plan.charged_bytes == self.estimated_bytes

    def merge(self, later: "MeasuredSize") -> "MeasuredSize":
        """Return this record with what was measured later; a side that was not measured again stays."""
        planned = self if later.plan is None else later
        return replace(planned, eager=later.eager or self.eager, seconds=self.seconds + later.seconds)


@dataclass(frozen=True, slots=True)
class BatchSearch:
    """Search for the batch size of one run, as far as it came."""

    objective: str
    """`batch` or `throughput`."""
    config: dict[str, Any]
    """Config of the search."""
    argument: str
    """Argument of the factory that sets the batch size."""
    start: StepSize
    """Size of the workload as its config describes it."""
    loop: str = ""
    """Training loop of the workload, such as `clip`; empty for the default loop."""
    floor_bytes: int = 0
    """Bytes of the idle process."""
    budget_bytes: int = 0
    """Bytes of the step within the budget, without the floor; 0 until the workload's own size is measured."""
    estimate: BatchEstimate | None = None
    """Estimate for the resolved budget; None until that is resolved."""
    measured: tuple[MeasuredSize, ...] = ()
    chosen: StepSize | None = None
    """Size that the study tunes; None until it is chosen."""
    notes: tuple[str, ...] = ()
    """Consequences of the chosen size for the training."""
    graph_digest: str = ""
    """Graph of the step as captured on fake tensors at the smallest size; empty in records of earlier versions."""
    device: str = ""
    """Key of the device that measured the sizes; empty in records of earlier versions."""
    torch: str = ""
    """Version of torch that measured the sizes."""
    unit: int = 1
    """Number of which every size that the workload accepts is a multiple, as far as its refusals show."""
    schema: int = SCHEMA

    @property
    def limit_bytes(self) -> int:
        """Bytes of the process within the budget and its tolerance."""
        tolerance = Budget.parse(str(self.config["budget"])).tolerance
        return self.floor_bytes + tolerated_bytes(self.budget_bytes, tolerance)

    @property
    def budget(self) -> str:
        """Budget for the study of any other batch size: the config's own, or `budget_bytes` of the step for a share."""
        requested = Budget.parse(str(self.config["budget"]))
        return requested.text if requested.share is None else format_step_budget(self.budget_bytes)

    @property
    def overheads(self) -> list[float]:
        """Charge of each measured plan over its estimated peak, less 1."""
        return [
            each.plan.charged_bytes / each.estimated_bytes - 1
            for each in self.measured
            if each.plan is not None and each.plan.rate is not None and each.plan.charged_bytes and each.estimated_bytes
        ]

    def find(self, size: StepSize) -> MeasuredSize | None:
        """Return what was measured at a size; None for nothing."""
        return next((each for each in self.measured if each.size == size), None)

    def add(self, measured: MeasuredSize) -> "BatchSearch":
        """Return the search with another measurement; one of the same size is merged."""
        earlier = self.find(measured.size)
        rest = tuple(each for each in self.measured if each.size != measured.size)
        return replace(self, measured=(*rest, measured if earlier is None else earlier.merge(measured)))

    @property
    def eager_largest(self) -> StepSize | None:
        """Largest batch at which eager was measured within the budget; None where it was not."""
        return _largest((each.size, each.eager) for each in self.measured)

    @property
    def plan_largest(self) -> StepSize | None:
        """Largest batch at which a plan was measured within the budget; None where there is none."""
        return _largest((each.size, each.plan) for each in self.measured)

    @property
    def eager_is_settled(self) -> bool:
        """True if a slightly larger batch than eager's largest was measured, and does not fit."""
        return _is_settled([(each.size, each.eager) for each in self.measured], self.unit)

    @property
    def plan_is_settled(self) -> bool:
        """True if a slightly larger batch than the plans' largest was measured, and does not fit."""
        return _is_settled([(each.size, each.plan) for each in self.measured], self.unit)

    @property
    def eager_best(self) -> MeasuredSize | None:
        """Size at which eager processed the most samples per second within the budget."""
        return _fastest([(each, each.eager) for each in self.measured])

    @property
    def plan_best(self) -> MeasuredSize | None:
        """Size at which a plan processed the most samples per second within the budget."""
        return _fastest([(each, each.plan) for each in self.measured])


def _largest(sides: Iterable[tuple[StepSize, SideResult | None]]) -> StepSize | None:
    fitting = (size for size, side in sides if side is not None and side.fits)
    return max(fitting, key=lambda size: (size.batch, -size.accumulate), default=None)


def _is_settled(sides: Sequence[tuple[StepSize, SideResult | None]], unit: int) -> bool:
    largest = _largest(sides)
    low = 0 if largest is None else largest.batch
    refused = (size.batch for size, side in sides if side is not None and not side.fits and size.batch > low)
    return min(refused, default=math.inf) - low <= max(unit, largest_gap(low))


def _fastest(sides: Sequence[tuple[MeasuredSize, SideResult | None]]) -> MeasuredSize | None:
    """Return the size with the highest rate; an earlier one stays unless another is faster by more than both intervals."""
    best: tuple[MeasuredSize, SampleRate] | None = None
    for measured, side in sides:
        if side is None or not side.fits or side.rate is None:
            continue
        if best is None or side.rate.low > best[1].high:
            best = measured, side.rate
    return None if best is None else best[0]


def read_batch_search(run_dir: Path) -> BatchSearch | None:
    """Return the search that a run directory records; None where there was none, ConfigError for a damaged file."""
    path = RunDir(run_dir).batch_search
    if not path.exists():
        return None
    return read_whole(
        BatchSearch, path, schema=SCHEMA, what="search for a batch size", again="tune under another --name"
    )


def read_request(run_dir: Path) -> Config | None:
    """Return the config of the search that a run directory records; None where there was none."""
    search = read_batch_search(run_dir)
    if search is None:
        return None
    try:
        return Config.model_validate(search.config)
    except ValueError as error:  # a key that this version does not have
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{RunDir(run_dir).batch_search}: {reason}; tune under another --name") from None


def write_batch_search(run_dir: Path, search: BatchSearch) -> None:
    """Write a search into its run directory, in one step; ConfigError where that fails."""
    write_whole(
        RunDir(run_dir).batch_search,
        search,
        what="search for a batch size",
        remedy="free space there, then run the command again",
    )
