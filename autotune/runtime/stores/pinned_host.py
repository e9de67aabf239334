"""Store a GPU's values in one slab of pinned host memory, copied by two streams beside the computing stream.

The slab has exactly the bytes of the slots. Nothing here blocks the host: to wait for a transfer means that the current
stream waits for the copy's event. The caching allocator reuses memory in the order of the computing stream, so memory
freed after such a wait is not overwritten too early.
"""

import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from autotune.errors import SlotError, StoreError
from autotune.runtime.stores import Direction
from autotune.runtime.stores.copy_streams import CopyStreams
from autotune.runtime.stores.pinned_memory import allocate_pinned
from autotune.runtime.stores.slots import Slots, slot_offsets
from autotune.runtime.stores.step_events import StepEvents
from autotune.runtime.stores.tensor_meta import TensorMeta, storage_tensor


@dataclass(slots=True, eq=False)
class _Slot:
    offset: int
    nbytes: int
    meta: TensorMeta | None = None
    """Layout of the tensor that was put last."""
    write_event: Any = None
    """End of the latest copy to the slot; None before the first."""
    read_event: Any = None
    """End of the latest copy from the slot; None before the first."""


class _Copy(Future[Any]):
    """A running copy. To ask for its result makes the current stream wait for it."""

    def __init__(self, cuda: Any, device: Any, event: Any, result: Any) -> None:
        super().__init__()
        self._cuda, self._device, self._event = cuda, device, event
        self.set_result(result)

    def done(self) -> bool:
        return bool(self._event.query())

    def result(self, timeout: float | None = None) -> Any:
        self._cuda.current_stream(self._device).wait_event(self._event)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._cuda.current_stream(self._device).wait_event(self._event)
        return super().exception(timeout)


class HostStore:
    """A `SwapStore` for tensors of one GPU, that of the first tensor it is given.

    Args:
        name: Name of the store, for messages.
        directory: Unused.
        slots: Bytes of each slot, by key.
        cuda: Replacement of `torch.cuda`, for tests.

    Raises:
        StoreError: There is no GPU, or the host memory cannot be pinned.
    """

    direct, holds_memory, pool_bytes = True, False, 0

    def __init__(self, name: str, directory: Path, slots: Mapping[int, int], *, cuda: Any = None) -> None:
        self.name, self.directory = name, directory
        self._cuda: Any = torch.cuda if cuda is None else cuda
        if not self._cuda.is_available():
            raise StoreError(f"{name} store: it holds values of a GPU, and torch finds no GPU; use --store ssd=DIR")
        self.written_bytes = self.read_bytes = 0
        offsets, end = slot_offsets(slots)
        self._slab, unpin = allocate_pinned(self._cuda, name, end)
        self._streams = CopyStreams(name, self._cuda)
        # re-entrant: the handler of a signal may close the store while it closes
        self._lock = threading.RLock()
        self._transfers: list[tuple[Direction, Any, Any]] = []
        self._step: StepEvents | None = None
        self._finish = weakref.finalize(self, unpin)
        self._slots = Slots(name, {key: _Slot(offsets[key], nbytes) for key, nbytes in slots.items()}, self._finish)

    def put(self, key: int, tensor: Tensor) -> "Future[None]":
        """Start to copy the tensor's whole storage, behind the work queued on the computing stream."""
        with self._lock:
            slot = self._slots[key]
            self._streams.bind(tensor.device)
            meta = TensorMeta.from_tensor(tensor)
            if meta.nbytes > slot.nbytes:
                raise SlotError(
                    f"{self.name} store: slot {key} has {slot.nbytes} bytes; a tensor of {meta.nbytes} does not fit"
                )
            slot.meta = meta
            slot.write_event = self._copy(
                Direction.WRITE, self._slab_part(slot), storage_tensor(tensor), slot.read_event
            )
            self.written_bytes += meta.nbytes
            return _Copy(self._cuda, self._streams.device, slot.write_event, None)

    def fetch(self, key: int, into: Tensor | None = None) -> "Future[Tensor]":
        """Start to copy back, into `into` or a tensor allocated on the computing stream."""
        with self._lock:
            slot = self._slots[key]
            if slot.meta is None:
                raise StoreError(f"{self.name} store: slot {key} was fetched before anything was put there")
            tensor = slot.meta.allocate(into, f"{self.name} store: slot {key}")
            slot.read_event = self._copy(
                Direction.READ, storage_tensor(tensor), self._slab_part(slot), slot.write_event
            )
            self.read_bytes += slot.meta.nbytes
            return _Copy(self._cuda, self._streams.device, slot.read_event, tensor)

    def begin_step(self, device: Any) -> StepEvents:
        """Return the events of a step that begins now; the copies that are queued until the next call belong to it."""
        with self._lock:
            self._streams.bind(device)
            self._step = StepEvents(self._cuda, device, self._streams.seconds)
            return self._step

    def transfers(self) -> list[tuple[Direction, float, float]]:
        """Return (direction, start, end) of the transfers that ended since the last call, by the clock of the GPU."""
        with self._lock:
            ended = [transfer for transfer in self._transfers if transfer[2].query()]
            self._transfers = [transfer for transfer in self._transfers if transfer not in ended]
            return [
                (direction, self._streams.seconds(start), self._streams.seconds(end)) for direction, start, end in ended
            ]

    def held_bytes(self) -> int:
        """Return 0: the slab is in host memory, not in the device's."""
        return 0

    def close(self) -> None:
        """Wait for running copies and release the slab. A second call does nothing."""
        with self._lock:
            if self._finish.alive:
                if self._streams.device is not None:
                    self._cuda.synchronize(self._streams.device)
                self._finish()
                self._slab = torch.empty(0, dtype=torch.uint8)  # executors still refer to a closed store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slab_part(self, slot: _Slot) -> Tensor:
        assert slot.meta is not None
        return self._slab[slot.offset : slot.offset + slot.meta.nbytes]

    def _copy(self, direction: Direction, to: Tensor, source: Tensor, after: Any) -> Any:
        """Copy on the stream of this direction, behind all work queued on the computing stream and behind the event `after`."""
        computed = self._streams.record_computing()
        with self._streams.current(direction) as stream:
            stream.wait_event(computed)
            if after is not None:
                stream.wait_event(after)
            start = self._streams.record_event(stream)
            to.copy_(source, non_blocking=True)
            end = self._streams.record_event(stream)
        self._transfers.append((direction, start, end))
        if self._step is not None:
            self._step.add_copy(direction, start, end)
        return end
