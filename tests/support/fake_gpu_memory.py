"""Memory of a made-up GPU: a caching allocator for each device, and tensors of a CPU that are counted in it."""

import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.predict.caching_allocator import CachingAllocator, MemoryBlock

TOTAL_BYTES = 16 * 2**30


class FakeGpuMemory:
    """The functions of `torch.cuda` that count and limit memory; bytes are rounded and reserved as a real GPU's are."""

    def __init__(self, devices: int = 1, *, expandable: bool = False, total_bytes: int = TOTAL_BYTES) -> None:
        self.total_bytes = total_bytes
        self.allocators = [CachingAllocator(expandable=expandable, limit_bytes=total_bytes) for _ in range(devices)]

    def allocate(self, nbytes: int, device: int = 0, stream: object = 0) -> MemoryBlock | None:
        """Allocate memory as a tensor of the device does."""
        try:
            return self.allocators[device].allocate(nbytes, stream)
        except MemoryError as error:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None

    def free(self, block: MemoryBlock | None, device: int = 0) -> None:
        """Free memory as the end of a tensor does."""
        self.allocators[device].free(block)

    def memory_allocated(self, device: int = 0) -> int:
        return self.allocators[device].allocated_bytes

    def max_memory_allocated(self, device: int = 0) -> int:
        return self.allocators[device].peak_allocated_bytes

    def memory_reserved(self, device: int = 0) -> int:
        return self.allocators[device].reserved_bytes

    def max_memory_reserved(self, device: int = 0) -> int:
        return self.allocators[device].peak_reserved_bytes

    def reset_peak_memory_stats(self, device: int = 0) -> None:
        self.allocators[device].reset_peaks()

    def empty_cache(self) -> None:
        for allocator in self.allocators:
            allocator.empty_cache()

    def get_device_properties(self, device: int = 0) -> Any:
        return SimpleNamespace(total_memory=self.total_bytes, uuid=f"made-up-{device}")

    def set_per_process_memory_fraction(self, fraction: float, device: int = 0) -> None:
        self.allocators[device].limit_bytes = int(fraction * self.total_bytes)


class CountedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the storages of all tensors that ops create in the `with` block as memory of the GPU, while they live."""

    def __init__(self, memory: FakeGpuMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._storages: dict[int, weakref.ref[Any]] = {}

    def count(self, tensors: Any) -> None:
        """Count the storages of all tensors in a nested structure that are not counted yet."""
        for tensor in pytree.tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._count_storage(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self.count(results)
        return results

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages and self._storages[key]() is storage:
            return
        block = self._memory.allocate(storage.nbytes())
        self._storages[key] = weakref.ref(storage, lambda _: self._memory.free(block))
