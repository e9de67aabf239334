"""Measure batch sizes one by one, each chosen from the results so far, until the largest or the fastest is found."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autotune.planners.space import Space, space_without_stores
from autotune.records.config import Config
from autotune.study.batch.candidates import (
    find_largest_measured,
    list_sizes,
    predict_rates,
    propose_neighbour,
)
from autotune.study.batch.estimate import (
    MAX_SIZE,
    SmallestPlans,
    count_accepted,
    estimate_from_steps,
    find_largest_accepted,
)
from autotune.study.batch.measurements import SizeMeasurer
from autotune.study.batch.records import (
    BatchSearch,
    MeasuredSize,
    SideResult,
    StepSize,
    largest_gap,
    write_batch_search,
)
from autotune.study.batch.sized_steps import SizedSteps
from autotune.study.verdicts.ranking import compute_target_bytes
from autotune.units import fmt_bytes
from autotune.workloads.batch_argument import BatchArgument

MAX_MEASURED = 8
"""Maximum number of batch sizes whose plans are measured."""
MAX_EAGER = 4
"""Maximum number of batch sizes at which plain eager alone is measured."""
EAGER_LEAST = 0.95
"""Lowest ratio of eager's charge to its estimated peak; a size over the budget even at this ratio is not measured."""
EAGER_OVERHEAD = 1.1
"""Assumed ratio of eager's charge to its estimated peak if no charge was measured at the workload's own size."""


class CaptureSteps(Protocol):
    """Function that captures a workload at a few batch sizes: `capture_sizes`, or its replacement in tests."""

    def __call__(self, config: Config, argument: str, size: int, loop: str | None = None) -> SizedSteps: ...


@dataclass
class SizeRace:
    """State and steps of one search: each size is chosen from the results so far, measured, and recorded."""

    config: Config
    run_dir: Path
    steps: SizedSteps
    measurer: SizeMeasurer
    search: BatchSearch
    notify: Callable[[str], None]
    deadline: float
    capture: CaptureSteps
    longest_seconds: float = 0.0
    """Seconds of the longest measurement of a plan so far."""
    longest_eager_seconds: float | None = None
    """Seconds of the longest measurement of eager alone; None before the first."""
    accumulated: dict[int, SizedSteps] = field(default_factory=dict)
    """Steps of loops with other numbers of micro-batches, by this number."""
    unfinished: str = ""
    """Reason why a larger or faster size may exist; empty where the choice is settled."""

    def record(self, search: BatchSearch) -> None:
        self.search = search
        write_batch_search(self.run_dir, search)

    def measure_start(self, argument: BatchArgument) -> None:
        """Measure the workload's own size, which resolves the budget, then estimate the largest sizes for it."""
        if self.search.find(self.search.start) is None:
            self.notify(f"measuring {self.search.argument}={self.search.start}, the workload's own size")
            self.record(self.measurer.measure_start(self.search))
            self.announce(self.search.start)
        if self.search.estimate is not None:
            if not self.search.estimate.is_interpolated:
                self.steps.capture_all()
        else:
            budget = self.config.model_copy(update={"budget": self.search.budget})
            floor_bytes = self.search.floor_bytes
            self.notify("estimating the largest sizes; nothing runs")
            estimate = estimate_from_steps(budget, argument, self.steps, lambda _: floor_bytes, time.monotonic())
            self.record(replace(self.search, estimate=replace(estimate, budget=self.config.budget)))
            self.notify(
                f"by estimate a plan fits up to {argument.name}={estimate.largest}, plain eager up to {estimate.eager_largest}"
            )

    def announce(self, size: StepSize) -> None:
        measured = self.search.find(size)
        assert measured is not None
        if measured.plan is None:
            self.longest_eager_seconds = max(self.longest_eager_seconds or 0.0, measured.seconds)
        else:
            self.longest_seconds = max(self.longest_seconds, measured.seconds)
        self.notify(describe_size(self.search.argument, measured))

    def has_time(self) -> bool:
        return time.monotonic() + self.longest_seconds < self.deadline

    def has_time_for_eager(self) -> bool:
        """Return True if eager alone can be measured before the deadline.

        The first such measurement is expected to take as long as that of the workload's own size, which contains a plan.
        """
        seconds = self.longest_eager_seconds
        if seconds is None:
            measured = self.search.find(self.search.start)
            seconds = measured.seconds if measured is not None else 0.0
        return time.monotonic() + seconds < self.deadline

    @property
    def count(self) -> int:
        """Number of batch sizes whose plans were measured."""
        return sum(each.plan is not None for each in self.search.measured)

    @property
    def is_full(self) -> bool:
        """True if plans of no further size may be measured, however much time is left."""
        return self.count >= MAX_MEASURED

    def measure_plan(self, size: StepSize) -> SideResult | None:
        """Return the result of a plan at a size, measured now or before; None where no time is left.

        The first size after the workload's own is measured in any case.
        """
        recorded = self.search.find(size)
        if recorded is not None and recorded.plan is not None:
            return recorded.plan
        if self.count > 1 and (self.is_full or not self.has_time()):
            return None
        self.notify(f"measuring {self.search.argument}={size}: eager, then a plan")
        self.record(self.measurer.measure_plan(self.search, size))
        self.announce(size)
        measured = self.search.find(size)
        return None if measured is None else measured.plan

    def measure_eager(self, size: StepSize) -> SideResult | None:
        """Return the result of plain eager at a size, measured now or before; None where no time is left."""
        recorded = self.search.find(size)
        if recorded is not None and recorded.eager is not None:
            return recorded.eager
        count = sum(each.plan is None for each in self.search.measured)
        if count >= MAX_EAGER or not self.has_time_for_eager():
            return None
        self.notify(f"measuring {self.search.argument}={size}: eager alone")
        self.record(self.measurer.measure_eager(self.search, size))
        self.announce(size)
        measured = self.search.find(size)
        return None if measured is None else measured.eager

    def accept(self, batch: int) -> int:
        """Return the largest size up to `batch` that the workload accepts; 0 for none.

        Sizes are checked by a capture where the estimate names a refused size: measured, such a size would not fit.
        """
        estimate = self.search.estimate
        return self.steps.round_down(batch) if estimate is not None and estimate.refused else batch

    def is_settled(self, largest: int, refused: int) -> bool:
        """Return True if the workload accepts no size notably between one that fits and one that does not."""
        return refused - largest <= largest_gap(largest) or self.accept(refused - 1) <= largest

    def find_largest(self) -> StepSize | None:
        """Measure plans, then plain eager, at sizes around the largest that fits by estimate; return the plans' largest."""
        estimate, start = self.search.estimate, self.search.start
        assert estimate is not None
        space = space_without_stores(self.config.planners.model_dump(), self.config.device)
        plans = SmallestPlans(self.steps, space)
        plans.make(max(estimate.largest, 1))
        budget_bytes = self.search.budget_bytes
        measured = self.search.find(start)
        low = start.batch if measured is not None and measured.plan is not None and measured.plan.fits else 0
        # a small step's overhead is no evidence for a large one, unless it is higher than assumed; those of larger sizes
        # would begin a resumed search with another size
        at_start = [] if measured is None else replace(self.search, measured=(measured,)).overheads
        expected_bytes = min(compute_target_bytes(budget_bytes, overheads) for overheads in ([], at_start))
        first, high = (
            find_largest_accepted(self.steps, plans.peak_at, nbytes, start=max(estimate.largest, 1))
            for nbytes in (plans.usable_bytes(expected_bytes), budget_bytes)
        )

        largest, refused = self.find_largest_plan(plans, low, max(high, low) + 1, first)
        # stores and compiled regions are not part of the estimate, so sizes beyond it may fit
        is_rough = bool(self.config.stores or self.config.kernels)
        while is_rough and largest and self.is_settled(largest, refused) and not self.was_refused(refused):
            if (beyond := min(2 * largest, MAX_SIZE)) <= refused:
                break
            largest, refused = self.find_largest_plan(plans, largest, beyond + 1, beyond)
        if is_rough and not largest:
            self.find_smaller_size(space)
        largest, refused = self.bound_by_records(refused)
        if not self.is_settled(largest, refused):
            between, name = f"between {largest} and {refused}", self.search.argument
            self.unfinished = (
                f"{self.count} sizes were measured, the maximum, and none {between}; to go on, tune under another --name with "
                f"--set {name}={largest} --budget {self.search.budget}"
                if self.is_full
                else f"time ended before sizes {between} were measured; tune under another --name with a longer --time"
            )
        self.find_eager_largest()
        return replace(start, batch=largest) if largest else None

    def find_largest_plan(self, plans: SmallestPlans, low: int, high: int, first: int) -> tuple[int, int]:
        """Measure plans at sizes above `low` and below `high`; return the largest that fits, and the smallest that does not."""
        return find_largest_measured(
            lambda batch: self.measure_plan(replace(self.search.start, batch=batch)),
            count_accepted(self.steps, plans.peak_at),
            self.search.budget_bytes,
            low=low,
            high=high,
            first=first,
            accept=self.accept,
        )

    def bound_by_records(self, high: int) -> tuple[int, int]:
        """Return the largest size that was measured to fit, 0 for none, and the smallest above it that does not.

        `high` is assumed not to fit, unless a size from it on did: an earlier session may have measured other sizes.
        """
        measured = [entry for entry in self.search.measured if entry.size.accumulate == self.search.start.accumulate]
        sides = [(entry.size.batch, entry.plan) for entry in measured if entry.plan is not None]
        low = max((batch for batch, side in sides if side.fits), default=0)
        refused = [batch for batch, side in sides if batch > low and not side.fits]
        return low, min([max(high, low + 1), *refused])

    def was_refused(self, batch: int) -> bool:
        """Return True if a plan of this size was measured and does not fit."""
        measured = self.search.find(replace(self.search.start, batch=batch))
        return measured is not None and measured.plan is not None and not measured.plan.fits

    def find_eager_largest(self) -> int:
        """Measure plain eager at sizes around the largest at which it is expected to fit; return that size, 0 for none."""
        start, budget_bytes = self.search.start, self.search.budget_bytes
        measured = self.search.find(start)
        side = None if measured is None else measured.eager
        charged = side.charged_bytes if side is not None else None
        overhead = EAGER_OVERHEAD if charged is None else charged / max(self.steps.eager_bytes(start.batch), 1)
        first, high = (self.predict_eager_largest(share) for share in (overhead, min(overhead, EAGER_LEAST)))
        low = start.batch if side is not None and side.fits else 0
        largest, _ = find_largest_measured(
            lambda batch: self.measure_eager(replace(start, batch=batch)),
            count_accepted(self.steps, self.steps.eager_bytes),
            budget_bytes,
            low=low,
            high=max(high, low) + 1,
            first=first,
            accept=self.accept,
        )
        return largest

    def predict_eager_largest(self, overhead: float) -> int:
        """Return the largest size at which eager fits, if it is charged `overhead` times its estimated peak."""
        budget_bytes = int(self.search.budget_bytes / overhead)
        return find_largest_accepted(self.steps, self.steps.eager_bytes, budget_bytes, start=self.search.start.batch)

    def find_fastest(self) -> StepSize | None:
        """Measure the sizes that promise the most samples per second, eager's largest among them; return the fastest."""
        estimate, start = self.search.estimate, self.search.start
        assert estimate is not None
        micro_batches = self.allows_micro_batches
        sizes = list_sizes(start, estimate.largest, estimate.eager_largest, micro_batches=micro_batches)
        space = space_without_stores(self.config.planners.model_dump(), self.config.device)
        target_bytes = compute_target_bytes(self.search.budget_bytes, [])
        self.notify(f"making a plan for each of {len(sizes)} sizes, to rank them by estimate")
        predicted = predict_rates(sizes, self.steps_of, target_bytes, space, self.has_time)
        eager_batch = self.find_eager_largest()
        ranked = [candidate.size for candidate in predicted]
        if eager_batch:
            ranked = [StepSize(eager_batch, start.accumulate), *ranked]
        if not ranked:  # no time to plan for sizes, but one beside the workload's own is measured in any case
            ranked = [StepSize(max(1, estimate.eager_largest), start.accumulate)]
        for size in ranked:
            if self.accept(size.batch) != size.batch:
                continue
            if self.measure_plan(size) is None:
                if not self.is_full:
                    self.unfinished = (
                        f"time ended before {self.search.argument}={size} was measured, which may be faster; tune under another "
                        "--name with a longer --time"
                    )
                break
        if self.search.plan_best is None and not self.unfinished:
            self.find_smaller_size(space)
        while (best := self.search.plan_best) is not None:
            neighbour = propose_neighbour(self.search, best, self.accept)
            if neighbour is None or self.measure_plan(neighbour) is None:
                break
        best = self.search.plan_best
        return None if best is None else best.size

    def find_smaller_size(self, space: Space) -> None:
        """Measure sizes below all that were measured, as long as none fits."""
        refused = min(
            (entry.size.batch for entry in self.search.measured if entry.plan is not None),
            default=self.search.start.batch,
        )
        plans = SmallestPlans(self.steps, space)
        plans.make(max(1, refused // 2))
        self.find_largest_plan(plans, 0, refused, refused // 2)

    @property
    def allows_micro_batches(self) -> bool:
        """True if candidates may split an update into micro-batches."""
        loop, option = self.steps.loop, self.config.micro_batches
        if option == "never" or loop.gradients or not self.steps.has_updates:
            return False
        return option == "always" or not self.steps.normalizes_over_batch

    def steps_of(self, size: StepSize) -> SizedSteps:
        """Return the steps of a loop with the micro-batches of a size."""
        if (size.accumulate > 1) == self.steps.loop.accumulates:
            return self.steps
        if size.accumulate not in self.accumulated:
            words = str(replace(self.steps.loop, accumulate=size.accumulate))
            start = self.search.start.batch
            self.notify(f"capturing the step with {size.accumulate} micro-batches, on fake tensors")
            self.accumulated[size.accumulate] = self.capture(self.config, self.search.argument, start, words)
        return self.accumulated[size.accumulate]


def describe_size(argument: str, measured: MeasuredSize) -> str:
    """Return a line about one measured size."""
    parts = [f"{argument}={measured.size}"]
    for name, side in (("eager", measured.eager), ("plan", measured.plan)):
        if side is not None:
            rate = f", {side.rate}" if side.rate is not None and side.fits else ""
            reason = f" ({side.detail})" if side.detail and not side.fits else ""
            charged = "" if side.charged_bytes is None else f" {fmt_bytes(side.charged_bytes)}"
            parts.append(f"{name}{charged} {side.outcome.value.replace('_', ' ')}{rate}{reason}")
    return ": ".join((parts[0], "; ".join(parts[1:])))
