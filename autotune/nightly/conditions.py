"""What a night runs on, as far as it may explain a change of the numbers."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import distributions

from autotune.nightly.diagnosis import Conditions
from autotune.records.device import Device
from autotune.records.provenance import git_sha


def conditions(device: Device | None, graph_digest: str, *, baseline_seconds: float | None, busy: float) -> Conditions:
    """Everything that is recorded of a night; `busy` was looked at before anything of ours ran."""
    packages = {found.name.lower(): found.version for found in distributions()}
    code = {
        "commit": git_sha()[:12],
        "uncommitted": uncommitted(),
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
    return Conditions(code, environment, silicon, busy, clock_mhz(), baseline_seconds)


def busy_share() -> float:
    """Share of all cores that is taken now, over a second in which this process rests."""
    import psutil

    return float(psutil.cpu_percent(interval=1.0)) / 100


def clock_mhz() -> float | None:
    """Of the cores, on average; None where the machine does not tell, as most virtual ones."""
    import psutil

    clock = psutil.cpu_freq()
    return float(clock.current) if clock is not None and clock.current else None


def uncommitted() -> str:
    """Eight letters that change with any uncommitted change; empty where there is none, or no repository."""
    try:
        made = subprocess.run(["git", "diff", "HEAD"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return hashlib.sha256(made.stdout).hexdigest()[:8] if made.returncode == 0 and made.stdout else ""
