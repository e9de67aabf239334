"""Greedy layouts: one buffer after the other goes where it fits beside those live at the same time.

The order decides. A few orders are tried; then the buffers of the best that lie above the highest sum of live bytes are
moved ahead repeatedly (squeaky wheel optimization, Joslin and Clements 1999).
"""

from collections.abc import Iterator

import numpy as np

from autotune.layout.buffers import Buffers, Layout, Numbers
from autotune.layout.compiled import buffer_arguments, load_compiled

_LEADERS = 4
"""Number of orders that are improved further."""


def generate_layouts(buffers: Buffers) -> Iterator[Layout]:
    """Yield layouts without end: one of each initial order, then improvements of the best orders."""
    initial: list[tuple[int, int, Numbers, bool, Numbers]] = []
    for number, (order, tight) in enumerate(_starts(buffers)):
        offsets = _place(buffers, order, tight)
        yield _layout(buffers, offsets)
        initial.append((int((offsets + buffers.sizes).max(initial=0)), number, order, tight, offsets))
    leaders = [(order, tight, offsets) for _, _, order, tight, offsets in sorted(initial, key=lambda item: item[:2])]
    leaders = leaders[:_LEADERS]
    place = [np.empty(len(buffers)) for _ in leaders]
    while True:
        for index, (before, tight, offsets) in enumerate(leaders):
            place[index][before] = np.arange(len(before))
            high = offsets + buffers.sizes > buffers.max_live
            place[index][high] = place[index][high] / 2 - 1
            order = np.argsort(place[index], kind="stable")
            leaders[index] = order, tight, _place(buffers, order, tight)
            yield _layout(buffers, leaders[index][2])


def _layout(buffers: Buffers, offsets: Numbers) -> Layout:
    return Layout(tuple(offsets.tolist()), int((offsets + buffers.sizes).max(initial=0)), buffers.max_live)


def _starts(buffers: Buffers) -> Iterator[tuple[Numbers, bool]]:
    """Yield initial orders, each for best fit and for first fit."""
    size, born, length = -buffers.sizes, buffers.born, buffers.born - buffers.died
    area = -size * length
    for keys in (
        (born, size, -buffers.peak_during),
        (born, length, size),
        (born, area),
        (born, length, -buffers.peak_during),
        (born, area, -buffers.peak_during),
        (born, -buffers.died),
    ):
        order = np.lexsort(keys)
        yield order, True
        yield order, False


def _place(buffers: Buffers, order: Numbers, tight: bool) -> Numbers:
    """Place each buffer in turn in the smallest (`tight`) or lowest gap that holds it, else above its neighbours."""
    compiled = load_compiled()
    if compiled is None:
        return place_in_python(buffers, order, tight)
    offsets = np.zeros(len(buffers), np.int64)
    ranked = np.ascontiguousarray(order, np.int32)
    compiled.layout_place(*buffer_arguments(buffers), ranked.ctypes.data, int(tight), offsets.ctypes.data)
    return offsets


def place_in_python(buffers: Buffers, order: Numbers, tight: bool) -> Numbers:
    """Return the offsets of `_place` without a compiler."""
    offsets = np.zeros(len(order), np.int64)
    placed = np.zeros((4, len(order)), np.int64)  # rows: offset, end, born, died; sorted by offset
    sizes, births, deaths = buffers.sizes.tolist(), buffers.born.tolist(), buffers.died.tolist()
    aligned = buffers.aligned.tolist()
    for count, item in enumerate(order.tolist()):
        size, born, died = sizes[item], births[item], deaths[item]
        begins, ends, others_born, others_died = placed[:, :count]
        beside = (others_born < died) & (others_died > born)
        offset = _gap(begins[beside], ends[beside], size, aligned[item], tight)
        index = int(np.searchsorted(begins, offset, side="right"))
        placed[:, index + 1 : count + 1] = placed[:, index:count].copy()
        placed[:, index] = (offset, offset + size, born, died)
        offsets[item] = offset
    return offsets


def _gap(begins: Numbers, ends: Numbers, size: int, aligned: int, tight: bool) -> int:
    """Return the aligned start of a gap that holds the size, between intervals sorted by their start."""
    if not len(begins):
        return 0
    ends = -(-np.maximum.accumulate(ends) // aligned) * aligned
    starts = np.concatenate(([0], ends[:-1]))
    gaps = begins - starts
    fits = np.flatnonzero(gaps >= size)
    if not len(fits):
        return int(ends[-1])
    return int(starts[fits[np.argmin(gaps[fits])] if tight else fits[0]])
