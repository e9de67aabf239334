"""Lay buffers of known size and life side by side in as few bytes as possible: largest first, each in its best gap."""

from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64
"""Bytes; what torch gives its CPU tensors."""


def pack(sizes: Sequence[int], born: Sequence[int], died: Sequence[int]) -> tuple[list[int], int]:
    """Offsets, and the bytes that hold them all. Lives are half-open: one that dies at 5 may share with one born at 5.

    Two orders are tried, by size and by the area of size and life; where neither reaches the highest sum of live bytes,
    the better one stands.
    """
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    lives = [end - begin for begin, end in zip(born, died, strict=True)]
    orders = (
        sorted(range(len(sizes)), key=lambda i: (-aligned[i], -lives[i], born[i])),
        sorted(range(len(sizes)), key=lambda i: (-aligned[i] * lives[i], born[i])),
    )
    limit = max_live(aligned, born, died)
    best: tuple[list[int], int] | None = None
    for order in orders:
        found = _place(order, aligned, born, died)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] == limit:
            break
    assert best is not None
    return best


def max_live(sizes: Sequence[int], born: Sequence[int], died: Sequence[int]) -> int:
    """The highest sum of bytes alive at once: no layout is smaller."""
    changes = sorted(
        [(at, size) for at, size in zip(born, sizes, strict=True)]
        + [(at, -size) for at, size in zip(died, sizes, strict=True)]
    )
    live = highest = 0
    for _, change in changes:
        live += change
        highest = max(highest, live)
    return highest


def _place(order: list[int], sizes: list[int], born: Sequence[int], died: Sequence[int]) -> tuple[list[int], int]:
    offsets = [0] * len(order)
    placed = np.zeros((4, len(order)), dtype=np.int64)  # rows: offset, end, born, died; sorted by offset
    top = 0
    for count, item in enumerate(order):
        now = placed[:, :count]
        beside = now[:2, (now[2] < died[item]) & (now[3] > born[item])]
        offset = _best_gap(beside, sizes[item])
        offsets[item] = offset
        at = int(np.searchsorted(now[0], offset))
        placed[:, at + 1 : count + 1] = placed[:, at:count].copy()
        placed[:, at] = (offset, offset + sizes[item], born[item], died[item])
        top = max(top, offset + sizes[item])
    return offsets, top


def _best_gap(beside: np.ndarray, size: int) -> int:
    """The smallest gap that holds the size between intervals sorted by offset, else the end of all of them."""
    if not beside.shape[1]:
        return 0
    ends = np.maximum.accumulate(beside[1])
    starts = np.concatenate(([0], ends[:-1]))
    gaps = beside[0] - starts
    fits = np.flatnonzero(gaps >= size)
    if not fits.size:
        return int(ends[-1])
    return int(starts[fits[np.argmin(gaps[fits])]])
