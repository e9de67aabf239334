"""What this machine is, and whether all that tuning needs is there."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autotune.errors import AutotuneError, ConfigError
from autotune.measurement import Device
from autotune.units import fmt_bytes

_TORCH_FROM, _TORCH_BELOW = (2, 11), (2, 14)
_ROOM_BYTES = 2**30


def this_device(kind: str = "cpu") -> Device:
    """The device of this process: `cpu`, or `cuda` for the current GPU. Only `cuda` imports torch."""
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
                raise ConfigError("device cuda: torch sees no GPU; check the driver with nvidia-smi, or use device cpu")
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
    """The processor's name as the kernel tells it; some architectures tell none."""
    for line in _lines(cpuinfo):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return f"{os.uname().machine} CPU"


def usable_cores(cpuinfo: Path = Path("/proc/cpuinfo"), usable: set[int] | None = None) -> int:
    """Physical cores among the processors that this process may run on: two threads of one core are one."""
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
    # a processor that names no core, as on most ARM, is one of its own
    return len({cores.get(number, ("", f"processor {number}")) for number in usable})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it stands, and what to do where it does not stand well."""

    name: str
    status: Literal["ok", "warn", "bad"]
    detail: str
    cure: str = ""


def doctor(stores: Mapping[str, Path], runs: Path = Path("runs")) -> list[Finding]:
    """Look at everything that tuning needs; never raises. `bad` must be mended first, `warn` costs truth or comfort."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("torch", _torch),
        ("gpu", _gpu),
        ("memory", _memory),
        ("cores", _cores),
        ("noise", _noise),
        ("compiler", _compiler),
        ("runs", partial(_runs, runs)),
        *((f"store {name}", partial(_store, name, Path(directory))) for name, directory in stores.items()),
    ]
    return [_survive(name, check) for name, check in checks]


def _survive(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except AutotuneError as error:
        detail, _, cure = str(error).partition("; ")
        return Finding(name, "bad", detail, cure)
    except Exception as error:  # noqa: BLE001 - whatever is broken here is the finding
        return Finding(name, "bad", f"cannot be looked at: {type(error).__name__}: {error}".splitlines()[0])


def _python() -> Finding:
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


_ASK_TORCH = "import torch; print(torch.__version__, torch.version.cuda or '-', torch.cuda.device_count())"


def _ask_torch() -> tuple[str, str, int]:
    """Version, CUDA version, GPUs; from a process of its own, which may crash instead of us."""
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit {asked.returncode}"])[-1]
        raise ConfigError(f"torch cannot be imported: {last}; install it again: pip install 'torch>=2.11,<2.14'")
    version, cuda, count = asked.stdout.split()
    return version, cuda, int(count)


def _torch() -> Finding:
    version, cuda, _ = _ask_torch()
    detail = f"{version}, {'built for the CPU' if cuda == '-' else f'CUDA {cuda}'}"
    major, minor = version.split(".")[:2]
    if not _TORCH_FROM <= (int(major), int(minor)) < _TORCH_BELOW:
        return Finding("torch", "bad", detail, "install a version that is tried: pip install 'torch>=2.11,<2.14'")
    return Finding("torch", "ok", detail)


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _driver_version() -> str:
    try:
        return f"driver {_nvml().nvmlSystemGetDriverVersion()}"
    except Exception:  # noqa: BLE001 - NVML fails in as many ways as there are containers; the version is a nicety
        return ""


def _gpu() -> Finding:
    present = Path("/proc/driver/nvidia/version").exists()
    try:
        nvml = _nvml()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        names = ", ".join(str(nvml.nvmlDeviceGetName(handle)) for handle in handles)
    except Exception as error:  # noqa: BLE001 - no library, no driver, no permission
        if present:
            return Finding("gpu", "warn", f"driver loaded, NVML fails: {error}", "check the driver with nvidia-smi")
        return Finding("gpu", "ok", "none: the CPU is tuned")
    if not _ask_torch()[2]:
        return Finding("gpu", "warn", f"{names}: torch sees none", "install torch built for CUDA, or tune for the CPU")
    return Finding("gpu", "ok", f"{names}, {_driver_version()}")


def _memory() -> Finding:
    from autotune.meters.cgroup import Cgroup, OwnCgroup

    home = Cgroup.current()
    where = "no memory cgroup" if home is None else f"cgroup v{home.version} at {home.path}"
    try:
        OwnCgroup(f"{os.getpid()}-doctor").remove()
    except OSError as error:
        cure = (
            "limits are emulated with RLIMIT_DATA; for real ones run under: systemd-run --user --scope -p Delegate=yes"
        )
        return Finding("memory", "warn", f"{where}, not writable ({error.strerror or error})", cure)
    return Finding("memory", "ok", f"{where}, writable: the kernel can meter and limit one process alone")


def _cores() -> Finding:
    cores, quota = usable_cores(), cpu_quota()
    if quota is not None and quota < cores:
        detail = f"{cores} cores, of which a quota gives {quota:g}"
        return Finding("cores", "warn", detail, f"set OMP_NUM_THREADS={max(1, int(quota))}, or lift the quota")
    return Finding("cores", "ok", f"{cores} of {cpu_name()}, {fmt_bytes(this_device().memory_bytes)}")


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that a container is given; None without such a limit."""
    v2 = _words(cgroups / "cpu.max")
    v1 = _words(cgroups / "cpu/cpu.cfs_quota_us") + _words(cgroups / "cpu/cpu.cfs_period_us")
    for words in (v2, v1):
        if len(words) == 2 and words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def _noise() -> Finding:
    import psutil

    load, cores = os.getloadavg()[0], usable_cores()
    stolen = psutil.cpu_times_percent(interval=0.2).steal
    detail = f"load {load:.1f} on {cores} cores, {stolen:.0f} % stolen by other machines"
    if load > cores / 2 or stolen > 5:
        return Finding("noise", "warn", detail, "end other work, or trust only the confidence intervals")
    return Finding("noise", "ok", detail)


def _compiler() -> Finding:
    path = shutil.which("g++")
    if path is None:
        return Finding(
            "compiler", "warn", "no g++: compiled helpers stay unused", "install g++ (Debian: apt install g++)"
        )
    return Finding("compiler", "ok", path)


def _runs(runs: Path) -> Finding:
    from autotune.stores.slab import free_bytes

    existing = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = free_bytes(existing)
    detail = f"{runs}, {_room(free)}"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("runs", "bad", f"{detail}, not writable", f"make {existing} a writable directory")
    if free is not None and free < _ROOM_BYTES:
        return Finding("runs", "warn", detail, "free space: a run keeps its records and logs there")
    return Finding("runs", "ok", detail)


def _store(name: str, directory: Path) -> Finding:
    from autotune.stores import open_store
    from autotune.stores.slab import free_bytes

    title, free = f"store {name}", free_bytes(directory)
    with open_store(name, directory, {0: 1}) as store:
        direct, holds_memory = store.direct, store.holds_memory
    if holds_memory:
        cure = "on a CPU it saves nothing; name a directory on a disk with --store ssd=DIR"
        return Finding(title, "warn", f"{directory} lies in memory, {_room(free)}", cure)
    if free is not None and free < _ROOM_BYTES:
        return Finding(title, "warn", f"{directory}, {_room(free)}", "free space: a step may offload more than this")
    if not direct:
        cure = "transfers take more time and CPU; name a directory on a local disk (ext4, xfs)"
        return Finding(title, "warn", f"{directory} has no O_DIRECT, {_room(free)}", cure)
    return Finding(title, "ok", f"{directory}, O_DIRECT, {_room(free)}")


def _room(free: int | None) -> str:
    return "no limit" if free is None else f"{fmt_bytes(free)} free"


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]
