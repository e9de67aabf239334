"""Collect the conditions of a night that may explain a change of its measurements."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import distributions

from autotune.nightly.diagnosis import Conditions
from autotune.records.device import Device
from autotune.records.provenance import git_sha


def collect_conditions(
    device: Device | None, graph_digest: str, *, baseline_seconds: float | None, busy: float
) -> Conditions:
    """Return the versions, the device and the load of a night; measure `busy` before the night starts its own work."""
    packages = {package.name.lower(): package.version for package in distributions()}
    code = {
        "commit": git_sha()[:12],
        "uncommitted": hash_uncommitted(),
        "autotune": packages.pop("autotune", ""),
        "graph": graph_digest[:12],
    }
    environment = {
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "driver": device.driver if device else "",
        "libc": " ".join(platform.libc_ver()),
        **packages,
    }
    silicon = {}
    if device is not None:
        silicon = {"silicon": device.silicon, "memory": str(device.memory_bytes), "cores": str(device.cores)}
    threads = device.environment if device is not None else {}
    return Conditions(code, environment, silicon, busy, read_clock_mhz(), baseline_seconds, threads)


def measure_busy_share() -> float:
    """Return the share of all cores in use, measured over a second in which this process sleeps."""
    import psutil

    return float(psutil.cpu_percent(interval=1.0)) / 100


def read_clock_mhz() -> float | None:
    """Return the mean clock of the cores in MHz; None where the machine does not report it, as most virtual ones."""
    import psutil

    clock = psutil.cpu_freq()
    return float(clock.current) if clock is not None and clock.current else None


def hash_uncommitted() -> str:
    """Return eight hex digits of the uncommitted changes; empty without changes or without a repository."""
    try:
        diff = subprocess.run(["git", "diff", "HEAD"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return hashlib.sha256(diff.stdout).hexdigest()[:8] if diff.returncode == 0 and diff.stdout else ""
