"""Lay buffers of known size and life side by side in as few bytes as possible.

Greedy: one buffer after the other goes where it fits beside those that live at the same time. What counts is the order;
a few are tried, and from the best of them those buffers that stick out above the highest sum of live bytes are moved
ahead, again and again ("squeaky wheel", Joslin and Clements 1999). All work ends as soon as nothing sticks out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes; what torch gives its CPU tensors."""
WIDE, WIDE_ALIGNMENT = 2**16, 512
"""Buffers of so many bytes lie where a disk can read and write them itself: a sector is what most of them ask for."""
_WORK = 1e8
"""How long to look, in units of about 10 ns: work is counted, not time, so that the same lives give the same layout."""
_ROUNDS = 8
"""Layouts per order and fit before the next one has its turn."""

Numbers = npt.NDArray[np.int64]


def pack(
    sizes: Sequence[int], born: Sequence[int], died: Sequence[int], *, alignment: int = ALIGNMENT
) -> tuple[list[int], int]:
    """Offsets, and the bytes that hold them all. Lives are half-open: one that dies at 5 may share with one born at 5."""
    if not len(sizes):
        return [], 0
    asked = np.array(sizes, np.int64)
    aligned = np.where(asked < WIDE, alignment, max(alignment, WIDE_ALIGNMENT))
    lives = _Lives(-(-asked // aligned) * aligned, np.array(born), np.array(died), aligned)
    best: _Layout | None = None
    for found in islice(_layouts(lives), max(4, int(_WORK / lives.placing))):
        best = found if best is None else min(best, found, key=lambda layout: layout.bytes)
        if best.bytes == lives.limit:
            break
    assert best is not None
    return best.offsets.tolist(), best.bytes


def max_live(sizes: Sequence[int], born: Sequence[int], died: Sequence[int]) -> int:
    """The highest sum of bytes alive at once: no layout is smaller."""
    _, live = _profile(np.array(sizes, np.int64), np.array(born), np.array(died))
    return int(live.max(initial=0))


@dataclass(frozen=True, slots=True)
class _Layout:
    offsets: Numbers
    bytes: int


class _Lives:
    """Buffers as arrays, with what all orders need to know of them."""

    def __init__(self, sizes: Numbers, born: Numbers, died: Numbers, aligned: Numbers) -> None:
        self.sizes, self.born, self.died, self.aligned = sizes, born, died, aligned
        moments, live = _profile(sizes, born, died)
        self.limit = int(live.max())
        spans = np.stack((np.searchsorted(moments, born), np.searchsorted(moments, died)), axis=1)
        self.crowd = np.maximum.reduceat(np.append(live, 0), spans.ravel())[::2]
        """Per buffer the highest sum of live bytes during its life."""
        self.placing = len(sizes) * (1000 + 0.5 * len(sizes))
        """Work of one greedy layout."""


def _profile(sizes: Numbers, born: Numbers, died: Numbers) -> tuple[Numbers, Numbers]:
    """Moments in rising order, deaths before births, and the bytes alive from each on."""
    moments, changes = np.concatenate((born, died)), np.concatenate((sizes, -sizes))
    order = np.lexsort((changes, moments))
    return moments[order], np.cumsum(changes[order])


def _starts(lives: _Lives) -> Iterator[tuple[Numbers, bool]]:
    """Orders to begin with, each for best fit and for first fit, the most promising first."""
    size, born, length = -lives.sizes, lives.born, lives.born - lives.died
    area = -size * length
    for keys in (
        (born, size, -lives.crowd),
        (born, length, size),
        (born, area),
        (born, length, -lives.crowd),
        (born, area, -lives.crowd),
        (born, -lives.died),
    ):
        order = np.lexsort(keys)
        yield order, True
        yield order, False


def _layouts(lives: _Lives) -> Iterator[_Layout]:
    place = np.empty(len(lives.sizes))
    for start, tight in _starts(lives):
        order = start
        for _ in range(_ROUNDS):
            found = _place(lives, order, tight)
            yield found
            place[order] = np.arange(len(order))
            high = found.offsets + lives.sizes > lives.limit
            place[high] = place[high] / 2 - 1
            order = np.argsort(place, kind="stable")


def _place(lives: _Lives, order: Numbers, tight: bool) -> _Layout:
    """Each buffer in turn into the smallest (`tight`) or the lowest gap that holds it, else above those beside it."""
    offsets = np.zeros(len(order), np.int64)
    placed = np.zeros((4, len(order)), np.int64)  # rows: offset, end, born, died; sorted by offset
    sizes, births, deaths = lives.sizes.tolist(), lives.born.tolist(), lives.died.tolist()
    aligned = lives.aligned.tolist()
    top = 0
    for count, item in enumerate(order.tolist()):
        size, born, died = sizes[item], births[item], deaths[item]
        begins, ends, others_born, others_died = placed[:, :count]
        beside = (others_born < died) & (others_died > born)
        offset = _gap(begins[beside], ends[beside], size, aligned[item], tight)
        at = int(np.searchsorted(begins, offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count].copy()
        placed[:, at] = (offset, offset + size, born, died)
        offsets[item] = offset
        top = max(top, offset + size)
    return _Layout(offsets, top)


def _gap(begins: Numbers, ends: Numbers, size: int, aligned: int, tight: bool) -> int:
    """Where a gap begins that holds the size, aligned, between intervals sorted by their begin."""
    if not len(begins):
        return 0
    ends = -(-np.maximum.accumulate(ends) // aligned) * aligned
    starts = np.concatenate(([0], ends[:-1]))
    gaps = begins - starts
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(ends[-1])
    return int(starts[fits[np.argmin(gaps[fits])] if tight else fits[0]])
