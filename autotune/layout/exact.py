"""Exact search: a layout within a capacity, or the proof that there is none.

The search enumerates canonical layouts, as minimalloc does (Moffitt, ASPLOS 2023). Buffers are placed in rising order of
offset, each as low as the earlier ones allow, and equal offsets by rank. Any layout becomes canonical if every buffer
drops as far as it can, so no solution is lost. A branch ends when some moment can no longer hold its remaining buffers.

A search that takes too long restarts with the buffers ahead that did not fit before. Without restarts, two of
minimalloc's eleven hard instances were not solved in a minute; with them, all are solved in seconds.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from autotune.layout.buffers import Buffers, Numbers
from autotune.layout.compiled import buffer_arguments, load_compiled

TRIALS = 1000
"""Placements of the first attempt; each later attempt has 1 / 32 more."""
_MOST_IN_PYTHON = 400
"""Maximum number of buffers of the search in Python, which recurses once per buffer."""
_PULLS = ((0, 3.0), (0, 1.0), (0, 10.0), (1, 3.0))
"""Parallel searches: (index of the initial order, distance by which a buffer that did not fit moves ahead)."""


class SearchEnd(Enum):
    """Reason why a search ended without a layout."""

    INFEASIBLE = "no layout is so small"
    OUT_OF_WORK = "no layout within the effort"


def find_layout(buffers: Buffers, capacity: int, work: int) -> Numbers | SearchEnd:
    """Return the offsets of a layout of at most `capacity` bytes, or the reason why there is none.

    No buffer may be empty. `work` limits each of four searches, in steps of about a nanosecond.
    """
    if buffers.max_live > capacity:
        return SearchEnd.INFEASIBLE
    if not len(buffers):
        return np.zeros(0, np.int64)
    compiled = load_compiled()
    if compiled is None:
        return find_layout_in_python(buffers, capacity, work)
    orders = [_early(order) for order in _orders(buffers)]
    keys = np.ascontiguousarray([orders[order] for order, _ in _PULLS], np.float64)
    pulls = np.array([pull for _, pull in _PULLS], np.float64)
    offsets = np.zeros(len(buffers), np.int64)
    outcome = compiled.layout_search(
        *buffer_arguments(buffers),
        capacity,
        len(pulls),
        keys.ctypes.data,
        pulls.ctypes.data,
        TRIALS,
        work,
        offsets.ctypes.data,
    )
    return offsets if outcome == 1 else SearchEnd.INFEASIBLE if outcome == 0 else SearchEnd.OUT_OF_WORK


def _orders(buffers: Buffers) -> Sequence[Numbers]:
    """Return initial orders: by the fullest moment of a life, then by the number of overlapping lives, then by area."""
    births, deaths = np.sort(buffers.born), np.sort(buffers.died)
    beside = np.searchsorted(births, buffers.died) - np.searchsorted(deaths, buffers.born, side="right")
    area = buffers.sizes * (buffers.died - buffers.born)
    return np.lexsort((-area, -beside, -buffers.peak_during)), np.lexsort((-buffers.peak_during,))


def _early(order: Numbers) -> npt.NDArray[np.float64]:
    """Return per buffer a key from 1 down to 0, higher for the buffers that come earlier."""
    key = np.empty(len(order))
    key[order] = np.linspace(1, 0, len(order))
    return key


def find_layout_in_python(buffers: Buffers, capacity: int, work: int) -> Numbers | SearchEnd:
    """Search without a compiler, once and from one order: practical for a few dozen buffers."""
    if len(buffers) > _MOST_IN_PYTHON:
        return SearchEnd.OUT_OF_WORK
    rank = np.empty(len(buffers), np.int64)
    rank[_orders(buffers)[0]] = np.arange(len(buffers))
    search = _Search(buffers, capacity, rank.tolist(), work // 1000)
    everything = list(range(len(buffers)))
    try:
        solved = search.is_possible(everything, 0) and search.solve(everything, 0, -1)
        return np.array(search.offsets, np.int64) if solved else SearchEnd.INFEASIBLE
    except TimeoutError:
        return SearchEnd.OUT_OF_WORK


class _Search:
    def __init__(self, buffers: Buffers, capacity: int, rank: Sequence[int], trials: int) -> None:
        self.sizes, self.born, self.died = buffers.sizes.tolist(), buffers.born.tolist(), buffers.died.tolist()
        self.aligned, self.capacity, self.rank, self.trials = buffers.aligned.tolist(), capacity, rank, trials
        self.offsets = [0] * len(buffers)
        """Offset of a placed buffer; lowest possible offset of another."""

    def solve(self, left: list[int], low: int, rank: int) -> bool:
        """Place the rest, at `low` or above, and at `low` from `rank` on. Return True if all fit."""
        if not left:
            return True
        offsets, sizes = self.offsets, self.sizes
        height = min(offsets[item] + sizes[item] for item in left)
        turn = sorted((offsets[item], self.rank[item], item) for item in left if offsets[item] < height)
        for offset, item_rank, item in turn:
            if (offset, item_rank) < (low, rank):
                continue
            self.trials -= 1
            if self.trials < 0:
                raise TimeoutError
            rest, kept = [other for other in left if other != item], list(offsets)
            for other in rest:
                if self.born[other] < self.died[item] and self.born[item] < self.died[other]:
                    to = self.aligned[other]
                    offsets[other] = max(offsets[other], -(-(offset + sizes[item]) // to) * to)
            if self.is_possible(rest, offset) and self.solve(rest, offset, item_rank):
                return True
            offsets[:] = kept
        return False

    def is_possible(self, left: list[int], low: int) -> bool:
        """Return True if each moment can hold its buffers, each at its lowest possible offset or above."""
        released = sorted((max(self.offsets[item], low), item) for item in left)
        for moment in {self.born[item] for item in left}:
            full = 0
            for release, item in released:
                if self.born[item] <= moment < self.died[item]:
                    full = max(full, release) + self.sizes[item]
            if full > self.capacity:
                return False
        return True
