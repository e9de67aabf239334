"""Propose batch sizes to measure: brackets around the largest one that fits, and sizes that promise many samples per second."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.planners.auto import best_plan
from autotune.planners.space import Space
from autotune.study.batch.records import BatchSearch, MeasuredSize, SideResult, StepSize, largest_gap
from autotune.study.batch.sized_steps import SizedSteps

STEP_DOWN = 0.9
"""Factor to the next smaller size after a process was killed at the limit, so that its charge is unknown."""
FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Factors of the workload's own batch size among the candidates for throughput."""
MICRO_BATCHES = (2, 4, 8)
"""Numbers of micro-batches per update among the candidates for throughput."""
NOTABLE_GAP = 1.25
"""Least ratio of two neighbouring sizes between which another one is measured."""


def keep_size(size: int) -> int:
    """Return a size unchanged, for a workload that refuses none."""
    return size


def find_largest_measured(
    measure: Callable[[int], SideResult | None],
    predict: Callable[[int], float],
    budget_bytes: int,
    *,
    low: int,
    high: int,
    first: int,
    accept: Callable[[int], int] = keep_size,
) -> tuple[int, int]:
    """Return two batch sizes: the largest that fits (`low` if none larger was measured), and the smallest that does not.

    After a size that exceeds the budget, the next size is the one whose predicted bytes, scaled by the measured excess, meet
    the budget. After a size that fits, the next size is the middle of the sizes that are still open.

    Args:
        measure: Measures a size; None where no time is left.
        predict: Predicted bytes of a size.
        budget_bytes: Maximum bytes of the step.
        low: Size that fits; 0 for none.
        high: Size that does not fit.
        first: First size to measure.
        accept: Returns the largest size up to another that the workload accepts; 0 for none.
    """
    size, excluded = first, low  # the workload refuses all sizes above `low` up to `excluded`
    while high - low > largest_gap(low) and high - excluded > 1:
        size = min(max(size, excluded + 1), high - 1)
        accepted = accept(size)
        if accepted <= low:
            excluded = size
            size = (size + high) // 2
            continue
        side = measure(accepted)
        if side is None:
            break
        if side.fits:
            low, excluded = accepted, size
            size = (size + high) // 2
            continue
        high = accepted
        size = int(STEP_DOWN * high)
        expected_bytes = predict(high)
        if side.charged_bytes is not None and side.charged_bytes > budget_bytes and math.isfinite(expected_bytes):
            size = _last_within(predict, budget_bytes * expected_bytes / side.charged_bytes, low, high)
    return low, high


def _last_within(predict: Callable[[int], float], nbytes: float, low: int, high: int) -> int:
    """Return the largest size in [low, high) predicted within these bytes, by bisection; `low` where none is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict(middle) <= nbytes else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class PredictedSize:
    """Candidate with its predicted samples per second."""

    size: StepSize
    rate: float


def list_sizes(start: StepSize, largest: int, eager_largest: int, *, micro_batches: bool) -> list[StepSize]:
    """Return the candidates for throughput: batch sizes with the workload's micro-batches, and other micro-batches.

    >>> [str(size) for size in list_sizes(StepSize(8), 20, 9, micro_batches=False)]
    ['8', '9', '16', '20']
    >>> [str(size) for size in list_sizes(StepSize(8), 8, 0, micro_batches=True)]
    ['8', '1 x 8', '2 x 4', '4 x 2', '8 x 4']
    """
    batches = {start.batch, largest, eager_largest, *(start.batch * factor for factor in FACTORS)}
    if start.batch > largest:
        batches |= {start.batch // factor for factor in FACTORS[:3]}
    sizes = sorted(StepSize(batch, start.accumulate) for batch in batches if 0 < batch <= largest)
    if micro_batches:
        equal = [StepSize(start.samples // count, count) for count in MICRO_BATCHES if start.samples % count == 0]
        more = [StepSize(largest, start.accumulate * 4)]
        extra = sorted(size for size in {*equal, *more} if 0 < size.batch <= largest)
        sizes += [size for size in extra if size not in sizes]
    return sizes


def predict_rates(
    sizes: list[StepSize],
    steps_of: Callable[[StepSize], SizedSteps],
    target_bytes: int,
    space: Space,
    has_time: Callable[[], bool],
) -> list[PredictedSize]:
    """Return the sizes for which a plan meets the target by estimate, with the most samples per second first.

    Seconds are modelled from flops and bytes: they rank sizes, no more. Sizes are left out where time is up, or where the
    workload refuses them.
    """
    predicted: list[PredictedSize] = []
    for size in sizes:
        if predicted and not has_time():
            break
        steps = steps_of(size)
        if not steps.may_accept(size.batch):
            continue
        step = steps.at_size(size.batch)
        candidate = best_plan(step.graph, step.costs, target_bytes, space, accept_first=True)
        if candidate.estimate.peak_bytes <= target_bytes:
            predicted.append(PredictedSize(size, size.batch / candidate.estimate.seconds))
    return sorted(predicted, key=lambda candidate: -candidate.rate)


def propose_neighbour(search: BatchSearch, best: MeasuredSize, accept: Callable[[int], int]) -> StepSize | None:
    """Return a batch size between the fastest size and a measured neighbour; None where both are close.

    `accept` is that of `find_largest_measured`.
    """
    batches = sorted(each.size.batch for each in search.measured if each.size.accumulate == best.size.accumulate)
    position = batches.index(best.size.batch)
    for neighbour in (*batches[position + 1 : position + 2], *batches[max(0, position - 1) : position]):
        small, large = sorted((neighbour, best.size.batch))
        if large >= NOTABLE_GAP * small and small < (middle := accept(round((small * large) ** 0.5))) < large:
            return replace(best.size, batch=middle)
    return None
