"""Store tensors in one slab file: one thread writes, another reads, and checksums verify the bytes."""

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
import xxhash
from torch import Tensor

from autotune.errors import SlotError, StoreError
from autotune.runtime.stores import Direction
from autotune.runtime.stores.slab_file import Hasher, Slab, Transfer
from autotune.runtime.stores.slots import Slots, slot_offsets
from autotune.runtime.stores.tensor_meta import TensorMeta
from autotune.runtime.stores.worker import TransferWorker
from autotune.runtime.tensor_bytes import storage_bytes

Checksums = Literal["all", "sampled", "off"]
_SAMPLE_EVERY = 16
"""Generations of a slot per checksum, if checksums are sampled."""
_MAX_TRANSFERS = 100_000
"""Number of transfers kept until `transfers` is called; the oldest are dropped first."""


@dataclass(slots=True, eq=False)
class _Generation:
    """One tensor that was put to a slot, and the result of its write."""

    number: int
    meta: TensorMeta
    is_checked: bool
    write_ticket: int = 0
    digest: bytes = b""
    problem: str = ""
    """Error of the write; empty if there was none."""


@dataclass(slots=True, eq=False)
class _Slot:
    key: int
    offset: int
    nbytes: int
    latest: _Generation | None = None
    generations: int = 0
    read_ticket: int = 0
    """Ticket of the latest read."""


class SlabStore:
    """A `SwapStore` over one anonymous file, for CPU tensors that own their storage.

    Args:
        name: Name of the store, for messages.
        directory: Directory on the file system that holds the file.
        slots: Bytes of each slot, by key.
        checksums: Verify every transfer ("all"), each slot once in 16 generations ("sampled"), or none ("off").
        only_memory: Refuse a directory that is not on a tmpfs.
        fork_safe: True if memory of transfers is excluded from forks, so that old Linux versions may access it directly.
        pwritev: Replacement of `os.pwritev`, for tests with a faulty disk.
        preadv: Replacement of `os.preadv`.

    Raises:
        StoreError: The directory is missing, is not writable, or has too little space.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        slots: Mapping[int, int],
        *,
        checksums: Checksums = "sampled",
        only_memory: bool = False,
        fork_safe: bool = False,
        pwritev: Transfer = os.pwritev,
        preadv: Transfer = os.preadv,
    ) -> None:
        self.name, self.directory, self.checksums = name, directory, checksums
        self.written_bytes = self.read_bytes = 0
        self._transfers: deque[tuple[Direction, float, float]] = deque(maxlen=_MAX_TRANSFERS)
        offsets, end = slot_offsets(slots)
        self._slab = Slab(
            name, directory, end, only_memory=only_memory, fork_safe=fork_safe, pwritev=pwritev, preadv=preadv
        )
        self.direct, self.holds_memory = self._slab.direct, self._slab.holds_memory
        self.pool_bytes, self.slab_bytes = self._slab.pool_bytes, self._slab.nbytes
        self._writer, self._reader = _start_workers(name, self._slab)
        # re-entrant: the handler of a signal may close the store while it closes
        self._lock = threading.RLock()
        self._cleanups: list[Callable[[], None]] = []
        """Called when the workers have ended and the file is closed."""
        self._finish = weakref.finalize(self, _finish, self._slab, (self._writer, self._reader), self._cleanups)
        self._finish.atexit = False  # it would wait for a disk that hangs; the file goes with the process anyway
        self._slots = Slots(
            name, {key: _Slot(key, offsets[key], nbytes) for key, nbytes in slots.items()}, self._finish
        )

    def put(self, key: int, tensor: Tensor) -> "Future[None]":
        """Start to write the tensor's whole storage; see `SwapStore.put`."""
        with self._lock:
            slot = self._slots[key]
            latest, ready = self._next_generation(slot, tensor), self._record_ready(tensor)
            slot.latest, slot.generations = latest, slot.generations + 1
            # a list, so that the job can empty it: its frame must not keep the tensor alive
            job = partial(self._run_write, slot, latest, slot.read_ticket, [tensor], ready)
            future, latest.write_ticket = self._writer.submit(job)
            return future

    def fetch(self, key: int, into: Tensor | None = None) -> "Future[Tensor]":
        """Start to read into a new tensor or `into`; see `SwapStore.fetch`."""
        with self._lock:
            slot = self._slots[key]
            if slot.latest is None:
                raise StoreError(f"{self.name} store: slot {key} was fetched before anything was put there")
            box = [slot.latest.meta.allocate(into, f"{self.name} store: slot {key}")]
            job = partial(self._run_read, slot, slot.latest, box, self._record_ready(box[0]))
            future, slot.read_ticket = self._reader.submit(job)
            return future

    def transfers(self) -> list[tuple[Direction, float, float]]:
        """Return (direction, start, end) of each transfer since the last call."""
        with self._lock:
            return [self._transfers.popleft() for _ in range(len(self._transfers))]

    def held_bytes(self) -> int:
        """Return the file's bytes in memory now: in the tmpfs, or in the page cache."""
        with self._lock:
            return self._slab.held_bytes() if self._finish.alive else 0

    def close(self) -> None:
        """Fail transfers that have not started, wait for those running, and release everything."""
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_generation(self, slot: _Slot, tensor: Tensor) -> _Generation:
        place = f"{self.name} store: slot {slot.key}"
        self._refuse(tensor, place)
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes > slot.nbytes:
            raise SlotError(f"{place} has {slot.nbytes} bytes; a tensor of {nbytes} does not fit")
        is_checked = self.checksums == "all" or (
            self.checksums == "sampled" and (slot.key + slot.generations) % _SAMPLE_EVERY == 0
        )
        return _Generation(slot.generations, TensorMeta.from_tensor(tensor), is_checked)

    def _refuse(self, tensor: Tensor, place: str) -> None:
        """Raise StoreError for a tensor that the store cannot take."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise StoreError(f"{place} takes plain dense CPU tensors, not {tensor.layout} on {tensor.device}")

    def _record_ready(self, tensor: Tensor) -> Any:
        """Return what a transfer of this tensor has to wait for on its device: nothing on a CPU."""
        del tensor

    def _wait_until(self, ready: Any) -> None:
        """Wait until a tensor has its values, or its memory is free to be filled: what `_record_ready` returned has happened."""
        del ready

    def _write_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None) -> None:
        """Write the tensor's storage. Raises OSError, or RuntimeError of the device."""
        self._slab.write(offset, storage_bytes(tensor), hasher)

    def _read_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None) -> None:
        """Fill the tensor's storage. Raises OSError, or RuntimeError of the device."""
        self._slab.read(offset, storage_bytes(tensor), hasher)

    def _log(self, direction: Direction, start: float, end: float) -> None:
        """Record a transfer that has ended."""
        self._transfers.append((direction, start, end))

    def _run_write(self, slot: _Slot, latest: _Generation, read_ticket: int, box: list[Tensor], ready: Any) -> None:
        self._reader.wait(read_ticket)  # of the generation that this one overwrites
        latest.problem = self._write(slot, latest, box, ready)
        if latest.problem:
            raise StoreError(latest.problem)

    def _run_read(self, slot: _Slot, latest: _Generation, box: list[Tensor], ready: Any) -> Tensor:
        self._writer.wait(latest.write_ticket)
        problem = latest.problem or self._read(slot, latest, box, ready)
        if problem:
            box.clear()
            raise StoreError(problem)
        return box.pop()

    # The next two return the problem as text: an exception would keep their frames, and so the tensor, alive.

    def _write(self, slot: _Slot, latest: _Generation, box: list[Tensor], ready: Any) -> str:
        hasher = xxhash.xxh3_128() if latest.is_checked else None
        tensor = box.pop()
        try:
            self._wait_until(ready)
            begin = time.perf_counter()
            self._write_storage(slot.offset, tensor, hasher)
        except (OSError, RuntimeError) as error:
            return self._problem(Direction.WRITE, slot, error)
        if hasher is not None:
            latest.digest = hasher.digest()
        self._log(Direction.WRITE, begin, time.perf_counter())
        self.written_bytes += latest.meta.nbytes
        return ""

    def _read(self, slot: _Slot, latest: _Generation, box: list[Tensor], ready: Any) -> str:
        hasher = xxhash.xxh3_128() if latest.digest else None
        try:
            self._wait_until(ready)
            begin = time.perf_counter()
            self._read_storage(slot.offset, box[0], hasher)
        except (OSError, RuntimeError) as error:
            return self._problem(Direction.READ, slot, error)
        self._log(Direction.READ, begin, time.perf_counter())
        self.read_bytes += latest.meta.nbytes
        if hasher is not None and hasher.digest() != latest.digest:
            return (
                f"{self.name} store in {self.directory}: slot {slot.key}, generation {latest.number}, was read with "
                f"other bytes than were written; this disk is not reliable, use another with --store {self.name}=DIR"
            )
        return ""

    def _problem(self, direction: Direction, slot: _Slot, error: OSError | RuntimeError) -> str:
        if isinstance(error, RuntimeError):
            reason, advice = str(error).partition("\n")[0], "check the GPU with nvidia-smi"
        else:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason, advice = error.strerror or str(error), "free space there" if full else "check the disk"
        return (
            f"{self.name} store in {self.directory}: cannot {direction} slot {slot.key} of {slot.nbytes} bytes "
            f"({reason}); {advice}, or use another directory with --store {self.name}=DIR"
        )


def _start_workers(name: str, slab: Slab) -> tuple[TransferWorker, TransferWorker]:
    """Start the writing and the reading worker. Where one cannot start, release the file, which nothing else would."""
    started: list[TransferWorker] = []
    try:
        for verb in ("write", "read"):
            started.append(TransferWorker(f"{name}-{verb}"))
    except BaseException as error:
        _finish(slab, tuple(started), [])
        if isinstance(error, RuntimeError):
            raise StoreError(
                f"{name} store: no thread can be started for its transfers ({error}); raise ulimit -u, or the container's limit "
                "of processes"
            ) from error
        raise
    writer, reader = started
    return writer, reader


def _finish(slab: Slab, workers: tuple[TransferWorker, ...], cleanups: list[Callable[[], None]]) -> None:
    for worker in workers:
        worker.stop()
    late: BaseException | None = None
    for worker in workers:
        while True:
            try:
                worker.join()
            except BaseException as error:  # noqa: BLE001 - a signal's handler raised it; raised below
                late = error
            else:
                break
    slab.close()
    # removed one by one: they refer to memory of the store
    while cleanups:
        cleanups.pop(0)()
    if late is not None:
        raise late
