"""Choose an option for every block of a chain by dynamic programming over the bytes saved so far.

A block's option holds from its forward to its backward, so all later blocks have its saved bytes available in forward
and backward. The bytes at a block therefore depend on its own option and on the sum saved before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = 2000
"""Number of levels of saved bytes. Savings are rounded down, so the result never needs more than predicted."""


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """Option to run the `count` blocks from block `first` on."""

    first: int
    count: int
    saved_bytes: int
    """Bytes saved while later blocks run, relative to the input order; negative if more is kept."""
    peak_bytes: int
    """Peak while these blocks run, without savings of earlier blocks."""
    seconds: float
    """Seconds beyond the input order."""


def choose_cheapest(length: int, choices: Sequence[BlockChoice], limit_bytes: int) -> tuple[int, ...] | None:
    """Return the indices of the choices that cover blocks 0 to `length` in the fewest seconds; None if none fits."""
    quantum = _quantum(length, choices)
    steps = [choice.saved_bytes // quantum for choice in choices]  # rounds down below zero too
    low = _sum_of_best(length, choices, [min(0, step) for step in steps], worst=True)
    high = _sum_of_best(length, choices, [max(0, step) for step in steps], worst=False)
    size = high - low + 1
    best = np.full((length + 1, size), np.inf)
    chosen_by = np.full((length + 1, size), -1, dtype=np.int64)
    best[0, -low] = 0.0
    saved = (np.arange(size) + low) * quantum
    for index in sorted(range(len(choices)), key=lambda i: (choices[i].first, choices[i].seconds)):
        choice, step = choices[index], steps[index]
        end = choice.first + choice.count
        begin, stop = max(0, -step), min(size, size - step)
        if begin >= stop or choice.first >= length or end > length:
            continue
        fits = choice.peak_bytes - saved[begin:stop] <= limit_bytes
        seconds = np.where(fits, best[choice.first, begin:stop] + choice.seconds, np.inf)
        reached = best[end, begin + step : stop + step]
        better = seconds < reached
        reached[better] = seconds[better]
        chosen_by[end, begin + step : stop + step][better] = index
    level = int(np.argmin(best[length]))
    if not np.isfinite(best[length, level]):
        return None
    chosen: list[int] = []
    end = length
    while end:
        index = int(chosen_by[end, level])
        chosen.append(index)
        level -= steps[index]
        end = choices[index].first
    return tuple(reversed(chosen))


def find_lowest_limit(length: int, choices: Sequence[BlockChoice], high_bytes: int, low_bytes: int) -> int:
    """Return a feasible limit within 0.2 % of the lowest one; `high_bytes` has to be feasible."""
    while high_bytes - low_bytes > max(1, high_bytes // 500):
        middle = (high_bytes + low_bytes) // 2
        if choose_cheapest(length, choices, middle) is None:
            low_bytes = middle
        else:
            high_bytes = middle
    return high_bytes


def _quantum(length: int, choices: Sequence[BlockChoice]) -> int:
    most = _sum_of_best(length, choices, [max(0, choice.saved_bytes) for choice in choices], worst=False)
    least = _sum_of_best(length, choices, [min(0, choice.saved_bytes) for choice in choices], worst=True)
    return max(1, most // LEVELS, -least // LEVELS)


def _sum_of_best(length: int, choices: Sequence[BlockChoice], worth: Sequence[int], *, worst: bool) -> int:
    """Return the smallest (`worst`) or largest sum over all chains that cover the blocks."""
    pick = min if worst else max
    sums: list[int | None] = [0] + [None] * length
    for index in sorted(range(len(choices)), key=lambda i: choices[i].first):
        choice = choices[index]
        before, end = sums[choice.first] if choice.first <= length else None, choice.first + choice.count
        if before is not None and end <= length:
            reached = sums[end]
            sums[end] = before + worth[index] if reached is None else pick(reached, before + worth[index])
    return sums[length] or 0
