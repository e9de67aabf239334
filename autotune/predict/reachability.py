"""Ancestors and descendants of ops, computed for a block of ops at a time.

A set of ops is an integer with one bit for each op of the block.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 4096
"""Number of ops per block: a set for every op of a graph takes 25 MB at 50,000 ops."""


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each block of `count` ops; `end` is exclusive."""
    for first in range(0, count, BLOCK):
        yield first, min(first + BLOCK, count)


def reachable_sets(steps: Sequence[Collection[int]], ops: Iterable[int], first: int, end: int) -> list[int]:
    """Return per op the set of itself and all ops that `steps` lead to, as far as they lie in the block.

    Args:
        steps: Per op the ops that it leads to directly.
        ops: All ops, in an order in which an op follows everything that it leads to.
        first: First op of the block.
        end: End of the block, exclusive.
    """
    reachable = [0] * len(steps)
    for op in ops:
        members = bit_of(op, first, end)
        for other in steps[op]:
            members |= reachable[other]
        reachable[op] = members
    return reachable


def bit_of(op: int, first: int, end: int) -> int:
    """Return the set of one op; empty if the op lies outside the block."""
    return 1 << (op - first) if first <= op < end else 0


def sum_sets(sets: Sequence[int], nbytes: Sequence[int], width: int) -> npt.NDArray[np.int64]:
    """Return, for each op of a block of `width` ops, the sum of `nbytes` over the sets that contain the op."""
    rows = np.frombuffer(b"".join(ops.to_bytes((width + 7) // 8, "little") for ops in sets), dtype=np.uint8)
    rows = rows.reshape(len(sets), (width + 7) // 8)
    # sums of bytes stay exact in a double below 2^53, and a double's product is many times faster than an integer's
    sizes = np.array(nbytes, dtype=np.float64)
    total = np.zeros(width)
    for row in range(0, len(rows), 512):
        bits = np.unpackbits(rows[row : row + 512], axis=1, bitorder="little")[:, :width]
        total += sizes[row : row + 512] @ bits
    return total.astype(np.int64)


def reverse_edges(steps: Sequence[Collection[int]]) -> list[list[int]]:
    """Return per op the ops that lead to it, in rising order."""
    back: list[list[int]] = [[] for _ in steps]
    for op, others in enumerate(steps):
        for other in others:
            back[other].append(op)
    return back


def descendants(steps: Sequence[Collection[int]], op: int) -> set[int]:
    """Return all ops that the steps of one op lead to, without the op itself."""
    reached: set[int] = set()
    ahead = [op]
    while ahead:
        fresh = [other for other in steps[ahead.pop()] if other not in reached]
        reached.update(fresh)
        ahead += fresh
    return reached
