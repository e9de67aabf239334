"""Measure a store on this device: speed, latency, and contention with computing, which planners need."""

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
from autotune.ir.costs import PAGE_BYTES, StoreCost
from autotune.runtime.malloc import RETURNED_BYTES
from autotune.runtime.stores import WITHOUT_DIRECTORY, SwapStore, open_store
from autotune.runtime.stores.slab_file import free_bytes
from autotune.units import fmt_bytes

if TYPE_CHECKING:
    from torch import Tensor

_PIECES = 32
_SMALL = range(_PIECES, _PIECES + 8)
"""Slots of one byte, which measure the latency of a transfer."""
_PRODUCT_SIDE = {"cpu": 512, "cuda": 2048}
"""Rows of the square matrices whose product runs beside transfers; on a GPU it must be longer than its launch."""
_PASS_SECONDS = 0.5
"""Maximum seconds of a pass, after which two pieces may still be in flight."""
_ENOUGH_SECONDS = 4.0
"""Seconds after which no further repeat starts."""


def measure_speed(
    name: str,
    directory: str | Path,
    device: str = "cpu",
    *,
    nbytes: int = 256 * 2**20,
    repeats: int = 3,
    cuda: Any = None,
) -> StoreCost:
    """Measure bandwidth of writes and reads, alone and at once, and latency, as medians of `repeats` passes.

    At most `nbytes` and half of the free space are used. It takes one or two seconds on a fast disk and at most 8 s at
    50 MB/s. The passes are short: a drive that slows down when its cache is full appears faster than it is in the long run.
    Raises StoreError if the store cannot be opened or too little space is free.
    """
    import torch

    cuda = cuda or (torch.cuda if device == "cuda" else None)
    room = _room(name, Path(directory))
    usable = min(nbytes, nbytes if room is None else room // 2) - len(_SMALL) * PAGE_BYTES
    piece = max(0, usable // _PIECES // PAGE_BYTES * PAGE_BYTES)
    slots = dict.fromkeys(range(_PIECES), piece) | dict.fromkeys(_SMALL, 1)
    with open_store(name, directory, slots, device) as store:
        if piece == 0:
            raise StoreError(
                f"{name} store: {fmt_bytes(room or 0)} free in {_place(name, directory)} are too few to measure it; "
                "free space there"
            )
        tensor, into = _memory(piece, device), _memory(piece, device)
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        start = time.perf_counter()
        keys = _fill_slots(store, tensor)
        front, back = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        write, read = partial(_transfer, _put(store, tensor)), partial(_transfer, _fetch(store, into))
        latency, alone_write, alone_read, beside_write, beside_read = [], [], [], [], []
        for _ in range(repeats):
            latency.append(1 / _transfer(_put(store, byte), islice(cycle(_SMALL), 64)))
            alone_write.append(piece * write(keys))
            alone_read.append(piece * read(keys))
            with _running(read, back, cuda):
                beside_write.append(piece * write(front))
            with _running(write, front, cuda):
                beside_read.append(piece * read(back))
            if time.perf_counter() - start > _ENOUGH_SECONDS:
                break
        return StoreCost(
            write_bytes_per_second=statistics.median(alone_write),
            read_bytes_per_second=statistics.median(alone_read),
            write_beside_read_bytes_per_second=statistics.median(beside_write),
            read_beside_write_bytes_per_second=statistics.median(beside_read),
            latency_seconds=statistics.median(latency),
            pool_bytes=store.pool_bytes,
            holds_memory=store.holds_memory,
            least_own_bytes=RETURNED_BYTES if device == "cpu" else 0,
        )


def _fill_slots(store: SwapStore, tensor: "Tensor") -> list[int]:
    """Write as many slots as the time allows, at least four; return their keys.

    The first write to new extents is slower than later ones, and slots must be written before they are read.
    """
    start, keys = time.perf_counter(), list[int]()
    while len(keys) < _PIECES and (len(keys) < 4 or time.perf_counter() - start < 2 * _PASS_SECONDS):
        _wait(store.put(len(keys), tensor))
        keys.append(len(keys))
    return keys


def measure_contention(
    name: str, directory: str | Path, device: str = "cpu", *, seconds: float = 0.12, repeats: int = 4, cuda: Any = None
) -> tuple[float, float]:
    """Return the slowdown of a matrix product by concurrent transfers, and of the transfers by the product.

    Both are ratios to the time alone, at least 1, as medians over writes and reads in turn.
    """
    import torch

    piece = 8 * 2**20
    cuda = cuda or (torch.cuda if device == "cuda" else None)
    side = _PRODUCT_SIDE[device]
    left = torch.full((side, side), 0.5, device=device)  # random numbers would be taken from the training's
    tensor, into = _memory(piece, device), _memory(piece, device)

    def product_seconds() -> float:
        begin, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            torch.mm(left, left)
            if cuda is not None:  # a wait for the whole device would include the transfers
                cuda.current_stream().synchronize()
            count += 1
        return spent / count

    with open_store(name, directory, {0: piece, 1: piece}, device) as store:
        for key in (0, 1):
            _wait(store.put(key, tensor))
        product_seconds()
        contended, slowed = [], []
        for transfer in (_put(store, tensor), _fetch(store, into)) * (repeats // 2):
            before = product_seconds()
            with _running(partial(_transfer, transfer), (0, 1), cuda) as transfers:
                during = product_seconds()
            with _running(partial(_transfer, transfer), (0, 1), cuda) as transfers_alone:
                time.sleep(seconds)
            contended.append(during / ((before + product_seconds()) / 2))
            slowed.append(transfers_alone.result() / transfers.result())
    return max(1.0, statistics.median(contended)), max(1.0, statistics.median(slowed))


def _room(name: str, directory: Path) -> int | None:
    """Return the free bytes where a store puts its slots: in the host's memory, or in its directory."""
    if name in WITHOUT_DIRECTORY:
        import psutil

        return int(psutil.virtual_memory().available)
    return free_bytes(directory)


def _place(name: str, directory: str | Path) -> str | Path:
    return "the host's memory" if name in WITHOUT_DIRECTORY else directory


def _put(store: SwapStore, tensor: "Tensor") -> Callable[[int], "Future[Any]"]:
    return partial(store.put, tensor=tensor)


def _fetch(store: SwapStore, into: "Tensor") -> Callable[[int], "Future[Any]"]:
    return partial(store.fetch, into=into)


def _memory(nbytes: int, device: str) -> "Tensor":
    """Allocate a byte tensor on a page boundary, as in an arena, so that a disk can access it directly."""
    import torch

    if device != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    ).zero_()


def _transfer(
    transfer: Callable[[int], "Future[Any]"], keys: Iterable[int], is_enough: Callable[[], bool] | None = None
) -> float:
    """Return transfers per second, two in flight, until the keys or the time run out or `is_enough` returns True."""
    start, done = time.perf_counter(), 0
    in_flight: list[Future[Any]] = []
    for key in keys:
        in_flight.append(transfer(key))
        if len(in_flight) == 2:
            _wait(in_flight.pop(0))
            done += 1
            if is_enough() if is_enough is not None else time.perf_counter() - start > _PASS_SECONDS:
                break
    while in_flight:
        _wait(in_flight.pop(0))
        done += 1
    return done / (time.perf_counter() - start)


def _wait(transfer: "Future[Any]") -> None:
    """Wait until a transfer has ended: on a GPU the result alone only queues a wait on the stream."""
    transfer.result()
    while not transfer.done():
        time.sleep(1e-5)


@contextlib.contextmanager
def _running(
    transfer: Callable[[Iterable[int], Callable[[], bool]], float], keys: Sequence[int], cuda: Any
) -> Iterator["Future[float]"]:
    """Repeat transfers of these keys while the context is open; the future's result is their number per second.

    On a GPU the driver has a stream of its own: a copy waits for the stream that asks for it, and that stream for the copy.
    """
    enough = threading.Event()
    beside = cuda.stream(cuda.Stream()) if cuda is not None else contextlib.nullcontext()

    def drive() -> float:
        with beside:
            return transfer(cycle(keys), enough.is_set)

    with ThreadPoolExecutor(1) as driver:
        busy = driver.submit(drive)
        try:
            yield busy
        finally:
            enough.set()
            busy.result()
