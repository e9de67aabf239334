"""What the kernel says of memory and processors. `root` stands for `/`."""

import os
from pathlib import Path

from autotune.cli.doctor.finding import Finding
from autotune.measure.device.this_device import cpu_name, cpu_quota, this_device, usable_cores
from autotune.measure.meters.cgroup import Cgroup, OwnCgroup
from autotune.units import fmt_bytes

_ROOT = Path("/")
_NEGLIGIBLE_SWAP = 2**20
_KEPT_LOW = {"powersave", "conservative", "userspace"}
"""Governors that do not go to the highest clock at once when there is work."""
_OWN_PACE = ("intel_pstate", "amd-pstate")
"""Drivers whose `powersave` does."""


def cgroup() -> Finding:
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


def free_memory(root: Path = _ROOT) -> Finding:
    seen = _meminfo(root)
    home = Cgroup.current(root)
    limit = home.limit_bytes() if home is not None else None
    whole, free = seen["MemTotal"], seen["MemAvailable"]
    detail = f"{fmt_bytes(free)} of {fmt_bytes(whole)}"
    if home is not None and limit is not None and limit < whole:
        whole, free = limit, min(free, max(0, limit - home.usage_bytes()))
        detail = f"{fmt_bytes(free)} of {fmt_bytes(limit)}, which the cgroup gives"
    if free < whole / 4:
        return Finding("free memory", "warn", detail, "end other work: even plain steps may not fit")
    return Finding("free memory", "ok", detail)


def swap(root: Path = _ROOT) -> Finding:
    seen = _meminfo(root)
    whole, used = seen["SwapTotal"], seen["SwapTotal"] - seen["SwapFree"]
    if used > _NEGLIGIBLE_SWAP:
        cure = "what lies there is charged to nobody and slow to come back; end other work, then swapoff -a"
        return Finding("swap", "warn", f"{fmt_bytes(used)} of {fmt_bytes(whole)} in use", cure)
    return Finding(
        "swap", "ok", f"{fmt_bytes(whole)}, not in use" if whole else "none: what does not fit is told at once"
    )


def huge_pages(root: Path = _ROOT) -> Finding:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    mode = next((word.strip("[]") for word in _text(path).split() if word.startswith("[")), "")
    if mode == "always":
        cure = f"small tensors of plain eager are charged 2 MiB at once; echo madvise > {path}"
        return Finding("huge pages", "warn", mode, cure)
    return Finding("huge pages", "ok", mode or "not told")


def cores() -> Finding:
    count, quota = usable_cores(), cpu_quota()
    if quota is not None and quota < count:
        detail = f"{count} cores, of which a quota gives {quota:g}"
        return Finding("cores", "warn", detail, f"set OMP_NUM_THREADS={max(1, int(quota))}, or lift the quota")
    return Finding("cores", "ok", f"{count} of {cpu_name()}, {fmt_bytes(this_device().memory_bytes)}")


def clock(root: Path = _ROOT) -> Finding:
    cpus = root / "sys/devices/system/cpu"
    governors = sorted({_text(path) for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")})
    if not governors:
        return Finding("clock", "ok", "not told: it is the host's, or fixed")
    driver = _text(cpus / "cpu0/cpufreq/scaling_driver")
    detail = f"governor {', '.join(governors)}{_turbo(cpus)}"
    if _KEPT_LOW.intersection(governors) and not driver.startswith(_OWN_PACE):
        cure = "steps are timed at whatever clock it chose; cpupower frequency-set -g performance"
        return Finding("clock", "warn", detail, cure)
    return Finding("clock", "ok", detail)


def _turbo(cpus: Path) -> str:
    no_turbo, boost = _text(cpus / "intel_pstate/no_turbo"), _text(cpus / "cpufreq/boost")
    if not no_turbo and not boost:
        return ""
    return ", turbo on: slower once it is hot" if "0" in no_turbo or "1" in boost else ", turbo off"


def _meminfo(root: Path) -> dict[str, int]:
    """In bytes."""
    rows = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return {name: 1024 * int(text.split()[0]) for name, _, text in rows}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
