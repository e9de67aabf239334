"""Checks of memory and processors through the kernel's files. `root` replaces `/` in tests."""

import os
from pathlib import Path

from autotune.cli.doctor.check_result import CheckResult
from autotune.measure.device.this_device import cpu_name, cpu_quota, this_device, usable_cores
from autotune.measure.meters.cgroup import Cgroup, OwnCgroup
from autotune.units import fmt_bytes

_ROOT = Path("/")
_NEGLIGIBLE_SWAP = 2**20
_SLOW_GOVERNORS = {"powersave", "conservative", "userspace"}
"""Governors that do not raise the clock at once under load."""
_FAST_DRIVERS = ("intel_pstate", "amd-pstate")
"""Drivers whose `powersave` governor raises the clock at once."""


def check_cgroup() -> CheckResult:
    home = Cgroup.current()
    where = "no memory cgroup" if home is None else f"cgroup v{home.version} at {home.path}"
    try:
        OwnCgroup(f"{os.getpid()}-doctor").remove()
    except OSError as error:
        fix = "limits are emulated with RLIMIT_DATA; for kernel limits run under: systemd-run --user --scope -p Delegate=yes"
        return CheckResult("memory", "warn", f"{where}, not writable ({error.strerror or error})", fix)
    return CheckResult("memory", "ok", f"{where}, writable: the kernel can meter and limit one process alone")


def check_free_memory(root: Path = _ROOT) -> CheckResult:
    meminfo = _meminfo(root)
    home = Cgroup.current(root)
    tightest = home.tightest_limit() if home is not None else None
    total, free = meminfo["MemTotal"], meminfo["MemAvailable"]
    detail = f"{fmt_bytes(free)} of {fmt_bytes(total)}"
    if tightest is not None and tightest[1] < total:
        total, free = tightest[1], min(free, tightest[0])
        detail = f"{fmt_bytes(free)} of {fmt_bytes(total)}, the limit of the cgroup"
    if free < total / 4:
        return CheckResult("free memory", "warn", detail, "end other processes: even eager steps may not fit")
    return CheckResult("free memory", "ok", detail)


def check_swap(root: Path = _ROOT) -> CheckResult:
    meminfo = _meminfo(root)
    total, used = meminfo["SwapTotal"], meminfo["SwapTotal"] - meminfo["SwapFree"]
    if used > _NEGLIGIBLE_SWAP:
        fix = "swapped memory is not charged and slow to read; end other processes, then swapoff -a"
        return CheckResult("swap", "warn", f"{fmt_bytes(used)} of {fmt_bytes(total)} in use", fix)
    return CheckResult(
        "swap", "ok", f"{fmt_bytes(total)}, not in use" if total else "none: a step that does not fit fails at once"
    )


def check_huge_pages(root: Path = _ROOT) -> CheckResult:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    mode = next((word.strip("[]") for word in _text(path).split() if word.startswith("[")), "")
    if mode == "always":
        fix = f"small tensors of plain eager are charged 2 MiB each; echo madvise > {path}"
        return CheckResult("huge pages", "warn", mode, fix)
    return CheckResult("huge pages", "ok", mode or "unknown")


def check_cores() -> CheckResult:
    count, quota = usable_cores(), cpu_quota()
    if quota is not None and quota < count:
        detail = f"{count} cores, limited to {quota:g} by a quota"
        return CheckResult("cores", "warn", detail, f"set OMP_NUM_THREADS={max(1, int(quota))}, or lift the quota")
    return CheckResult("cores", "ok", f"{count} of {cpu_name()}, {fmt_bytes(this_device().memory_bytes)}")


def check_clock(root: Path = _ROOT) -> CheckResult:
    cpus = root / "sys/devices/system/cpu"
    governors = sorted({_text(path) for path in cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")})
    if not governors:
        return CheckResult("clock", "ok", "unknown: controlled by the host, or fixed")
    driver = _text(cpus / "cpu0/cpufreq/scaling_driver")
    detail = f"governor {', '.join(governors)}{_turbo(cpus)}"
    if _SLOW_GOVERNORS.intersection(governors) and not driver.startswith(_FAST_DRIVERS):
        fix = "the clock varies between measurements; cpupower frequency-set -g performance"
        return CheckResult("clock", "warn", detail, fix)
    return CheckResult("clock", "ok", detail)


def _turbo(cpus: Path) -> str:
    no_turbo, boost = _text(cpus / "intel_pstate/no_turbo"), _text(cpus / "cpufreq/boost")
    if not no_turbo and not boost:
        return ""
    return ", turbo on: slower once it is hot" if "0" in no_turbo or "1" in boost else ", turbo off"


def _meminfo(root: Path) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    rows = (line.partition(":") for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines())
    return {name: 1024 * int(text.split()[0]) for name, _, text in rows}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
