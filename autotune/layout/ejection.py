"""A layout within a capacity by taking out what is in the way: made for the many short lives of a planned step.

Buffers are placed one after the other, the largest area and the fullest moments first; one that fits nowhere goes where it displaces the least, and
what it displaced is next. What was displaced in vain weighs more from then on ("guided ejection", as Nagata and Bräysy
2009 route vehicles). It proves nothing; where a plan's workspaces fill most of the fullest moments it reaches in tenths
of a second what neither orders nor the search among canonical layouts do.
"""

import numpy as np

from autotune.layout.buffers import Buffers, Numbers
from autotune.layout.compiled import arguments, library

MOVES = 5_000
"""Of a search's first try; each later one has a quarter more."""
_MOST_PAIRS = 30_000_000
"""Of buffers that live beside each other; they take 8 bytes each, and 8 more while they are looked for."""
_SEARCHES = ((0, 0.1), (4, 0.02), (16, 0.1), (4, 0.0))
"""Side by side: how much earlier comes what lives in a full moment, and the power of its area by which a buffer weighs."""


def within(buffers: Buffers, capacity: int, work: int) -> Numbers | None:
    """Offsets of a layout of at most `capacity` bytes; None where none is found, or there is no compiler.

    `work`: in steps of about a nanosecond, for each of four searches; counted, so that the same lives give the same layout.
    """
    loaded = library()
    if loaded is None or not 0 < buffers.max_live <= capacity:
        return None
    area = buffers.sizes * (buffers.died - buffers.born).astype(np.float64)
    full = buffers.crowd / buffers.max_live
    keys = np.ascontiguousarray([area * full**earlier for earlier, _ in _SEARCHES])
    powers = np.array([power for _, power in _SEARCHES])
    offsets = np.zeros(len(buffers), np.int64)
    found = loaded.layout_eject(
        *arguments(buffers), capacity, len(powers), keys.ctypes.data, powers.ctypes.data, MOVES, work, _MOST_PAIRS,
        offsets.ctypes.data,
    )  # fmt: skip
    return offsets if found == 1 else None
