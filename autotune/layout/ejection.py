"""Ejection search: a heuristic for layouts within a capacity, suited to the many short lives of a planned step.

Buffers are placed one after the other, the largest area and the fullest moments first. A buffer that fits nowhere goes
where it displaces the least, and the displaced buffers are placed next. A buffer that was displaced in vain weighs more
from then on (guided ejection, as Nagata and Bräysy 2009 route vehicles). The search proves nothing. Where workspaces
fill most of the fullest moments, it finds layouts in tenths of a second that the other searches miss.
"""

import numpy as np

from autotune.layout.buffers import Buffers, Numbers
from autotune.layout.compiled import buffer_arguments, load_compiled

MOVES = 5_000
"""Placements of the first attempt; each later attempt has a quarter more."""
_MOST_PAIRS = 30_000_000
"""Maximum number of pairs of buffers with overlapping lives; a pair takes 8 bytes, and 8 more during the search."""
_SEARCHES = ((0, 0.1), (4, 0.02), (16, 0.1), (4, 0.0))
"""Parallel searches: (exponent of the fullness that moves a buffer ahead, exponent of the area that is its weight)."""


def find_layout(buffers: Buffers, capacity: int, work: int) -> Numbers | None:
    """Return the offsets of a layout of at most `capacity` bytes; None without success, or without a compiler.

    `work` limits each of four searches, in steps of about a nanosecond. It is counted, so results are reproducible.
    """
    compiled = load_compiled()
    if compiled is None or not 0 < buffers.max_live <= capacity:
        return None
    area = buffers.sizes * (buffers.died - buffers.born).astype(np.float64)
    full = buffers.peak_during / buffers.max_live
    keys = np.ascontiguousarray([area * full**earlier for earlier, _ in _SEARCHES])
    powers = np.array([power for _, power in _SEARCHES])
    offsets = np.zeros(len(buffers), np.int64)
    outcome = compiled.layout_eject(
        *buffer_arguments(buffers), capacity, len(powers), keys.ctypes.data, powers.ctypes.data, MOVES, work, _MOST_PAIRS,
        offsets.ctypes.data,
    )  # fmt: skip
    return offsets if outcome == 1 else None
