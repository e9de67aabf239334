"""GPU memory of this process as the driver counts it: the context, libraries and every allocator together."""

import importlib
import os
from types import TracebackType
from typing import Any, Self

from autotune.measure.meters.sampling import Highest


class NvmlMeter:
    """The driver's total for this process, sampled by a thread.

    In many containers the driver lists no processes, or lists them by numbers of another namespace; then the meter
    reads the whole device and its name says so. `nvml` has the functions of the module `pynvml` of nvidia-ml-py.
    """

    unsure_bytes = 0

    def __init__(self, index: int = 0, *, nvml: Any = None, pid: int | None = None) -> None:
        self._index = index
        self._nvml = nvml
        self._pid = os.getpid() if pid is None else pid
        self._handle: Any = None
        self._problem = ""
        self._highest = Highest(self.now_bytes)
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except ImportError:
            self._problem = "nvidia-ml-py is not installed"
        except self._nvml.NVMLError as error:
            self._problem = str(error)

    def why_not(self) -> str:
        return self._problem

    @property
    def name(self) -> str:
        return "nvml" if self._mine() is not None else "nvml (whole device: processes hidden)"

    def now_bytes(self) -> int:
        mine = self._mine()
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if mine is None else mine

    @property
    def peak_bytes(self) -> int:
        return self._highest.highest

    def __enter__(self) -> Self:
        self._highest.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._highest.stop()

    def context_bytes(self, reserved_bytes: int) -> int:
        """What the process takes beside the caching allocator's `reserved_bytes`; 0 where processes are hidden."""
        mine = self._mine()
        return 0 if mine is None else max(0, mine - reserved_bytes)

    def _mine(self) -> int | None:
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
