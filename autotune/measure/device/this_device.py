"""Identification of this machine's processor and GPU."""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, DeviceRefusedError
from autotune.records.device import Device


def this_device(kind: str = "cpu") -> Device:
    """Return the device of this process: `cpu`, or `cuda` for the current GPU.

    Only `cuda` imports torch. Raises DeviceRefusedError where torch detects no GPU, and ConfigError for another kind.
    """
    match kind:
        case "cpu":
            return Device(
                kind="cpu",
                silicon=cpu_name(),
                memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                cores=usable_cores(),
                torch=importlib.metadata.version("torch"),
                driver=f"Linux {os.uname().release}",
            )
        case "cuda":
            import torch

            if not torch.cuda.is_available():
                raise DeviceRefusedError(
                    "device cuda: torch sees no GPU; check the driver with nvidia-smi, or use device cpu"
                )
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            return Device(
                kind="cuda",
                silicon=properties.name,
                memory_bytes=properties.total_memory,
                cores=properties.multi_processor_count,
                torch=torch.__version__,
                driver=" ".join(filter(None, [f"CUDA {torch.version.cuda}", _driver_version()])),
            )
    raise ConfigError(f"unknown device {kind!r}; known: cpu, cuda")


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the kernel reports it; some architectures report none."""
    for line in _lines(cpuinfo):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return f"{os.uname().machine} CPU"


def usable_cores(cpuinfo: Path = Path("/proc/cpuinfo"), usable: set[int] | None = None) -> int:
    """Count the physical cores that this process may run on; two threads of one core count once."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    cores: dict[int, tuple[str, str]] = {}
    processor, package = -1, ""
    for line in _lines(cpuinfo):
        key, _, text = (part.strip() for part in line.partition(":"))
        match key:
            case "processor":
                processor, package = int(text), ""
            case "physical id":
                package = text
            case "core id":
                cores[processor] = (package, text)
    # a processor without a core id, as on most ARM, counts as a core
    return len({cores.get(number, ("", f"processor {number}")) for number in usable})


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's feature flags, with the kernel's names."""
    for line in _lines(cpuinfo):
        key, _, text = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(text.split())
    return frozenset()


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the number of cores that a container may use; None without such a limit."""
    v2 = _words(cgroups / "cpu.max")
    v1 = _words(cgroups / "cpu/cpu.cfs_quota_us") + _words(cgroups / "cpu/cpu.cfs_period_us")
    for words in (v2, v1):
        if len(words) == 2 and words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def open_nvml() -> Any:
    """Open the driver's library; containers make it fail with many kinds of exceptions."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _driver_version() -> str:
    try:
        return f"driver {open_nvml().nvmlSystemGetDriverVersion()}"
    except Exception:  # noqa: BLE001 - the version is optional
        return ""


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
