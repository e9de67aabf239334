"""Estimate the largest batch size that fits a budget: fake tensors, the planners' smallest plan, and the exact simulator."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from autotune.errors import PlanError
from autotune.ir.plan import Plan
from autotune.planners.candidates import find_smallest
from autotune.planners.space import Space, space_without_stores
from autotune.predict.plan_layout import add_layout
from autotune.predict.simulate import peak_bytes
from autotune.records.config import Config
from autotune.study.batch.largest_size import find_largest_size
from autotune.study.batch.sized_steps import SizedSteps, capture_sizes
from autotune.study.verdicts.ranking import compute_target_bytes
from autotune.workloads.batch_argument import BatchArgument, find_batch_argument

MAX_SIZE = 2**20
"""Largest batch size that is considered."""
PROBES = 32
"""Number of larger sizes that are simulated in case bytes do not rise with the size."""
PLANNING_ROUNDS = 3
"""Maximum number of sizes for which the smallest plan is made."""
PLANNING_SECONDS = 30.0
"""Time after which no other plan is made."""
SMALL_BATCH = 2
"""Batch size at which an idle process is measured; models with batch norm refuse 1."""


@dataclass(frozen=True, slots=True)
class BatchEstimate:
    """Largest batch sizes that fit a budget, by estimate. Nothing was allocated and nothing was trained.

    Bytes are of live tensors. Workspaces of kernels are not contained, and plans use no store.
    """

    workload: str
    """Reference of the workload with its arguments."""
    argument: str
    """Argument of the factory that sets the batch size."""
    size: int
    """Batch size of the workload as its config describes it."""
    budget: str
    budget_bytes: int
    """Bytes that the budget leaves to the step."""
    floor_bytes: int | None
    """Bytes of the idle process, measured at a small batch size; None where the budget is a share of eager's peak."""
    largest: int
    """Largest batch size for which a plan fits, with room for the allocator's waste; 0 where none does."""
    largest_bytes: int
    """Peak of the smallest plan at that size; at the workload's own size where none fits."""
    eager_largest: int
    """Largest batch size at which plain eager fits; 0 where none does."""
    eager_bytes: int
    """Eager's peak at the workload's own batch size."""
    normalizes_over_batch: bool
    """True if the step has batch norm in training, whose statistics depend on the batch size."""
    captures: int = 0
    """Number of batch sizes that were captured."""
    seconds: float = 0.0
    """Duration of the estimate."""
    is_interpolated: bool = True
    """False if bytes do not grow linearly with the batch size, so that every size was captured."""
    refused: str = ""
    """Size that the workload refuses, with the reason; empty if it refused none that was tried."""


class SmallestPlans:
    """The smallest plans of a workload, each made for one size, and the peak that they reach at any size."""

    def __init__(self, steps: SizedSteps, space: Space) -> None:
        self._steps, self._space = steps, space
        self._plans: list[Plan] = []
        self._planned: set[int] = set()
        self._captured_peaks: dict[int, float] = {}
        self._seconds = 0.0
        self.waste = 0.0
        """Excess of the last plan's arena over its live bytes, as a share of its peak."""

    def make(self, size: int) -> bool:
        """Make the smallest plan of a size; return False where it was made before, or the workload refuses the size."""
        is_interpolated = self._steps.is_interpolated
        planned: Collection[int] = self._planned if is_interpolated else self._captured_peaks
        if size in planned:
            return False
        began = time.monotonic()
        if not is_interpolated and not self._steps.accepts(size):
            self._captured_peaks[size] = math.inf
            return False
        step = self._steps.at_size(size)
        candidate = find_smallest(step.graph, step.costs, self._space)
        charged = add_layout(step.graph, candidate.plan, step.costs, candidate.estimate).charged_bytes
        self.waste = (charged or candidate.estimate.peak_bytes) / max(candidate.estimate.peak_bytes, 1) - 1
        if is_interpolated:
            self._planned.add(size)
            if candidate.plan not in self._plans:
                self._plans.append(candidate.plan)
        else:
            self._captured_peaks[size] = candidate.estimate.peak_bytes
        self._seconds += time.monotonic() - began
        return True

    def usable_bytes(self, target_bytes: int) -> int:
        """Return the peak at which a plan and the waste of its arena stay within the target."""
        return int(target_bytes / (1 + max(0.0, self.waste)))

    def peak_at(self, size: int) -> float:
        """Return the lowest peak of all plans at a size; without interpolation, the peak of the plan made for it.

        After `PLANNING_SECONDS` of planning only sizes below all planned ones get a plan. Another size without one has the
        peak of larger sizes that have one, or infinity. So has a size that the workload refuses.
        """
        if size % self._steps.unit or size in self._steps.refusals:
            return math.inf
        if not self._steps.is_interpolated:  # plans of other sizes belong to differently connected graphs
            if self._seconds <= PLANNING_SECONDS or size < min(self._captured_peaks, default=size + 1):
                self.make(size)
            larger = (peak for planned, peak in self._captured_peaks.items() if planned > size)
            return self._captured_peaks.get(size, min(larger, default=math.inf))
        step = self._steps.at_size(size)
        lowest = math.inf
        for plan in self._plans:
            try:
                lowest = min(lowest, peak_bytes(step.graph, plan, step.costs))
            except PlanError:  # an op in place, whose output has other bytes than its input at this size
                continue
        return lowest


def estimate_batch(config: Config, measure_floor: Callable[[BatchArgument], int]) -> BatchEstimate:
    """Estimate the largest batch size of a config's workload within its budget, for eager and for the smallest plan.

    Args:
        config: Workload, budget and planners.
        measure_floor: Measures the bytes of an idle process at an argument's size, which is small where the workload accepts
            that; called for a budget in bytes of the process.

    Raises:
        ConfigError: No argument of the factory sets the batch size, or the workload cannot be made.
        CaptureError: The step cannot be captured.
    """
    began = time.monotonic()
    argument = find_batch_argument(config.workload, config.arguments, config.batch_argument)
    steps = capture_sizes(config, argument.name, argument.size)

    def measure_small(argument: BatchArgument) -> int:
        is_small = argument.size <= SMALL_BATCH or not steps.accepts(SMALL_BATCH)
        return measure_floor(argument if is_small else replace(argument, size=SMALL_BATCH))

    return estimate_from_steps(config, argument, steps, measure_small, began)


def estimate_from_steps(
    config: Config,
    argument: BatchArgument,
    steps: SizedSteps,
    measure_floor: Callable[[BatchArgument], int],
    began: float,
) -> BatchEstimate:
    """Estimate the largest batch size from captured steps; see `estimate_batch`."""
    budget = config.parsed_budget
    floor_bytes = measure_floor(argument) if budget.is_of_process else None
    eager_bytes = int(steps.eager_bytes(argument.size))
    budget_bytes = budget.step_bytes(floor_bytes=floor_bytes or 0, baseline_step_bytes=eager_bytes)
    space = space_without_stores(config.planners.model_dump(), config.device)
    plans = SmallestPlans(steps, space)
    largest = search_largest(steps, plans, compute_target_bytes(budget_bytes, []), argument.size, began)
    largest_bytes = int(plans.peak_at(largest or argument.size))
    eager_largest = find_largest_accepted(steps, steps.eager_bytes, budget_bytes, start=argument.size)
    # where eager cannot be counted, a refused size may have the bytes of the interpolated step
    if not steps.counts_eager or eager_largest in steps.refusals:
        eager_largest = steps.round_down(eager_largest)
    return BatchEstimate(
        workload=str(config.ref),
        argument=argument.name,
        size=argument.size,
        budget=config.budget,
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
        largest=largest,
        largest_bytes=largest_bytes,
        eager_largest=eager_largest,
        eager_bytes=eager_bytes,
        normalizes_over_batch=steps.normalizes_over_batch,
        captures=steps.captures,
        seconds=time.monotonic() - began,
        is_interpolated=steps.is_interpolated,
        refused=next((f"{argument.name}={size}: {reason}" for size, reason in steps.refusals.items()), ""),
    )


def search_largest(steps: SizedSteps, plans: SmallestPlans, target_bytes: int, size: int, began: float) -> int:
    """Return the largest size for which a plan stays within the target; 0 where none does.

    The smallest plan of one size is simulated at other sizes. For the largest size at which it fits, a further plan is made,
    until the largest size no longer changes. Each largest size is captured, to check its interpolated bytes. Where the
    workload refuses it, `SizedSteps.round_down` returns a smaller one.
    """
    plans.make(size)
    largest = 0
    for _ in range(PLANNING_ROUNDS if steps.is_interpolated else 0):
        previous = largest
        usable_bytes = plans.usable_bytes(target_bytes)
        largest = find_largest_accepted(steps, plans.peak_at, usable_bytes, start=largest or size, probes=PROBES)
        largest = steps.round_down(largest)
        is_late = time.monotonic() - began > PLANNING_SECONDS
        if largest and not steps.check(largest):
            break
        if largest == previous or is_late or not plans.make(max(largest, 1)):
            break
    if steps.is_interpolated:
        return largest
    usable_bytes = plans.usable_bytes(target_bytes)
    plans.make(size)  # one size has a plan then, even where no time is left for others
    return steps.round_down(find_largest_accepted(steps, plans.peak_at, usable_bytes, start=largest or size))


def find_largest_accepted(
    steps: SizedSteps, bytes_at: Callable[[int], float], budget_bytes: int, *, start: int, probes: int = 0
) -> int:
    """Return the largest size within the budget, as `find_largest_size` does, but none that is known to be refused.

    A size that the workload refuses counts as the next smaller one that it accepts.
    """
    counted = count_accepted(steps, bytes_at)
    largest = find_largest_size(counted, budget_bytes, start=start, cap=MAX_SIZE, probes=probes)
    return largest - largest % steps.unit


def count_accepted(steps: SizedSteps, bytes_at: Callable[[int], float]) -> Callable[[int], float]:
    """Return a function of a size's bytes; a refused size has those of the next smaller accepted size."""

    def bytes_below(size: int) -> float:
        smaller = size - size % steps.unit
        nbytes = bytes_at(smaller) if smaller else math.inf
        return bytes_below(steps.round_down(smaller)) if smaller in steps.refusals else nbytes

    return bytes_below
