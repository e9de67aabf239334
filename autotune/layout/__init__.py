"""Lay buffers of known size and life side by side in as few bytes as possible.

In: `Buffers`: sizes and lives, of whatever.
Out: a `Layout`: an offset for each buffer.
Read first: `buffers`.
"""

import math
from dataclasses import replace
from itertools import islice

import numpy as np

from autotune.layout import ejection, exact, greedy
from autotune.layout.buffers import Buffers, Layout
from autotune.layout.validate import check_layout

__all__ = ["Buffers", "Layout", "check_layout", "lay_out"]

_SMALL, _NEAR = 400, 400
"""Of more buffers than these a layout within a part in `_NEAR` of the aim is near enough, where no capacity is to be kept."""
WORK = 60_000_000
"""How long to search, in steps of a few nanoseconds: work is counted, not time, so that the same lives give the same layout."""
_GREEDILY = 8
"""Before that as many times as long greedily, in steps of a nanosecond; and `_MOST` layouts at most."""
_MOST = 400
_EJECTING = 3
"""Then at each capacity as many times as long by taking out what is in the way."""
_STEP_DOWN = 4
"""Capacities between the best layout and the highest sum of live bytes that are tried where that itself is not reached."""


def lay_out(buffers: Buffers, capacity: int | None = None, *, work: int = WORK) -> Layout:
    """The smallest layout that is found, or the first one within the capacity. It ends early at the highest sum of live
    bytes, which no layout undercuts.

    First greedily; where that leaves a gap, with searches that try the capacities in between.
    """
    filled = buffers.sizes > 0
    if not filled.all():  # what is empty shares bytes with nothing, and would hold the searches up
        rest = lay_out(buffers.only(filled), capacity, work=work)
        offsets = np.zeros(len(buffers), np.int64)
        offsets[filled] = rest.offsets
        return replace(rest, offsets=tuple(offsets.tolist()))
    aim = max(buffers.max_live, capacity or 0)
    best: Layout | None = None
    placing = 1000 + len(buffers) ** 2
    for found in islice(greedy.layouts(buffers), min(_MOST, max(12, _GREEDILY * work // placing))):
        best = found if best is None or found.bytes < best.bytes else best
        if best.bytes <= aim:
            return best
    near = max(1, aim // _NEAR) if len(buffers) > _SMALL and capacity is None else 1
    assert best is not None
    low, bound = aim, 0
    for step in range(1 if capacity else _STEP_DOWN):
        if best.bytes <= low + (near if step else near - 1):
            break
        at = low if not step else _between(aim, low, best.bytes)
        ejected = ejection.within(buffers, at, _EJECTING * min(WORK, work))
        found_at = exact.within(buffers, at, work // 2**step) if ejected is None else ejected
        if isinstance(found_at, exact.Verdict):
            low, bound = at, at + 1 if found_at is exact.Verdict.NONE else bound
        else:
            top = int((found_at + buffers.sizes).max())
            best = Layout(tuple(found_at.tolist()), top, buffers.max_live)
    return replace(best, bound=bound)


def _between(aim: int, low: int, high: int) -> int:
    """The capacity between two at the geometric mean of how far they lie above the aim: small gaps are reached in few steps."""
    return aim + int(math.sqrt(max(low - aim, aim / 2048, 1) * (high - aim)))
