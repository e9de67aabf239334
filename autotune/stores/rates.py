"""What a store does on this device, measured through the store itself: the numbers that planners work with."""

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.costs import StoreCost
from autotune.errors import StoreError
from autotune.simulate import PAGE_BYTES
from autotune.stores import SwapStore, open_store
from autotune.stores.slab import free_bytes
from autotune.units import fmt_bytes

if TYPE_CHECKING:
    from torch import Tensor

_PIECES = 32
_PASS_SECONDS = 0.5
"""No pass takes longer than this and one piece, however slow the disk."""


def probe(name: str, directory: str | Path, nbytes: int = 256 * 2**20, repeats: int = 3) -> StoreCost:
    """Write and read, alone and at once; medians of a few passes over at most `nbytes` and half of what is free.

    Takes below one second on a fast disk and at most 8 s on a slow one. Bursts: a drive that slows down once its own
    cache is full is seen faster than it stays.
    """
    import torch

    room = free_bytes(Path(directory))
    piece = min(nbytes, nbytes if room is None else room // 2) // _PIECES // PAGE_BYTES * PAGE_BYTES
    with open_store(name, directory, dict.fromkeys(range(_PIECES), piece)) as store:
        if piece == 0:
            raise StoreError(f"{name} store: {fmt_bytes(room or 0)} free in {directory} are too few to measure it")
        tensor = torch.zeros(piece, dtype=torch.uint8)
        front, back = range(_PIECES // 2), range(_PIECES // 2, _PIECES)
        for key in range(_PIECES):  # the first write to fresh extents is slower; and what is read must have been put
            store.put(key, tensor).result()
        alone_write, alone_read, beside_write, beside_read = [], [], [], []
        with ThreadPoolExecutor(2) as drivers:
            for _ in range(repeats):
                alone_write.append(_rate(piece, _transfer(_put(store, tensor), range(_PIECES))))
                alone_read.append(_rate(piece, _transfer(store.fetch, range(_PIECES))))
                begun = time.perf_counter()
                writing = drivers.submit(_transfer, _put(store, tensor), front, begun)
                reading = drivers.submit(_transfer, store.fetch, back, begun)
                written, read = writing.result(), reading.result()
                together = min(written[-1], read[-1])
                beside_write.append(_rate(piece, [at for at in written if at <= together]))
                beside_read.append(_rate(piece, [at for at in read if at <= together]))
        return StoreCost(
            write_bytes_per_second=statistics.median(alone_write),
            read_bytes_per_second=statistics.median(alone_read),
            write_beside_read_bytes_per_second=statistics.median(beside_write),
            read_beside_write_bytes_per_second=statistics.median(beside_read),
            pool_bytes=store.pool_bytes,
            holds_memory=store.holds_memory,
        )


def contention(name: str, directory: str | Path, seconds: float = 0.12, repeats: int = 4) -> float:
    """Seconds of a matrix product beside transfers, writes and reads in turn, over its seconds alone; at least 1."""
    import torch

    piece = 8 * 2**20
    left = torch.randn(512, 512)
    tensor = torch.zeros(piece, dtype=torch.uint8)

    def product_seconds() -> float:
        begin, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            torch.mm(left, left)
            count += 1
        return spent / count

    with open_store(name, directory, {0: piece, 1: piece}) as store, ThreadPoolExecutor(1) as driver:
        for key in (0, 1):
            store.put(key, tensor).result()
        product_seconds()
        ratios = []
        for begin in (_put(store, tensor), store.fetch) * (repeats // 2):
            alone = product_seconds()
            enough = threading.Event()
            busy = driver.submit(_transfer_until, begin, enough)
            beside = product_seconds()
            enough.set()
            busy.result()
            ratios.append(beside / ((alone + product_seconds()) / 2))
    return max(1.0, statistics.median(ratios))


def _put(store: SwapStore, tensor: "Tensor") -> Callable[[int], "Future[Any]"]:
    return partial(store.put, tensor=tensor)


def _transfer(begin: Callable[[int], "Future[Any]"], keys: Iterable[int], begun: float | None = None) -> list[float]:
    """Two transfers in flight until the keys, or the time, run out; when each was done, counted from the beginning."""
    begun = time.perf_counter() if begun is None else begun
    done: list[float] = []
    flying: list[Future[Any]] = []
    for key in keys:
        flying.append(begin(key))
        if len(flying) == 2:
            flying.pop(0).result()
            done.append(time.perf_counter() - begun)
            if done[-1] > _PASS_SECONDS:
                break
    for last in flying:
        last.result()
        done.append(time.perf_counter() - begun)
    return done


def _transfer_until(begin: Callable[[int], "Future[Any]"], enough: threading.Event) -> None:
    for key in cycle((0, 1)):
        begin(key).result()
        if enough.is_set():
            return


def _rate(piece: int, done: list[float]) -> float:
    return piece * len(done) / done[-1]
