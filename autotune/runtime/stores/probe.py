"""What a store does on this device, measured through the store itself: the numbers that planners work with."""

import contextlib
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import StoreError
from autotune.ir.costs import StoreCost
from autotune.runtime.malloc import RETURNED_BYTES
from autotune.runtime.stores import FOR, SwapStore, open_store
from autotune.runtime.stores.slab_file import free_bytes
from autotune.units import PAGE_BYTES, fmt_bytes

if TYPE_CHECKING:
    from torch import Tensor

_PIECES = 32
_SMALL = range(_PIECES, _PIECES + 8)
"""Slots of a byte, for what a transfer takes beyond its bytes."""
_PASS_SECONDS = 0.5
"""No pass takes longer than this and two pieces, however slow the disk."""
_ENOUGH_SECONDS = 4.0
"""No further repeat is begun after this."""


def probe(name: str, directory: str | Path, nbytes: int = 256 * 2**20, repeats: int = 3) -> StoreCost:
    """Write and read, alone and at once; medians of a few passes over at most `nbytes` and half of what is free.

    Takes a second or two on a fast disk and at most 8 s on one of 50 MB/s. Bursts: a drive that slows down once its own
    cache is full is seen faster than it stays.
    """
    import torch

    room = free_bytes(Path(directory))
    taken = min(nbytes, nbytes if room is None else room // 2) - len(_SMALL) * PAGE_BYTES
    piece = max(0, taken // _PIECES // PAGE_BYTES * PAGE_BYTES)
    slots = dict.fromkeys(range(_PIECES), piece) | dict.fromkeys(_SMALL, 1)
    with open_store(name, directory, slots) as store:
        if piece == 0:
            raise StoreError(f"{name} store: {fmt_bytes(room or 0)} free in {directory} are too few to measure it")
        tensor, into = _memory(piece, FOR[name]), _memory(piece, FOR[name])
        few = torch.zeros(1, dtype=torch.uint8, device=FOR[name])
        begun = time.perf_counter()
        keys: list[int] = []
        # the first write to fresh extents is slower; and what is read must have been put
        while len(keys) < _PIECES and (len(keys) < 4 or time.perf_counter() - begun < 2 * _PASS_SECONDS):
            _end(store.put(len(keys), tensor))
            keys.append(len(keys))
        front, back = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        write, read = partial(_transfer, _put(store, tensor)), partial(_transfer, _fetch(store, into))
        latency, alone_write, alone_read, beside_write, beside_read = [], [], [], [], []
        for _ in range(repeats):
            latency.append(1 / _transfer(_put(store, few), islice(cycle(_SMALL), 64)))
            alone_write.append(piece * write(keys))
            alone_read.append(piece * read(keys))
            with _beside(read, back):
                beside_write.append(piece * write(front))
            with _beside(write, front):
                beside_read.append(piece * read(back))
            if time.perf_counter() - begun > _ENOUGH_SECONDS:
                break
        return StoreCost(
            write_bytes_per_second=statistics.median(alone_write),
            read_bytes_per_second=statistics.median(alone_read),
            write_beside_read_bytes_per_second=statistics.median(beside_write),
            read_beside_write_bytes_per_second=statistics.median(beside_read),
            latency_seconds=statistics.median(latency),
            pool_bytes=store.pool_bytes,
            holds_memory=store.holds_memory,
            least_own_bytes=RETURNED_BYTES if FOR[name] == "cpu" else 0,
        )


def contention(name: str, directory: str | Path, seconds: float = 0.12, repeats: int = 4) -> tuple[float, float]:
    """What a matrix product and transfers, writes and reads in turn, take beside each other over what they take alone.

    Of the product and of the transfers; each at least 1.
    """
    import torch

    piece = 8 * 2**20
    left = torch.randn(512, 512, device=FOR[name])
    tensor, into = _memory(piece, FOR[name]), _memory(piece, FOR[name])

    def product_seconds() -> float:
        begin, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            torch.mm(left, left)
            _settle(left)
            count += 1
        return spent / count

    with open_store(name, directory, {0: piece, 1: piece}) as store:
        for key in (0, 1):
            _end(store.put(key, tensor))
        product_seconds()
        contended, slowed = [], []
        for begin in (_put(store, tensor), _fetch(store, into)) * (repeats // 2):
            alone = product_seconds()
            with _beside(partial(_transfer, begin), (0, 1)) as transfers:
                beside = product_seconds()
            with _beside(partial(_transfer, begin), (0, 1)) as transfers_alone:
                time.sleep(seconds)
            contended.append(beside / ((alone + product_seconds()) / 2))
            slowed.append(transfers_alone.result() / transfers.result())
    return max(1.0, statistics.median(contended)), max(1.0, statistics.median(slowed))


def _settle(tensor: "Tensor") -> None:
    """Until a GPU has done what it was given: its clock, not the host's, is looked at."""
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _put(store: SwapStore, tensor: "Tensor") -> Callable[[int], "Future[Any]"]:
    return partial(store.put, tensor=tensor)


def _fetch(store: SwapStore, into: "Tensor") -> Callable[[int], "Future[Any]"]:
    return partial(store.fetch, into=into)


def _memory(nbytes: int, device: str) -> "Tensor":
    """As an arena's tensors lie, so that a disk can read and write it itself."""
    import torch

    if device != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    ).zero_()


def _transfer(
    begin: Callable[[int], "Future[Any]"], keys: Iterable[int], enough: Callable[[], bool] | None = None
) -> float:
    """Transfers per second, two of them in flight until the keys run out, the time does, or it is enough."""
    begun, done = time.perf_counter(), 0
    flying: list[Future[Any]] = []
    for key in keys:
        flying.append(begin(key))
        if len(flying) == 2:
            _end(flying.pop(0))
            done += 1
            if enough() if enough is not None else time.perf_counter() - begun > _PASS_SECONDS:
                break
    while flying:
        _end(flying.pop(0))
        done += 1
    return done / (time.perf_counter() - begun)


def _end(transfer: "Future[Any]") -> None:
    """Until it really is over: a GPU's stream only promises to wait."""
    transfer.result()
    while not transfer.done():
        time.sleep(1e-5)


@contextlib.contextmanager
def _beside(
    transfer: Callable[[Iterable[int], Callable[[], bool]], float], keys: Sequence[int]
) -> Iterator["Future[float]"]:
    """Transfers of these keys, over and over, as long as the context is open; then their number per second."""
    enough = threading.Event()
    with ThreadPoolExecutor(1) as driver:
        busy = driver.submit(transfer, cycle(keys), enough.is_set)
        try:
            yield busy
        finally:
            enough.set()
            busy.result()
