"""A GPU's values in one slab of pinned host memory, of exactly their bytes, copied by two streams beside the computing one.

Nothing here waits on the host: whoever waits for a transfer makes its own stream wait for the copy's event. The caching
allocator hands memory out in the order of the computing stream, so what is freed after that wait is not overwritten early.
"""

import mmap
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from autotune.errors import StoreError
from autotune.runtime.stores.slots import Slots, end_to_end
from autotune.runtime.stores.tensor_form import Form, storage_of
from autotune.units import fmt_bytes


@dataclass(slots=True, eq=False)
class _Slot:
    offset: int
    nbytes: int
    form: Form | None = None
    """Of what was put there last."""
    written: Any = None
    """Event of the latest copy to the slot, None before there was one."""
    read: Any = None


class _Copy(Future[Any]):
    """A copy under way, done for whoever asks: its stream waits from then on."""

    def __init__(self, cuda: Any, event: Any, answer: Any) -> None:
        super().__init__()
        self._cuda, self._event = cuda, event
        self.set_result(answer)

    def done(self) -> bool:
        return bool(self._event.query())

    def result(self, timeout: float | None = None) -> Any:
        self._cuda.current_stream().wait_event(self._event)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._cuda.current_stream().wait_event(self._event)
        return super().exception(timeout)


class HostStore:
    """A SwapStore for the current GPU's tensors; its directory is of no use. `cuda` stands for `torch.cuda`."""

    direct, holds_memory, pool_bytes = True, False, 0

    def __init__(self, name: str, directory: Path, slots: Mapping[int, int], *, cuda: Any = None) -> None:
        self.name, self.directory = name, directory
        self._cuda: Any = torch.cuda if cuda is None else cuda
        if not self._cuda.is_available():
            raise StoreError(f"{name} store: it keeps a GPU's values, and torch sees no GPU; use --store ssd=DIR")
        self.written_bytes = self.read_bytes = 0
        offsets, end = end_to_end(slots)
        self._slab, unpin = _pinned(self._cuda, name, end)
        self._streams = {"write": self._cuda.Stream(), "read": self._cuda.Stream()}
        self._lock = threading.Lock()
        self._moved: list[tuple[str, Any, Any]] = []
        self._begun = self._record(self._cuda.current_stream())
        self._cuda.synchronize()
        self._begun_seconds = time.perf_counter()
        self._finish = weakref.finalize(self, unpin)
        self._slots = Slots(name, {key: _Slot(offsets[key], nbytes) for key, nbytes in slots.items()}, self._finish)

    def put(self, key: int, tensor: Tensor) -> "Future[None]":
        """Begin to copy the tensor's whole storage, once the computing stream has made it."""
        with self._lock:
            slot = self._slots[key]
            form = Form.of(tensor)
            if form.nbytes > slot.nbytes:
                raise StoreError(
                    f"{self.name} store: slot {key} has {slot.nbytes} bytes; a tensor of {form.nbytes} does not fit"
                )
            slot.form = form
            slot.written = self._copy("write", self._place(slot), storage_of(tensor), slot.read)
            self.written_bytes += form.nbytes
            return _Copy(self._cuda, slot.written, None)

    def fetch(self, key: int, into: Tensor | None = None) -> "Future[Tensor]":
        """Allocate on the computing stream, or take a tensor of as many bytes, and begin to copy back."""
        with self._lock:
            slot = self._slots[key]
            if slot.form is None:
                raise StoreError(f"{self.name} store: slot {key} was fetched before anything was put there")
            tensor = slot.form.memory(into, f"{self.name} store: slot {key}")
            slot.read = self._copy("read", storage_of(tensor), self._place(slot), slot.written)
            self.read_bytes += slot.form.nbytes
            return _Copy(self._cuda, slot.read, tensor)

    def transfers(self) -> list[tuple[str, float, float]]:
        """Those that have ended since this was asked last, by the GPU's own clock."""
        with self._lock:
            ended = [moved for moved in self._moved if moved[2].query()]
            self._moved = [moved for moved in self._moved if moved not in ended]
            return [(verb, self._seconds(start), self._seconds(end)) for verb, start, end in ended]

    def held_bytes(self) -> int:
        """None of the device's: the slab lies in the host's memory."""
        return 0

    def close(self) -> None:
        """Wait for what is under way and give the slab back. Twice is once."""
        with self._lock:
            if self._finish.alive:
                self._cuda.synchronize()
                self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, slot: _Slot) -> Tensor:
        assert slot.form is not None
        return self._slab[slot.offset : slot.offset + slot.form.nbytes]

    def _copy(self, verb: str, to: Tensor, source: Tensor, after: Any) -> Any:
        """Copy on the verb's own stream, behind what the computing stream was given so far and behind `after`."""
        stream = self._streams[verb]
        stream.wait_event(self._record(self._cuda.current_stream()))
        if after is not None:
            stream.wait_event(after)
        with self._cuda.stream(stream):
            start = self._record(stream)
            to.copy_(source, non_blocking=True)
            end = self._record(stream)
        self._moved.append((verb, start, end))
        return end

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _seconds(self, event: Any) -> float:
        return self._begun_seconds + float(self._begun.elapsed_time(event)) / 1e3


def _pinned(cuda: Any, name: str, nbytes: int) -> tuple[Tensor, Any]:
    """A slab of host memory that the GPU copies from and to without help, and what gives it back.

    Registered, not `pin_memory`, which rounds every block up to a power of two.
    """
    pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    problem = int(cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if problem:
        raise StoreError(
            f"{name} store: {fmt_bytes(nbytes)} of host memory cannot be pinned (CUDA error {problem}); raise the limit of"
            " locked memory (ulimit -l), or offload less"
        )
    address = slab.data_ptr()

    def unpin() -> None:
        cuda.cudart().cudaHostUnregister(address)
        pages  # noqa: B018 - the memory stays until it is unpinned

    return slab, unpin
