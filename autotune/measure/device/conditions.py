"""Collect the conditions of this machine that may explain a change of its measurements."""

import contextlib
import hashlib
import os
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import distributions

from autotune.errors import DISTRIBUTION
from autotune.records.provenance import git_sha


@dataclass(frozen=True, slots=True)
class MachineConditions:
    """Software and load of the machine that measures, which need not be the one that runs the study."""

    host: str = ""
    code: dict[str, str] = field(default_factory=dict)
    """Commit and uncommitted changes of the working directory, and the version of autotune."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions of kernel, Python, C library and packages."""
    busy: float = 0.0
    """Share of all cores that other processes used."""
    clock_mhz: float | None = None


def collect_machine_conditions() -> MachineConditions:
    """Return the conditions of this machine; takes a second in which this process sleeps, to measure the load."""
    packages: dict[str, str] = {}
    for package in distributions():  # the first of a name is the one that Python imports
        with contextlib.suppress(LookupError, OSError, TypeError):  # an interrupted installation leaves no metadata
            name: str | None = package.metadata["Name"]
            if name and package.version:
                packages.setdefault(name.lower(), package.version)
    code = {"commit": git_sha()[:12], "uncommitted": hash_uncommitted(), "autotune": packages.pop(DISTRIBUTION, "")}
    environment = {
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        **packages,
    }
    return MachineConditions(os.uname().nodename, code, environment, measure_busy_share(), read_clock_mhz())


def measure_busy_share() -> float:
    """Return the share of all cores in use, measured over a second in which this process sleeps."""
    import psutil

    return float(psutil.cpu_percent(interval=1.0)) / 100


def read_clock_mhz() -> float | None:
    """Return the mean clock of the cores in MHz; None where the machine does not report it, as most virtual ones."""
    import psutil

    try:
        cores = psutil.cpu_freq(percpu=True)
    except (NotImplementedError, OSError, ValueError):  # a group of cores that is switched off
        return None
    clocks = [float(core.current) for core in cores if core.current]  # a core that is switched off has 0
    return statistics.fmean(clocks) if clocks else None


def hash_uncommitted() -> str:
    """Return eight hex digits of the uncommitted changes; empty without changes or without a repository."""
    try:
        diff = subprocess.run(["git", "diff", "HEAD"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return hashlib.sha256(diff.stdout).hexdigest()[:8] if diff.returncode == 0 and diff.stdout else ""
