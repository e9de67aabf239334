"""What is said of GPUs, by an NVML that is made up."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli.doctor import gpu
from autotune.cli.doctor.software import TorchInfo

GIB = 2**30


class NotSupported(Exception):
    pass


def nvml(count: int = 1, **answers: Any) -> Callable[[], Any]:
    """A driver of CUDA 13.0; an answer that is an exception is raised."""
    said: dict[str, Any] = {
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=GIB),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,  # idle
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetComputeMode": 0,
        "nvmlSystemGetCudaDriverVersion": 13000,
        "nvmlSystemGetDriverVersion": "580.1",
    }

    def question(answer: Any) -> Callable[..., Any]:
        def ask(*about: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    questions = {name: question(answer) for name, answer in (said | answers).items()}
    library = SimpleNamespace(
        NVMLError=NotSupported,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        **questions,
    )
    return lambda: library


def torch(cuda: str = "13.0", gpus: int = 1, meter: str = "nvml") -> Callable[[], TorchInfo]:
    return lambda: TorchInfo("2.13.0", cuda, gpus, meter if gpus else "", (1.0,))


def broken() -> Any:
    raise RuntimeError("driver/library version mismatch")


def test_a_gpu_that_all_three_see_is_ok(tmp_path: Path) -> None:
    found = gpu.check_driver(nvml(2), torch(gpus=2))
    assert (found.status, found.detail) == ("ok", "NVIDIA H100, NVIDIA H100, driver 580.1 for CUDA 13.0")


@pytest.mark.parametrize("library", [broken, nvml(count=0)])
def test_a_machine_without_a_gpu_lacks_nothing(library: Callable[[], Any], tmp_path: Path) -> None:
    assert gpu.check_driver(library, torch(gpus=0), tmp_path / "no module").status == "ok"
    assert gpu.check_processes(library, torch(gpus=0)) is None
    assert gpu.check_state(library) is None


def test_a_loaded_driver_that_nvml_cannot_ask_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    found = gpu.check_driver(broken, torch(gpus=0), tmp_path / "version")
    assert (found.status, found.detail) == ("warn", "driver loaded, NVML fails: driver/library version mismatch")
    assert "nvidia-smi" in found.fix


@pytest.mark.parametrize(
    ("cuda", "serves", "remedy"),
    [
        ("", 13000, "install torch built for CUDA"),
        ("13.0", 12040, "torch is built for CUDA 13.0: update the driver, or install torch for CUDA 12.4"),
        ("12.8", 12040, "CUDA_VISIBLE_DEVICES"),  # any driver of 12 serves all of 12
    ],
)
def test_a_gpu_that_torch_does_not_see_comes_with_the_reason(cuda: str, serves: int, remedy: str) -> None:
    found = gpu.check_driver(nvml(nvmlSystemGetCudaDriverVersion=serves), torch(cuda, gpus=0))
    assert found.status == "warn"
    assert "torch sees none" in found.detail
    assert remedy in found.fix


def test_processes_that_a_container_hides_are_told_before_those_that_are_seen() -> None:
    others = [SimpleNamespace(pid=4711), SimpleNamespace(pid=4712)]
    seen = gpu.check_processes(nvml(nvmlDeviceGetComputeRunningProcesses=others), torch())
    assert seen is not None
    assert (seen.status, seen.detail) == ("warn", "1024.0 MiB in use, by processes 4711, 4712")
    hidden = gpu.check_processes(nvml(), torch(meter="nvml (whole device: processes hidden)"))
    assert hidden is not None
    assert hidden.status == "warn"
    assert "--pid=host" in hidden.fix
    alone = gpu.check_processes(nvml(), torch())
    assert alone is not None
    assert alone.status == "ok"
    slice_in_a_container = gpu.check_processes(nvml(nvmlDeviceGetMemoryInfo=NotSupported()), torch())
    assert slice_in_a_container is not None
    assert slice_in_a_container.detail == "unknown bytes in use, no other process runs on it"


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({}, "ok", "no memory error"),
        ({"nvmlDeviceGetTotalEccErrors": 3}, "bad", "3 memory errors"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x48}, "warn", "slowed by hardware and heat"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 0x04}, "ok", "no memory error"),  # its usual power limit
        ({"nvmlDeviceGetPersistenceMode": 0}, "warn", "unloads"),
        ({"nvmlDeviceGetComputeMode": 3}, "bad", "only one process at a time"),
        ({name: NotSupported() for name in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetPersistenceMode")}, "ok", ""),
    ],
)
def test_what_makes_results_or_times_untrue_is_told(answers: dict[str, Any], status: str, said: str) -> None:
    found = gpu.check_state(nvml(**answers))
    assert found is not None
    assert found.status == status
    assert said in found.detail
    assert bool(found.fix) == (status != "ok")
