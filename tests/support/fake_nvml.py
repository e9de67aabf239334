"""A made-up NVML: several GPUs, MIG slices, and the processes that each of them lists."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """A GPU, or a MIG slice of one; `processes` maps pids to bytes."""

    uuid: str
    processes: dict[int, int] = field(default_factory=dict)
    slices: list["Gpu"] = field(default_factory=list)
    is_slice: bool = False


class FakeNvml:
    """The functions of `pynvml` for the GPUs of a machine, in the order of their bus."""

    NVMLError = NVMLError

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        for gpu in gpus:
            for part in gpu.slices:
                part.is_slice = True

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            for device in (gpu, *gpu.slices):
                if device.uuid == uuid:
                    return device
        raise NVMLError("Not Found")

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> tuple[int, int]:
        if gpu.is_slice:
            raise NVMLError("Not Supported")
        return int(bool(gpu.slices)), int(bool(gpu.slices))

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, number: int) -> Gpu:
        if number == 0 or number > len(gpu.slices):  # the first number is unused, as after a slice was destroyed
            raise NVMLError("Not Found")
        return gpu.slices[number - 1]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        if gpu.slices:
            raise NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in gpu.processes.items()]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(used=sum(gpu.processes.values()))


def fake_torch_cuda(*uuids: str, current: int = 0) -> Any:
    """Return the functions of `torch.cuda` that name the visible GPUs, in CUDA's order."""
    return SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: current,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
    )
