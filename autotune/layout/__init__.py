"""Lay buffers of known size and life side by side in as few bytes as possible.

In: `Buffers`: sizes and lives, whatever the buffers are for.
Out: a `Layout`: an offset for each buffer.
Read first: `buffers`.
"""

import math
from dataclasses import replace
from itertools import islice

import numpy as np

from autotune.layout import ejection, exact, greedy
from autotune.layout.buffers import Buffers, Layout, Numbers
from autotune.layout.validate import check_layout

__all__ = ["Buffers", "Layout", "check_layout", "lay_out"]

_SMALL, _NEAR = 400, 400
"""Count of buffers above which a layout within 1 / `_NEAR` of the lower bound is accepted, if there is no capacity."""
WORK = 60_000_000
"""Default search effort, in steps of a few nanoseconds. Counted work, not time, makes results reproducible."""
_GREEDY_SHARE = 8
"""Effort of the greedy layouts relative to the exact search, in steps of a nanosecond."""
_MAX_GREEDY = 400
"""Maximum number of greedy layouts."""
_EJECTION_SHARE = 3
"""Effort of the ejection search at each capacity, relative to the exact search."""
_STEP_DOWN = 4
"""Number of capacities that are tried between the lower bound and the best layout."""


def lay_out(buffers: Buffers, capacity: int | None = None, *, work: int = WORK) -> Layout:
    """Return the smallest layout that the search finds, or the first one within `capacity` bytes.

    Greedy layouts come first. Where they leave a gap to the highest sum of live bytes, which no layout undercuts,
    searches try the capacities in between. `work` limits the effort; equal arguments give equal layouts.

    >>> buffers = Buffers.from_lives([64, 64, 128], [0, 1, 2], [2, 3, 4])
    >>> lay_out(buffers).bytes, buffers.max_live
    (192, 192)
    """
    filled = buffers.sizes > 0
    if not filled.all():  # empty buffers overlap with nothing, and would slow the searches down
        rest = lay_out(buffers.select(filled), capacity, work=work)
        offsets = np.zeros(len(buffers), np.int64)
        offsets[filled] = rest.offsets
        return replace(rest, offsets=tuple(offsets.tolist()))
    aim = max(buffers.max_live, capacity or 0)
    best = _best_greedy(buffers, aim, work)
    near = max(1, aim // _NEAR) if len(buffers) > _SMALL and capacity is None else 1
    low, bound = aim, 0
    for step in range(1 if capacity else _STEP_DOWN):
        if best.bytes <= low + (near if step else near - 1):
            break
        tried = low if not step else min(_between(aim, low, best.bytes), best.bytes - 1)
        offsets_or_end = _search(buffers, tried, work, step)
        if isinstance(offsets_or_end, exact.SearchEnd):
            low, bound = tried, tried + 1 if offsets_or_end is exact.SearchEnd.INFEASIBLE else bound
        else:
            top = int((offsets_or_end + buffers.sizes).max())
            best = Layout(tuple(offsets_or_end.tolist()), top, buffers.max_live)
    return replace(best, bound=bound)


def _best_greedy(buffers: Buffers, aim: int, work: int) -> Layout:
    """Return the best of the greedy layouts; the first that reaches the aim."""
    best: Layout | None = None
    placing = 1000 + len(buffers) ** 2
    count = min(_MAX_GREEDY, max(12, _GREEDY_SHARE * work // placing))
    for layout in islice(greedy.generate_layouts(buffers), count):
        best = layout if best is None or layout.bytes < best.bytes else best
        if best.bytes <= aim:
            break
    assert best is not None
    return best


def _search(buffers: Buffers, capacity: int, work: int, step: int) -> Numbers | exact.SearchEnd:
    ejected = ejection.find_layout(buffers, capacity, _EJECTION_SHARE * min(WORK, work))
    return exact.find_layout(buffers, capacity, work // 2**step) if ejected is None else ejected


def _between(aim: int, low: int, high: int) -> int:
    """Return the capacity at the geometric mean of two distances from the aim: few steps reach a small gap."""
    return aim + int(math.sqrt(max(low - aim, aim / 2048, 1) * (high - aim)))
