"""Choose an option for every block of a chain by dynamic programming over the bytes that were saved so far.

A block's option is in force from its forward to its backward: what it saves, all later blocks have to themselves, in
forward and backward alike. So the bytes at a block depend on its own option and on the sum saved before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = 2000
"""Steps in which saved bytes are counted, rounded down: the answer never needs more than it says."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run `count` blocks from block `first` on."""

    first: int
    count: int
    saved_bytes: int
    """Less than in the given order, while later blocks run; below 0 where it keeps more."""
    peak_bytes: int
    """Highest while these blocks run, if nothing before them saved anything."""
    seconds: float
    """More than in the given order."""


def cheapest(length: int, choices: Sequence[Choice], limit_bytes: int) -> tuple[int, ...] | None:
    """Indices of the choices that cover blocks 0 to `length` in the fewest seconds under a limit; None if none do."""
    quantum = _quantum(length, choices)
    steps = [made.saved_bytes // quantum for made in choices]  # rounds down below zero too
    low = _sum_of_best(length, choices, [min(0, step) for step in steps], worst=True)
    high = _sum_of_best(length, choices, [max(0, step) for step in steps], worst=False)
    size = high - low + 1
    best = np.full((length + 1, size), np.inf)
    came = np.full((length + 1, size), -1, dtype=np.int64)
    best[0, -low] = 0.0
    saved = (np.arange(size) + low) * quantum
    for index in sorted(range(len(choices)), key=lambda i: (choices[i].first, choices[i].seconds)):
        made, step = choices[index], steps[index]
        end = made.first + made.count
        begin, stop = max(0, -step), min(size, size - step)
        if begin >= stop or made.first >= length or end > length:
            continue
        fits = made.peak_bytes - saved[begin:stop] <= limit_bytes
        seconds = np.where(fits, best[made.first, begin:stop] + made.seconds, np.inf)
        there = best[end, begin + step : stop + step]
        better = seconds < there
        there[better] = seconds[better]
        came[end, begin + step : stop + step][better] = index
    at = int(np.argmin(best[length]))
    if not np.isfinite(best[length, at]):
        return None
    chosen: list[int] = []
    end = length
    while end:
        index = int(came[end, at])
        chosen.append(index)
        at -= steps[index]
        end = choices[index].first
    return tuple(reversed(chosen))


def lowest_limit(length: int, choices: Sequence[Choice], high_bytes: int, low_bytes: int) -> int:
    """A limit that can be met, within one part in 500 of the lowest; `high_bytes` is one that can."""
    while high_bytes - low_bytes > max(1, high_bytes // 500):
        middle = (high_bytes + low_bytes) // 2
        if cheapest(length, choices, middle) is None:
            low_bytes = middle
        else:
            high_bytes = middle
    return high_bytes


def _quantum(length: int, choices: Sequence[Choice]) -> int:
    most = _sum_of_best(length, choices, [max(0, made.saved_bytes) for made in choices], worst=False)
    least = _sum_of_best(length, choices, [min(0, made.saved_bytes) for made in choices], worst=True)
    return max(1, most // LEVELS, -least // LEVELS)


def _sum_of_best(length: int, choices: Sequence[Choice], worth: Sequence[int], *, worst: bool) -> int:
    """Least or greatest sum of any chain."""
    pick = min if worst else max
    sums: list[int | None] = [0] + [None] * length
    for index in sorted(range(len(choices)), key=lambda i: choices[i].first):
        made = choices[index]
        before, end = sums[made.first] if made.first <= length else None, made.first + made.count
        if before is not None and end <= length:
            there = sums[end]
            sums[end] = before + worth[index] if there is None else pick(there, before + worth[index])
    return sums[length] or 0
