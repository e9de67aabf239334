"""Store a GPU's values in a file on a disk, through a little pinned host memory.

The two workers copy part by part: while the disk moves one part, the GPU copies the next. A worker waits on the host until
its copies have ended. So a transfer that is done needs no wait on the computing stream, and memory that is freed after it
may be used again at once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.errors import StoreError
from autotune.runtime.stores import Direction
from autotune.runtime.stores.copy_streams import CopyStreams
from autotune.runtime.stores.pinned_memory import allocate_pinned
from autotune.runtime.stores.slab_file import DIRECT_BYTES, Hasher
from autotune.runtime.stores.slab_store import SlabStore
from autotune.runtime.stores.step_events import StepEvents
from autotune.runtime.stores.tensor_meta import storage_tensor

_PARTS = 2
"""Parts of pinned memory for each direction: one for the disk, one for the GPU."""


class GpuSlabStore(SlabStore):
    """A `SwapStore` over one anonymous file, for tensors of one GPU, that of the first tensor it is given.

    Args:
        name: Name of the store, for messages.
        directory: Directory on the file system that holds the file.
        slots: Bytes of each slot, by key.
        cuda: Replacement of `torch.cuda`, for tests.
        options: Further arguments of `SlabStore`.

    Raises:
        StoreError: There is no GPU, the directory cannot hold the slots, or the host memory cannot be pinned.
    """

    def __init__(
        self, name: str, directory: Path, slots: Mapping[int, int], *, cuda: Any = None, **options: Any
    ) -> None:
        self._cuda: Any = torch.cuda if cuda is None else cuda
        if not self._cuda.is_available():
            raise StoreError(f"{name} store: it was opened for values of a GPU, and torch finds no GPU")
        super().__init__(name, directory, slots, **options)
        try:
            pinned, unpin = allocate_pinned(self._cuda, name, len(Direction) * _PARTS * DIRECT_BYTES)
        except StoreError:
            self.close()
            raise
        self._releases.append(unpin)
        self._parts = dict(zip(Direction, pinned.view(len(Direction), _PARTS, DIRECT_BYTES), strict=True))
        self._streams = CopyStreams(name, self._cuda)
        self._step: StepEvents | None = None
        self.pool_bytes, self.holds_memory = 0, False  # its memory is the host's

    def begin_step(self, device: Any) -> StepEvents:
        """Return the events of a step that begins now; the transfers that end until the next call belong to it."""
        with self._lock:
            self._streams.use(device)
            self._step = StepEvents(self._cuda, device, self._streams.seconds)
            return self._step

    def held_bytes(self) -> int:
        """Return 0: the file's pages are in host memory, not in the device's."""
        return 0

    def _refuse(self, tensor: Tensor, place: str) -> None:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise StoreError(f"{place} takes plain dense tensors of a GPU, not {tensor.layout} on {tensor.device}")

    def _mark(self, tensor: Tensor) -> Any:
        self._streams.use(tensor.device)
        return self._streams.mark_computing()

    def _log(self, direction: Direction, start: float, end: float) -> None:
        super()._log(direction, start, end)
        if self._step is not None:
            self._step.add_transfer(direction, start, end)

    def _write_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None, ready: Any) -> None:
        copied: list[tuple[int, Tensor, Any]] = []
        try:
            for start, piece, part in self._pieces(Direction.WRITE, tensor, ready):
                copied.append((start, part, self._copy(Direction.WRITE, part, piece)))
                if len(copied) == _PARTS:
                    self._write_part(offset, *copied.pop(0), hasher)
            while copied:
                self._write_part(offset, *copied.pop(0), hasher)
        finally:  # after an error, too: the caller frees the tensor
            for _, _, event in copied:
                event.synchronize()

    def _write_part(self, offset: int, start: int, part: Tensor, event: Any, hasher: Hasher | None) -> None:
        event.synchronize()
        self._slab.write(offset + start, part.numpy(), hasher)

    def _read_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None, ready: Any) -> None:
        copies: list[Any] = []
        try:
            for start, piece, part in self._pieces(Direction.READ, tensor, ready):
                if len(copies) == _PARTS:
                    copies.pop(0).synchronize()  # the copy from this part
                self._slab.read(offset + start, part.numpy(), hasher)
                copies.append(self._copy(Direction.READ, piece, part))
        finally:
            for event in copies:
                event.synchronize()

    def _pieces(self, direction: Direction, tensor: Tensor, ready: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (start, piece of the storage, part of the pinned memory), behind the event `ready`."""
        self._streams[direction].wait_event(ready)
        storage = storage_tensor(tensor)
        for index, start in enumerate(range(0, len(storage), DIRECT_BYTES)):
            piece = storage[start : start + DIRECT_BYTES]
            yield start, piece, self._parts[direction][index % _PARTS, : len(piece)]

    def _copy(self, direction: Direction, to: Tensor, source: Tensor) -> Any:
        stream = self._streams[direction]
        with self._cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        return self._streams.mark(stream)
