"""Checks of Python, torch, the compiler and the noise of timings; a separate process imports torch."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from autotune.cli.doctor.check_result import CheckResult
from autotune.errors import ConfigError
from autotune.measure.device.profile import spread
from autotune.measure.device.this_device import usable_cores
from autotune.records.json_codec import from_json, to_json
from autotune.records.speed_environment import advise_passive_waiting

_TORCH_FROM, _TORCH_BELOW = (2, 12), (2, 14)
_TIME_LIMIT_SECONDS = 8.0
"""Time limit for importing torch and measuring the noise; all other checks take one second."""
_NOISE_SECONDS = 1.0
_NOISY = 0.1
"""Relative variation above which many samples are needed to separate two plans."""


@dataclass(frozen=True, slots=True)
class TorchInfo:
    """Facts that a process with torch reports."""

    version: str
    cuda: str
    """CUDA version that torch was built for; empty for none."""
    gpus: int
    gpu_meter: str
    """Meter of a process's GPU memory; empty without a GPU."""
    noise_seconds: tuple[float, ...]


_QUERY = "from autotune.cli.doctor.software import print_torch; print_torch()"


def print_torch() -> None:
    """Print this process's `TorchInfo` as JSON on standard output."""
    import torch

    from autotune.measure.device.probe import device_timer, noise_seconds
    from autotune.measure.meters.nvml import NvmlMeter

    gpus, meter = torch.cuda.device_count(), ""
    if gpus:
        with contextlib.suppress(torch.OutOfMemoryError):  # the check of its processes says who uses it
            torch.zeros(1, device="cuda")  # the driver lists a process once it computes
            meter = NvmlMeter().name
    noise = noise_seconds(device_timer("cpu"), _NOISE_SECONDS)
    print(json.dumps(to_json(TorchInfo(torch.__version__, torch.version.cuda or "", gpus, meter, noise))))


def query_torch() -> TorchInfo:
    """Return the facts about torch, from a separate process, since a broken installation may crash it.

    Raises TimeoutError or ConfigError.
    """
    reinstall = "install it again: pip install 'torch>=2.12,<2.14'"
    try:
        query = subprocess.run(
            [sys.executable, "-P", "-c", _QUERY],
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"torch was not imported and timed within {_TIME_LIMIT_SECONDS:g} s; run again, as the first read of "
            f"its files is slow, or end other processes"
        ) from None
    if query.returncode:
        last = (query.stderr.strip().splitlines() or [f"exit {query.returncode}"])[-1]
        raise ConfigError(f"torch cannot be imported: {last}; {reinstall}")
    return from_json(TorchInfo, json.loads(query.stdout.splitlines()[-1]), where="torch")


def check_python() -> CheckResult:
    return CheckResult("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def check_torch(info: TorchInfo) -> CheckResult:
    detail = f"{info.version}, {f'CUDA {info.cuda}' if info.cuda else 'built for the CPU'}"
    major, minor = info.version.split(".")[:2]
    if not _TORCH_FROM <= (int(major), int(minor)) < _TORCH_BELOW:
        return CheckResult("torch", "bad", detail, "install a supported version: pip install 'torch>=2.12,<2.14'")
    return CheckResult("torch", "ok", detail)


def check_noise(info: TorchInfo) -> CheckResult:
    import psutil

    load, cores, varies = os.getloadavg()[0], usable_cores(), spread(info.noise_seconds)
    stolen = psutil.cpu_times_percent(interval=0.2).steal
    detail = (
        f"repeated work varies by {100 * varies:.1f} %, load {load:.1f} on {cores} cores, "
        f"{stolen:.0f} % stolen by other virtual machines"
    )
    if varies > _NOISY or load > cores / 2 or stolen > 5:
        fix = "end other processes, or rely on the confidence intervals only"
        if load > cores / 2 and (advice := advise_passive_waiting()):
            fix += f"; {advice}"
        return CheckResult("noise", "warn", detail, fix)
    return CheckResult("noise", "ok", detail)


def check_compiler() -> CheckResult:
    path = shutil.which("g++")
    if path is None:
        return CheckResult(
            "compiler",
            "warn",
            "no g++: no arena, so plans need more memory; planning is slower; --kernels inductor cannot run",
            "install g++ (Debian: apt install g++)",
        )
    return CheckResult("compiler", "ok", path)
