"""A layout within a capacity, or the proof that there is none: a search among canonical layouts.

Buffers are placed in rising order of offset, each as low as those before it allow, equal offsets by rank (minimalloc's
idea, Moffitt, ASPLOS 2023). Letting every buffer drop makes any layout canonical, so nothing is lost. A branch ends
where some moment could no longer hold all that is still to live in it, each buffer released where it can first lie. A
search that takes too long begins again, with those ahead that did not fit before: of minimalloc's eleven hard instances
two were not solved without that in a minute, all in seconds with it.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from autotune.layout.buffers import Buffers, Numbers
from autotune.layout.compiled import arguments, library

TRIALS = 1000
"""Placements of a search's first try; each later one has a part in 32 more."""
_MOST_IN_PYTHON = 400
"""Each buffer is a call within the one before it."""
_PULLS = ((0, 3.0), (0, 1.0), (0, 10.0), (1, 3.0))
"""Searches side by side: the order to begin with, and how far what did not fit is moved ahead."""


class Verdict(Enum):
    """What a search that gave no layout can say."""

    NONE = "no layout is so small"
    SPENT = "not found within the effort"


def within(buffers: Buffers, capacity: int, work: int) -> Numbers | Verdict:
    """Offsets of a layout of at most `capacity` bytes, of buffers none of which is empty. `work`: in steps of about a
    nanosecond, for each of four searches.
    """
    if buffers.max_live > capacity:
        return Verdict.NONE
    if not len(buffers):
        return np.zeros(0, np.int64)
    loaded = library()
    if loaded is None:
        return within_in_python(buffers, capacity, work)
    orders = [_early(order) for order in _orders(buffers)]
    keys = np.ascontiguousarray([orders[order] for order, _ in _PULLS], np.float64)
    pulls = np.array([pull for _, pull in _PULLS], np.float64)
    offsets = np.zeros(len(buffers), np.int64)
    found = loaded.layout_search(
        *arguments(buffers),
        capacity,
        len(pulls),
        keys.ctypes.data,
        pulls.ctypes.data,
        TRIALS,
        work,
        offsets.ctypes.data,
    )
    return offsets if found == 1 else Verdict.NONE if found == 0 else Verdict.SPENT


def _orders(buffers: Buffers) -> Sequence[Numbers]:
    """What to place first among equals: what lives in the fullest moment, beside most others, on the widest area."""
    births, deaths = np.sort(buffers.born), np.sort(buffers.died)
    beside = np.searchsorted(births, buffers.died) - np.searchsorted(deaths, buffers.born, side="right")
    area = buffers.sizes * (buffers.died - buffers.born)
    return np.lexsort((-area, -beside, -buffers.crowd)), np.lexsort((-buffers.crowd,))


def _early(order: Numbers) -> npt.NDArray[np.float64]:
    """Per buffer from 1 down to 0, the earlier in the order the higher."""
    key = np.empty(len(order))
    key[order] = np.linspace(1, 0, len(order))
    return key


def within_in_python(buffers: Buffers, capacity: int, work: int) -> Numbers | Verdict:
    """The same search without a compiler, once and from one order: for a few dozen buffers."""
    if len(buffers) > _MOST_IN_PYTHON:
        return Verdict.SPENT
    rank = np.empty(len(buffers), np.int64)
    rank[_orders(buffers)[0]] = np.arange(len(buffers))
    search = _Search(buffers, capacity, rank.tolist(), work // 1000)
    everything = list(range(len(buffers)))
    try:
        found = search.possible(everything, 0) and search.solve(everything, 0, -1)
        return np.array(search.offsets, np.int64) if found else Verdict.NONE
    except TimeoutError:
        return Verdict.SPENT


class _Search:
    def __init__(self, buffers: Buffers, capacity: int, rank: Sequence[int], trials: int) -> None:
        self.sizes, self.born, self.died = buffers.sizes.tolist(), buffers.born.tolist(), buffers.died.tolist()
        self.aligned, self.capacity, self.rank, self.trials = buffers.aligned.tolist(), capacity, rank, trials
        self.offsets = [0] * len(buffers)
        """Of a placed buffer where it lies, of another the lowest where it can."""

    def solve(self, left: list[int], low: int, rank: int) -> bool:
        """Whether the rest can be placed, nothing below `low`, and there nothing before `rank`."""
        if not left:
            return True
        offsets, sizes = self.offsets, self.sizes
        height = min(offsets[item] + sizes[item] for item in left)
        turn = sorted((offsets[item], self.rank[item], item) for item in left if offsets[item] < height)
        for offset, mine, item in turn:
            if (offset, mine) < (low, rank):
                continue
            self.trials -= 1
            if self.trials < 0:
                raise TimeoutError
            rest, kept = [other for other in left if other != item], list(offsets)
            for other in rest:
                if self.born[other] < self.died[item] and self.born[item] < self.died[other]:
                    to = self.aligned[other]
                    offsets[other] = max(offsets[other], -(-(offset + sizes[item]) // to) * to)
            if self.possible(rest, offset) and self.solve(rest, offset, mine):
                return True
            offsets[:] = kept
        return False

    def possible(self, left: list[int], low: int) -> bool:
        """Whether each moment could hold its buffers, none of them below where it can now come to lie."""
        released = sorted((max(self.offsets[item], low), item) for item in left)
        for moment in {self.born[item] for item in left}:
            full = 0
            for release, item in released:
                if self.born[item] <= moment < self.died[item]:
                    full = max(full, release) + self.sizes[item]
            if full > self.capacity:
                return False
        return True
