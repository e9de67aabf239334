"""Tensors in one slab file: written by one thread, read back by another, checked on the way."""

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

import torch
import xxhash
from torch import Tensor

from autotune.errors import StoreError
from autotune.runtime.stores.slab_file import Slab, Transfer
from autotune.runtime.stores.slots import Slots, end_to_end
from autotune.runtime.stores.tensor_form import Form
from autotune.runtime.stores.worker import Lane
from autotune.runtime.tensor_bytes import storage_bytes

Checksums = Literal["all", "sampled", "off"]
_SAMPLE = 16
_REMEMBERED = 100_000
"""Transfers that nobody asked for; older ones are forgotten."""


@dataclass(slots=True, eq=False)
class _Saved:
    """One generation of a slot: what the tensor was, and how its write went."""

    generation: int
    form: Form
    checked: bool
    written: int = 0
    """Ticket of the write."""
    digest: bytes = b""
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Slot:
    key: int
    offset: int
    nbytes: int
    saved: _Saved | None = None
    generation: int = 0
    last_read: int = 0
    """Ticket of the latest read."""


class SlabStore:
    """A SwapStore over one anonymous file, for CPU tensors that own their storage.

    `checksums`: every transfer, one in 16 (each slot in turn), or none.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        slots: Mapping[int, int],
        *,
        checksums: Checksums = "sampled",
        only_memory: bool = False,
        pwritev: Transfer = os.pwritev,
        preadv: Transfer = os.preadv,
    ) -> None:
        self.name, self.directory, self.checksums = name, directory, checksums
        self.written_bytes = self.read_bytes = 0
        self._moved: deque[tuple[str, float, float]] = deque(maxlen=_REMEMBERED)
        offsets, end = end_to_end(slots)
        self._slab = Slab(name, directory, end, only_memory=only_memory, pwritev=pwritev, preadv=preadv)
        self.direct, self.holds_memory = self._slab.direct, self._slab.holds_memory
        self.pool_bytes, self.slab_bytes = self._slab.pool_bytes, self._slab.nbytes
        self._writer, self._reader = Lane(f"{name}-write"), Lane(f"{name}-read")
        self._lock = threading.Lock()
        self._finish = weakref.finalize(self, _finish, self._slab, (self._writer, self._reader))
        self._slots = Slots(
            name, {key: _Slot(key, offsets[key], nbytes) for key, nbytes in slots.items()}, self._finish
        )

    def put(self, key: int, tensor: Tensor) -> "Future[None]":
        """Begin to write the tensor's whole storage."""
        with self._lock:
            slot = self._slots[key]
            saved = self._describe(slot, tensor)
            slot.saved, slot.generation = saved, slot.generation + 1
            # a list, so that the job can empty it: its frame must not keep the tensor
            future, saved.written = self._writer.submit(partial(self._save, slot, saved, slot.last_read, [tensor]))
            return future

    def fetch(self, key: int, into: Tensor | None = None) -> "Future[Tensor]":
        """Allocate in this thread, or take a tensor of as many bytes, and begin to read."""
        with self._lock:
            slot = self._slots[key]
            if slot.saved is None:
                raise StoreError(f"{self.name} store: slot {key} was fetched before anything was put there")
            box = [slot.saved.form.memory(into, f"{self.name} store: slot {key}")]
            future, slot.last_read = self._reader.submit(partial(self._load, slot, slot.saved, box))
            return future

    def transfers(self) -> list[tuple[str, float, float]]:
        """Every transfer since this was asked last."""
        with self._lock:
            return [self._moved.popleft() for _ in range(len(self._moved))]

    def held_bytes(self) -> int:
        """Bytes of the file in memory right now: in the tmpfs, or in the page cache."""
        with self._lock:
            return self._slab.held_bytes() if self._finish.alive else 0

    def close(self) -> None:
        """Fail what is not begun, end what is under way, give everything back."""
        with self._lock:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, slot: _Slot, tensor: Tensor) -> _Saved:
        where = f"{self.name} store: slot {slot.key}"
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise StoreError(f"{where} takes plain dense CPU tensors, not {tensor.layout} on {tensor.device}")
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes > slot.nbytes:
            raise StoreError(f"{where} has {slot.nbytes} bytes; a tensor of {nbytes} does not fit")
        checked = self.checksums == "all" or (
            self.checksums == "sampled" and (slot.key + slot.generation) % _SAMPLE == 0
        )
        return _Saved(slot.generation, Form.of(tensor), checked)

    def _save(self, slot: _Slot, saved: _Saved, last_read: int, box: list[Tensor]) -> None:
        self._reader.wait(last_read)  # of the generation that this one overwrites
        saved.problem = self._write(slot, saved, box)
        if saved.problem:
            raise StoreError(saved.problem)

    def _load(self, slot: _Slot, saved: _Saved, box: list[Tensor]) -> Tensor:
        self._writer.wait(saved.written)
        problem = saved.problem or self._read(slot, saved, box)
        if problem:
            box.clear()
            raise StoreError(problem)
        return box.pop()

    # The two below give the problem as text: an exception would keep their frames, and so the tensor, alive.

    def _write(self, slot: _Slot, saved: _Saved, box: list[Tensor]) -> str:
        begin = time.perf_counter()
        hasher = xxhash.xxh3_128() if saved.checked else None
        tensor = box.pop()
        try:
            self._slab.write(slot.offset, storage_bytes(tensor), hasher)
        except OSError as error:
            return self._problem("write", slot, error)
        if hasher is not None:
            saved.digest = hasher.digest()
        self._moved.append(("write", begin, time.perf_counter()))
        self.written_bytes += saved.form.nbytes
        return ""

    def _read(self, slot: _Slot, saved: _Saved, box: list[Tensor]) -> str:
        begin = time.perf_counter()
        hasher = xxhash.xxh3_128() if saved.digest else None
        try:
            self._slab.read(slot.offset, storage_bytes(box[0]), hasher)
        except OSError as error:
            return self._problem("read", slot, error)
        self._moved.append(("read", begin, time.perf_counter()))
        self.read_bytes += saved.form.nbytes
        if hasher is not None and hasher.digest() != saved.digest:
            return (
                f"{self.name} store in {self.directory}: slot {slot.key}, generation {saved.generation}, came back with "
                f"other bytes than were written; do not trust this disk, name another with --store {self.name}=DIR"
            )
        return ""

    def _problem(self, verb: str, slot: _Slot, error: OSError) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        move = "free space there" if full else "check the disk"
        return (
            f"{self.name} store in {self.directory}: cannot {verb} slot {slot.key} of {slot.nbytes} bytes "
            f"({error.strerror}); {move}, or name another directory with --store {self.name}=DIR"
        )


def _finish(slab: Slab, lanes: tuple[Lane, ...]) -> None:
    for lane in lanes:
        lane.stop()
    for lane in lanes:
        lane.join()
    slab.close()
