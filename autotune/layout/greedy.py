"""One buffer after the other where it fits beside those that live at the same time. What counts is the order.

A few orders are tried, and from each those buffers that stick out above the highest sum of live bytes are moved ahead,
again and again ("squeaky wheel", Joslin and Clements 1999).
"""

from collections.abc import Iterator

import numpy as np

from autotune.layout.buffers import Buffers, Layout, Numbers
from autotune.layout.compiled import arguments, library

_LEADERS = 4
"""Orders that are followed further."""


def layouts(buffers: Buffers) -> Iterator[Layout]:
    """Layouts without end: of each order, then of those that came out best; how many to draw is the caller's to say."""
    found: list[tuple[int, int, Numbers, bool, Numbers]] = []
    for number, (order, tight) in enumerate(_starts(buffers)):
        offsets = _place(buffers, order, tight)
        yield _layout(buffers, offsets)
        found.append((int((offsets + buffers.sizes).max(initial=0)), number, order, tight, offsets))
    leaders = [(order, tight, offsets) for _, _, order, tight, offsets in sorted(found, key=lambda one: one[:2])]
    leaders = leaders[:_LEADERS]
    place = [np.empty(len(buffers)) for _ in leaders]
    while True:
        for at, (before, tight, offsets) in enumerate(leaders):
            place[at][before] = np.arange(len(before))
            high = offsets + buffers.sizes > buffers.max_live
            place[at][high] = place[at][high] / 2 - 1
            order = np.argsort(place[at], kind="stable")
            leaders[at] = order, tight, _place(buffers, order, tight)
            yield _layout(buffers, leaders[at][2])


def _layout(buffers: Buffers, offsets: Numbers) -> Layout:
    return Layout(tuple(offsets.tolist()), int((offsets + buffers.sizes).max(initial=0)), buffers.max_live)


def _starts(buffers: Buffers) -> Iterator[tuple[Numbers, bool]]:
    """Orders to begin with, each for best fit and for first fit."""
    size, born, length = -buffers.sizes, buffers.born, buffers.born - buffers.died
    area = -size * length
    for keys in (
        (born, size, -buffers.crowd),
        (born, length, size),
        (born, area),
        (born, length, -buffers.crowd),
        (born, area, -buffers.crowd),
        (born, -buffers.died),
    ):
        order = np.lexsort(keys)
        yield order, True
        yield order, False


def _place(buffers: Buffers, order: Numbers, tight: bool) -> Numbers:
    """Each in turn into the smallest (`tight`) or the lowest gap that holds it, else above those beside it."""
    loaded = library()
    if loaded is None:
        return place_in_python(buffers, order, tight)
    offsets = np.zeros(len(buffers), np.int64)
    ranked = np.ascontiguousarray(order, np.int32)
    loaded.layout_place(*arguments(buffers), ranked.ctypes.data, int(tight), offsets.ctypes.data)
    return offsets


def place_in_python(buffers: Buffers, order: Numbers, tight: bool) -> Numbers:
    """The same offsets without a compiler."""
    offsets = np.zeros(len(order), np.int64)
    placed = np.zeros((4, len(order)), np.int64)  # rows: offset, end, born, died; sorted by offset
    sizes, births, deaths = buffers.sizes.tolist(), buffers.born.tolist(), buffers.died.tolist()
    aligned = buffers.aligned.tolist()
    for count, item in enumerate(order.tolist()):
        size, born, died = sizes[item], births[item], deaths[item]
        begins, ends, others_born, others_died = placed[:, :count]
        beside = (others_born < died) & (others_died > born)
        offset = _gap(begins[beside], ends[beside], size, aligned[item], tight)
        at = int(np.searchsorted(begins, offset, side="right"))
        placed[:, at + 1 : count + 1] = placed[:, at:count].copy()
        placed[:, at] = (offset, offset + size, born, died)
        offsets[item] = offset
    return offsets


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
