"""Store a GPU's values in a file on a disk, through a small amount of pinned host memory.

The two workers copy through staging buffers: while the disk moves one piece, the GPU copies the next. A worker waits on the
host until its copies have ended. So a transfer that is done needs no wait on the computing stream, and memory that is freed
after it may be used again at once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.errors import StoreError
from autotune.runtime.stores import Direction
from autotune.runtime.stores.copy_streams import CopyStreams
from autotune.runtime.stores.pinned_memory import allocate_pinned
from autotune.runtime.stores.slab_file import CHUNK_BYTES, Hasher
from autotune.runtime.stores.slab_store import SlabStore
from autotune.runtime.stores.step_events import StepEvents
from autotune.runtime.stores.tensor_meta import storage_tensor

_BUFFERS = 4
"""Number of staging buffers for each direction."""


class GpuSlabStore(SlabStore):
    """A `SwapStore` over one anonymous file, for tensors of one GPU, that of the first tensor it is given.

    Args:
        name: Name of the store, for messages.
        directory: Directory on the file system that holds the file.
        slots: Bytes of each slot, by key.
        cuda: Replacement of `torch.cuda`, for tests; its tensors are on the CPU.
        options: Further arguments of `SlabStore`.

    Raises:
        StoreError: There is no GPU, the directory cannot hold the slots, or the host memory cannot be pinned.
    """

    def __init__(
        self, name: str, directory: Path, slots: Mapping[int, int], *, cuda: Any = None, **options: Any
    ) -> None:
        self._cuda: Any = torch.cuda if cuda is None else cuda
        self._kind = "cuda" if cuda is None else "cpu"
        if not self._cuda.is_available():
            raise StoreError(
                f"{name} store: it was opened for values of a GPU, and torch finds no GPU; autotune doctor says why"
            )
        super().__init__(name, directory, slots, fork_safe=True, **options)
        try:
            pinned, unpin = allocate_pinned(self._cuda, name, len(Direction) * _BUFFERS * CHUNK_BYTES)
        except BaseException:
            self.close()
            raise
        self._cleanups.append(unpin)
        self._buffers = dict(zip(Direction, pinned.view(len(Direction), _BUFFERS, CHUNK_BYTES), strict=True))
        self._cleanups.append(self._buffers.clear)  # executors still refer to a closed store
        self._streams = CopyStreams(name, self._cuda)
        self._step: StepEvents | None = None
        self.pool_bytes, self.holds_memory = 0, False  # its memory is the host's

    def begin_step(self, device: Any) -> StepEvents:
        """Return the events of a step that begins now; the transfers that end until the next call belong to it."""
        with self._lock:
            self._streams.bind(device)
            self._streams.set_clock(device)
            self._step = StepEvents(self._cuda, device, self._streams.seconds)
            return self._step

    def held_bytes(self) -> int:
        """Return 0: the file's pages are in host memory, not in the device's."""
        return 0

    def _refuse(self, tensor: Tensor, place: str) -> None:
        is_dense = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if tensor.device.type != self._kind or not is_dense:
            raise StoreError(f"{place} takes plain dense tensors of a GPU, not {tensor.layout} on {tensor.device}")

    def _record_ready(self, tensor: Tensor) -> Any:
        self._streams.bind(tensor.device)
        return self._streams.record_computing()

    def _wait_until(self, ready: Any) -> None:
        ready.synchronize()

    def _log(self, direction: Direction, start: float, end: float) -> None:
        super()._log(direction, start, end)
        if self._step is not None:
            self._step.add_transfer(direction, start, end)

    def _write_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None) -> None:
        copied: list[tuple[int, Tensor, Any]] = []
        with self._copying(Direction.WRITE):
            for start, piece, buffer in self._pieces(Direction.WRITE, tensor):
                copied.append((start, buffer, self._copy(Direction.WRITE, buffer, piece)))
                if len(copied) == _BUFFERS:
                    self._write_buffer(offset, *copied.pop(0), hasher)
            while copied:
                self._write_buffer(offset, *copied.pop(0), hasher)

    def _write_buffer(self, offset: int, start: int, buffer: Tensor, copied: Any, hasher: Hasher | None) -> None:
        copied.synchronize()
        self._slab.write(offset + start, buffer.numpy(), hasher)

    def _read_storage(self, offset: int, tensor: Tensor, hasher: Hasher | None) -> None:
        copied: list[Any] = []
        with self._copying(Direction.READ):
            for start, piece, buffer in self._pieces(Direction.READ, tensor):
                if len(copied) == _BUFFERS:
                    copied.pop(0).synchronize()  # the copy from this buffer
                self._slab.read(offset + start, buffer.numpy(), hasher)
                copied.append(self._copy(Direction.READ, piece, buffer))
            for event in copied:
                event.synchronize()

    @contextlib.contextmanager
    def _copying(self, direction: Direction) -> Iterator[None]:
        """Wait for all copies of a direction after an error: the caller frees the tensor."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a GPU that fails has no copy in flight
                self._streams[direction].synchronize()
            raise

    def _pieces(self, direction: Direction, tensor: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (start, piece of the storage, as many bytes of a staging buffer)."""
        storage = storage_tensor(tensor)
        for index, start in enumerate(range(0, len(storage), CHUNK_BYTES)):
            piece = storage[start : start + CHUNK_BYTES]
            yield start, piece, self._buffers[direction][index % _BUFFERS, : len(piece)]

    def _copy(self, direction: Direction, to: Tensor, source: Tensor) -> Any:
        with self._streams.current(direction) as stream:
            to.copy_(source, non_blocking=True)
            return self._streams.record_event(stream)
