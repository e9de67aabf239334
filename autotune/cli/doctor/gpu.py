"""Checks of the GPUs through the driver.

`nvml` returns the module `pynvml`, or raises; `torch` returns what a process that imported torch printed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.cli.doctor.check_result import CheckResult
from autotune.cli.doctor.software import TorchInfo
from autotune.units import fmt_bytes

Nvml = Callable[[], Any]

_SLOWED = {0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
"""Unwanted causes of a lower clock, by their bit in NVML's reasons."""
_UNCORRECTED, _SINCE_BOOT = 1, 0
_EXCLUSIVE = 3
"""NVML's compute mode in which a GPU serves one process."""
_MODULE = Path("/proc/driver/nvidia/version")


def check_driver(nvml: Nvml, torch: Callable[[], TorchInfo], module: Path = _MODULE) -> CheckResult:
    """Check that driver, NVML and torch find the same GPUs."""
    try:
        library = nvml()
        names = ", ".join(str(library.nvmlDeviceGetName(handle)) for handle in _handles(library))
    except Exception as error:  # noqa: BLE001 - no library, no driver, no permission
        if module.exists():
            return CheckResult("gpu", "warn", f"driver loaded, NVML fails: {error}", "check the driver with nvidia-smi")
        return CheckResult("gpu", "ok", "none: the CPU is tuned")
    if not names:
        return CheckResult("gpu", "ok", "none: the CPU is tuned")
    version = library.nvmlSystemGetCudaDriverVersion()
    supported = f"{version // 1000}.{version % 1000 // 10}"
    detail = f"{names}, driver {library.nvmlSystemGetDriverVersion()} for CUDA {supported}"
    info = torch()
    if info.gpus:
        return CheckResult("gpu", "ok", detail)
    if not info.cuda:
        fix = "install torch built for CUDA, or tune for the CPU"
    elif int(info.cuda.partition(".")[0]) > version // 1000:
        fix = f"torch is built for CUDA {info.cuda}: update the driver, or install torch for CUDA {supported}"
    else:
        fix = "unset CUDA_VISIBLE_DEVICES, or give this user access to /dev/nvidia*"
    return CheckResult("gpu", "warn", f"{detail}: torch sees none", fix)


def check_processes(nvml: Nvml, torch: Callable[[], TorchInfo]) -> CheckResult | None:
    """Check which processes use the GPUs' memory; None without a GPU."""
    if (library := _library(nvml)) is None:
        return None
    memories = [_query(library, "nvmlDeviceGetMemoryInfo", handle) for handle in _handles(library)]
    sizes = [int(memory.used) for memory in memories if memory is not None]
    used = fmt_bytes(sum(sizes)) if len(sizes) == len(memories) else "unknown bytes"
    if "hidden" in torch().gpu_meter:
        detail = f"{used} in use; the driver hides the processes, as in a container"
        fix = "a process's memory besides its tensors is not counted; start the container with --pid=host"
        return CheckResult("gpu memory", "warn", detail, fix)
    processes = [process for handle in _handles(library) for process in _running(library, handle)]
    if processes:
        pids = ", ".join(str(process.pid) for process in processes)
        fix = "end them: they share the memory and slow the measurements"
        return CheckResult("gpu memory", "warn", f"{used} in use, by processes {pids}", fix)
    return CheckResult("gpu memory", "ok", f"{used} in use, no other process runs on it")


def check_state(nvml: Nvml) -> CheckResult | None:
    """Check for memory errors, a lowered clock and a driver that unloads; None without a GPU."""
    if (library := _library(nvml)) is None:
        return None
    handles = _handles(library)
    errors = sum(
        _query(library, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_BOOT) or 0 for handle in handles
    )
    if errors:
        fix = "results may be wrong: drain this machine and have the GPU reset"
        return CheckResult("gpu state", "bad", f"{errors} memory errors that could not be corrected", fix)
    if any(_query(library, "nvmlDeviceGetComputeMode", handle) == _EXCLUSIVE for handle in handles):
        fix = "several processes measure in turns; nvidia-smi -c DEFAULT"
        return CheckResult("gpu state", "bad", "only one process at a time may use the GPU", fix)
    bits = [_query(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0 for handle in handles]
    slowed = sorted({why for bit, why in _SLOWED.items() if any(bit & reasons for reasons in bits)})
    if slowed:
        fix = "measured times are too long: let the GPU cool, see nvidia-smi -q -d PERFORMANCE"
        return CheckResult("gpu state", "warn", f"slowed by {' and '.join(slowed)}", fix)
    if any(_query(library, "nvmlDeviceGetPersistenceMode", handle) == 0 for handle in handles):
        fix = "every process starts seconds later and at a low clock; nvidia-smi -pm 1"
        return CheckResult("gpu state", "warn", "the driver unloads between processes", fix)
    return CheckResult("gpu state", "ok", "no memory error, full clock")


def _handles(library: Any) -> list[Any]:
    return [library.nvmlDeviceGetHandleByIndex(number) for number in range(library.nvmlDeviceGetCount())]


def _library(nvml: Nvml) -> Any:
    """Return NVML; None without a GPU, which `check_driver` explains."""
    try:
        library = nvml()
        return library if library.nvmlDeviceGetCount() else None
    except Exception:  # noqa: BLE001 - as in `check_driver`
        return None


def _running(library: Any, handle: Any) -> list[Any]:
    return list(_query(library, "nvmlDeviceGetComputeRunningProcesses", handle) or ())


def _query(library: Any, function: str, *arguments: Any) -> Any:
    """Return the result of an NVML function; None where the GPU does not support it."""
    try:
        return getattr(library, function)(*arguments)
    except library.NVMLError:
        return None
