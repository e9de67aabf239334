"""Record CUDA graphs with PyTorch, in memory that they share."""

import contextlib
from typing import Any

import torch

from autotune.runtime.gpu.graphed_step import Graph


class CudaRecorder:
    """Recorder of one capture. Its graphs have one pool of memory, so that each reuses what earlier ones released.

    Args:
        device: The GPU.
        cuda: Replacement of `torch.cuda`, for tests.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._cuda = cuda or torch.cuda
        self.graphs: list[Graph] = []
        """Complete graphs in order."""
        with self._cuda.device(device):
            self._pool, self._stream = self._cuda.graph_pool_handle(), self._cuda.Stream(device)
        self._underway: Any = None

    def begin(self) -> None:
        """Record the kernels from here on instead of running them."""
        graph = self._cuda.CUDAGraph()
        # other threads may copy while this one captures
        self._underway = self._cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        self._underway.__enter__()
        self.graphs.append(graph)

    def end(self) -> None:
        """Complete the graph that was begun."""
        underway, self._underway = self._underway, None
        underway.__exit__(None, None, None)

    def abort(self) -> None:
        """Drop the graph that was begun, if there is one. Ending it repeats the capture's error, which is ignored here."""
        if self._underway is not None:
            with contextlib.suppress(RuntimeError):
                self.end()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the same memory that does not keep the memory from being reused by later graphs."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class _Memory:
    """Memory of a GPU as other libraries describe it to PyTorch, which then does not free it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip
