"""Which ops lie before and after which, some ops at a time: a set of them is a whole number, a bit for each."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 4096
"""Ops looked at together: a set for every op of a graph takes 25 MB at 50,000 ops."""


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """(first, end) of each part of the ops that is looked at together."""
    for first in range(0, count, BLOCK):
        yield first, min(first + BLOCK, count)


def reach(steps: Sequence[Collection[int]], ops: Iterable[int], first: int, end: int) -> list[int]:
    """Per op the set of it and all that `steps` lead to, of those from `first` on before `end`; `ops`: those led to first."""
    reached = [0] * len(steps)
    for op in ops:
        found = bit(op, first, end)
        for other in steps[op]:
            found |= reached[other]
        reached[op] = found
    return reached


def bit(op: int, first: int, end: int) -> int:
    """The set of one op; empty where it is not among those looked at."""
    return 1 << (op - first) if first <= op < end else 0


def sums(sets: Sequence[int], nbytes: Sequence[int], width: int) -> npt.NDArray[np.int64]:
    """Per op of a part `width` wide the bytes of all sets that it is in."""
    rows = np.frombuffer(b"".join(one.to_bytes((width + 7) // 8, "little") for one in sets), dtype=np.uint8)
    rows = rows.reshape(len(sets), (width + 7) // 8)
    # sums of bytes stay exact in a double below 2^53, and a double's product is many times faster than an integer's
    sizes = np.array(nbytes, dtype=np.float64)
    total = np.zeros(width)
    for row in range(0, len(rows), 512):
        bits = np.unpackbits(rows[row : row + 512], axis=1, bitorder="little")[:, :width]
        total += sizes[row : row + 512] @ bits
    return total.astype(np.int64)


def turned(steps: Sequence[Collection[int]]) -> list[list[int]]:
    """Per op those that step to it, in their order."""
    back: list[list[int]] = [[] for _ in steps]
    for op, others in enumerate(steps):
        for other in others:
            back[other].append(op)
    return back


def closure(steps: Sequence[Collection[int]], op: int) -> set[int]:
    """All that the steps of one op lead to, without itself."""
    found: set[int] = set()
    ahead = [op]
    while ahead:
        fresh = [other for other in steps[ahead.pop()] if other not in found]
        found.update(fresh)
        ahead += fresh
    return found
