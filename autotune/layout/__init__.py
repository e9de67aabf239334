"""Lay buffers of known size and life side by side in as few bytes as possible."""

from dataclasses import replace
from itertools import islice

from autotune.layout import exact, greedy
from autotune.layout.buffers import Buffers, Layout
from autotune.layout.validate import check_layout

__all__ = ["Buffers", "Layout", "check_layout", "lay_out"]

WORK = 60_000_000
"""How long to search, in steps of a few nanoseconds: work is counted, not time, so that the same lives give the same layout."""
_GREEDILY = 8
"""Before that as many times as long greedily, in steps of a nanosecond; and `_MOST` layouts at most."""
_MOST = 400
_STEP_DOWN = 4
"""Capacities between the best layout and the highest sum of live bytes that are tried where that itself is not reached."""


def lay_out(buffers: Buffers, capacity: int | None = None, *, work: int = WORK) -> Layout:
    """The smallest layout that is found, or the first one within the capacity. It ends early at the highest sum of live
    bytes, which no layout undercuts.

    First greedily; where that leaves a gap, with a search that tries the capacities in between.
    """
    aim = max(buffers.max_live, capacity or 0)
    best: Layout | None = None
    placing = 1000 + len(buffers) ** 2
    for found in islice(greedy.layouts(buffers), min(_MOST, max(12, _GREEDILY * work // placing))):
        best = found if best is None or found.bytes < best.bytes else best
        if best.bytes <= aim:
            return best
    assert best is not None
    low, bound = aim, 0
    for step in range(1 if capacity else _STEP_DOWN):
        at = low if not step else (low + best.bytes) // 2
        found_at = exact.within(buffers, at, work // 2**step)
        if isinstance(found_at, exact.Verdict):
            low, bound = at, at + 1 if found_at is exact.Verdict.NONE else bound
        else:
            top = int((found_at + buffers.sizes).max())
            best = Layout(tuple(found_at.tolist()), top, buffers.max_live)
        if best.bytes <= low + 1:
            break
    return replace(best, bound=bound)
