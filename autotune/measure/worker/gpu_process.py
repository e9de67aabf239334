"""The GPU side of a worker process: its context, its driver's count, and its tensors while other processes measure."""

from collections.abc import Iterable

import torch

from autotune.measure.limits import create_context, limit_fraction
from autotune.measure.meters.cuda import CudaMeter
from autotune.measure.meters.nvml import NvmlMeter


class GpuProcess:
    """This process on its GPU; the context is created first, because NVML lists no process without one."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            create_context(torch)
        self._nvml = NvmlMeter()
        self.parking = Parking()

    def context_bytes(self) -> int:
        """Return the bytes of the process besides the caching allocator's; 0 where the driver does not list it."""
        if self._nvml.unavailable_reason():
            return 0
        return self._nvml.context_bytes(torch.cuda.memory_reserved())

    def free_bytes(self) -> int:
        """Return the bytes of the GPU that no other process holds."""
        return int(torch.cuda.mem_get_info()[0]) + torch.cuda.memory_reserved()

    def meter(self, *, charged: bool) -> CudaMeter:
        """Return a meter of this process's bytes on the GPU."""
        return CudaMeter(charged=charged, context_bytes=self.context_bytes)

    def limit(self, nbytes: int | None) -> None:
        """Limit this process, context included; again once first steps have loaded their kernels into the context."""
        if nbytes is not None:
            limit_fraction(nbytes, self.context_bytes())


class Parking:
    """Host copies of tensors whose device memory is released meanwhile.

    Processes of eager and of plans take turns on one GPU. A resting process would otherwise keep its weights and optimizer
    state. A model of half the GPU could not be measured then.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def park(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the storages of the tensors to the host and release their memory; every tensor stays the same object."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            if storage.nbytes() and storage.resizable():
                self._copies.append((storage, _bytes_of(storage).to("cpu", copy=True)))
                storage.resize_(0)

    def unpark(self) -> None:
        """Allocate the memory again and copy the bytes back. A second call does nothing."""
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy)
            self._copies.pop()  # if the allocation fails, the copy stays for the next attempt


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
