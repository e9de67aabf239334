"""GPU memory of this process as the driver counts it: context, libraries and all allocators together."""

import importlib
import os
from types import TracebackType
from typing import Any, Self

from autotune.measure.meters.nvml_device import find_handle
from autotune.measure.meters.sampling import SampledPeak


class NvmlMeter:
    """The driver's total for this process on torch's current GPU, sampled by a thread.

    In many containers the driver lists no processes, or lists them by numbers of another namespace. Then the meter
    reads the whole device, and its name contains `whole device`. `nvml` has the functions of the module `pynvml`, and
    `cuda` those of `torch.cuda`.
    """

    unsure_bytes = 0

    def __init__(self, *, nvml: Any = None, pid: int | None = None, cuda: Any = None) -> None:
        self._nvml = nvml
        self._pid = os.getpid() if pid is None else pid
        self._handle: Any = None
        self._problem = ""
        self._sampled = SampledPeak(self.now_bytes)
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = find_handle(self._nvml, cuda or _torch_cuda(), os.environ)
        except ImportError:
            self._problem = "nvidia-ml-py is not installed"
        except self._nvml.NVMLError as error:
            self._problem = str(error)

    def unavailable_reason(self) -> str:
        return self._problem

    @property
    def name(self) -> str:
        return "nvml" if self._process_bytes() is not None else "nvml (whole device: processes hidden)"

    def now_bytes(self) -> int:
        used = self._process_bytes()
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if used is None else used

    @property
    def peak_bytes(self) -> int:
        return self._sampled.peak

    def __enter__(self) -> Self:
        self._sampled.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampled.stop()

    def context_bytes(self, reserved_bytes: int) -> int:
        """Return the bytes of the process beyond the caching allocator's `reserved_bytes`; 0 where processes are hidden."""
        used = self._process_bytes()
        return 0 if used is None else max(0, used - reserved_bytes)

    def _process_bytes(self) -> int | None:
        if self._handle is None:
            return None
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        for process in processes:
            if process.pid == self._pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None


def _torch_cuda() -> Any:
    """Return `torch.cuda`; None where it sees no GPU."""
    import torch

    return torch.cuda if torch.cuda.is_available() else None
