"""What the driver says of the GPUs. `nvml` gives the functions of the module `pynvml`, or raises; `torch` tells of torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.cli.doctor.finding import Finding
from autotune.cli.doctor.software import Torch
from autotune.units import fmt_bytes

Nvml = Callable[[], Any]

_SLOWED = {0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
"""Bits of NVML's reasons for a lower clock that are nobody's wish."""
_UNCORRECTED, _SINCE_BOOT = 1, 0
_MODULE = Path("/proc/driver/nvidia/version")


def driver(nvml: Nvml, torch: Callable[[], Torch], module: Path = _MODULE) -> Finding:
    """Whether driver, NVML and torch see the same GPUs."""
    try:
        library = nvml()
        names = ", ".join(str(library.nvmlDeviceGetName(handle)) for handle in _handles(library))
    except Exception as error:  # noqa: BLE001 - no library, no driver, no permission
        if module.exists():
            return Finding("gpu", "warn", f"driver loaded, NVML fails: {error}", "check the driver with nvidia-smi")
        return Finding("gpu", "ok", "none: the CPU is tuned")
    if not names:
        return Finding("gpu", "ok", "none: the CPU is tuned")
    known = library.nvmlSystemGetCudaDriverVersion()
    serves = f"{known // 1000}.{known % 1000 // 10}"
    detail = f"{names}, driver {library.nvmlSystemGetDriverVersion()} for CUDA {serves}"
    asked = torch()
    if asked.gpus:
        return Finding("gpu", "ok", detail)
    if not asked.cuda:
        cure = "install torch built for CUDA, or tune for the CPU"
    elif int(asked.cuda.partition(".")[0]) > known // 1000:
        cure = f"torch is built for CUDA {asked.cuda}: update the driver, or install torch for CUDA {serves}"
    else:
        cure = "unset CUDA_VISIBLE_DEVICES, or give this user access to /dev/nvidia*"
    return Finding("gpu", "warn", f"{detail}: torch sees none", cure)


def processes(nvml: Nvml, torch: Callable[[], Torch]) -> Finding | None:
    """Whose memory is seen, and who else holds some."""
    if (library := _library(nvml)) is None:
        return None
    used = sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in _handles(library))
    if "hidden" in torch().gpu_meter:
        detail = f"{fmt_bytes(used)} in use; the driver hides here whose, as in a container"
        cure = "what a process takes beside its tensors is not counted; start the container with --pid=host"
        return Finding("gpu memory", "warn", detail, cure)
    others = [one for handle in _handles(library) for one in _running(library, handle)]
    if others:
        pids = ", ".join(str(one.pid) for one in others)
        cure = "end them: budgets and times are shared with them"
        return Finding("gpu memory", "warn", f"{fmt_bytes(used)} in use, by processes {pids}", cure)
    return Finding("gpu memory", "ok", f"{fmt_bytes(used)} in use, no other process computes")


def state(nvml: Nvml) -> Finding | None:
    """What makes results wrong or times untrue: memory errors, a lowered clock, a driver that unloads."""
    if (library := _library(nvml)) is None:
        return None
    handles = _handles(library)
    errors = sum(_told(library, "nvmlDeviceGetTotalEccErrors", one, _UNCORRECTED, _SINCE_BOOT) or 0 for one in handles)
    if errors:
        cure = "results may be wrong: drain this machine and have the GPU reset"
        return Finding("gpu state", "bad", f"{errors} memory errors that could not be corrected", cure)
    bits = [_told(library, "nvmlDeviceGetCurrentClocksThrottleReasons", one) or 0 for one in handles]
    slowed = sorted({why for bit, why in _SLOWED.items() if any(bit & seen for seen in bits)})
    if slowed:
        cure = "times are of a slowed GPU: let it cool, see nvidia-smi -q -d PERFORMANCE"
        return Finding("gpu state", "warn", f"slowed by {' and '.join(slowed)}", cure)
    if any(_told(library, "nvmlDeviceGetPersistenceMode", one) == 0 for one in handles):
        cure = "every process starts seconds later and at a low clock; nvidia-smi -pm 1"
        return Finding("gpu state", "warn", "the driver unloads between processes", cure)
    return Finding("gpu state", "ok", "no memory error, full clock")


def _handles(library: Any) -> list[Any]:
    return [library.nvmlDeviceGetHandleByIndex(number) for number in range(library.nvmlDeviceGetCount())]


def _library(nvml: Nvml) -> Any:
    """None where there is no GPU to ask about: `driver` says why."""
    try:
        library = nvml()
        return library if library.nvmlDeviceGetCount() else None
    except Exception:  # noqa: BLE001 - as in `driver`
        return None


def _running(library: Any, handle: Any) -> list[Any]:
    return list(_told(library, "nvmlDeviceGetComputeRunningProcesses", handle) or ())


def _told(library: Any, question: str, *about: Any) -> Any:
    """The answer; None where this GPU knows none."""
    try:
        return getattr(library, question)(*about)
    except library.NVMLError:
        return None
