"""Memory of a CUDA process as PyTorch's caching allocator counts it."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class CudaMeter:
    """Reserved bytes (charged by the device) or, with `charged=False`, allocated bytes (used by the plan itself).

    `context_bytes()` returns the bytes of the process before its first tensor, see `NvmlMeter.context_bytes`. `cuda` has
    the functions of `torch.cuda`.
    """

    unsure_bytes = 0

    def __init__(self, *, charged: bool = True, context_bytes: Callable[[], int] = lambda: 0, cuda: Any = None) -> None:
        self._charged = charged
        self._context_bytes = context_bytes
        self._cuda_module = cuda
        self._peak: int | None = None
        self.name = "cuda reserved" if charged else "cuda allocated"

    @property
    def _cuda(self) -> Any:
        if self._cuda_module is None:
            import torch

            self._cuda_module = torch.cuda
        return self._cuda_module

    def unavailable_reason(self) -> str:
        return "" if self._cuda.is_available() else "torch sees no CUDA device"

    def now_bytes(self) -> int:
        tensors = self._cuda.memory_reserved() if self._charged else self._cuda.memory_allocated()
        return int(tensors) + self._context_bytes()

    @property
    def peak_bytes(self) -> int:
        if self._peak is not None:
            return self._peak
        tensors = self._cuda.max_memory_reserved() if self._charged else self._cuda.max_memory_allocated()
        return int(tensors) + self._context_bytes()

    def __enter__(self) -> Self:
        self._peak = None
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda.synchronize()
        self._peak = self.peak_bytes
