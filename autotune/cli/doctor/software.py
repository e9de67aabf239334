"""Python, torch, the compiler; and how much the same work varies, which a process of torch's own measures."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from autotune.cli.doctor.finding import Finding
from autotune.errors import ConfigError
from autotune.measure.device.profile import spread
from autotune.measure.device.this_device import usable_cores
from autotune.records.json_codec import from_json, to_json

_TORCH_FROM, _TORCH_BELOW = (2, 11), (2, 14)
_PATIENCE_SECONDS = 8.0
"""For torch to be imported and the noise to be measured: the rest takes one second more."""
_NOISE_SECONDS = 1.0
_NOISY = 0.1
"""Steps that vary by more need many turns before two plans can be told apart."""


@dataclass(frozen=True, slots=True)
class Torch:
    """What a process that imported torch says."""

    version: str
    cuda: str
    """That torch was built for; empty for none."""
    gpus: int
    gpu_meter: str
    """How the driver counts a process's memory; empty without a GPU."""
    noise_seconds: tuple[float, ...]


_ASK_TORCH = "from autotune.cli.doctor.software import tell; tell()"


def tell() -> None:
    """In the process that is asked: its answer on standard output."""
    import torch

    from autotune.measure.device.probe import bench, noise_seconds
    from autotune.measure.meters.nvml import NvmlMeter

    gpus, meter = torch.cuda.device_count(), ""
    if gpus:
        torch.zeros(1, device="cuda")  # the driver lists a process once it computes
        meter = NvmlMeter().name
    noise = noise_seconds(bench("cpu"), _NOISE_SECONDS)
    print(json.dumps(to_json(Torch(torch.__version__, torch.version.cuda or "", gpus, meter, noise))))


def ask_torch() -> Torch:
    """From a process of its own, which may crash instead of us."""
    again = "install it again: pip install 'torch>=2.11,<2.14'"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"torch was not imported and timed within {_PATIENCE_SECONDS:g} s; ask again, for files that are read for "
            f"the first time are slow, or end other work"
        ) from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit {asked.returncode}"])[-1]
        raise ConfigError(f"torch cannot be imported: {last}; {again}")
    return from_json(Torch, json.loads(asked.stdout.splitlines()[-1]), where="torch")


def python() -> Finding:
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def torch(asked: Torch) -> Finding:
    detail = f"{asked.version}, {f'CUDA {asked.cuda}' if asked.cuda else 'built for the CPU'}"
    major, minor = asked.version.split(".")[:2]
    if not _TORCH_FROM <= (int(major), int(minor)) < _TORCH_BELOW:
        return Finding("torch", "bad", detail, "install a version that is tried: pip install 'torch>=2.11,<2.14'")
    return Finding("torch", "ok", detail)


def noise(asked: Torch) -> Finding:
    import psutil

    load, cores, varies = os.getloadavg()[0], usable_cores(), spread(asked.noise_seconds)
    stolen = psutil.cpu_times_percent(interval=0.2).steal
    detail = (
        f"the same work varies by {100 * varies:.1f} %, load {load:.1f} on {cores} cores, "
        f"{stolen:.0f} % stolen by other machines"
    )
    if varies > _NOISY or load > cores / 2 or stolen > 5:
        cure = "end other work, or trust only the confidence intervals"
        if "OMP_WAIT_POLICY" not in os.environ and load > cores / 2:  # beside others a step took up to 20 times as long
            cure += "; OMP_WAIT_POLICY=PASSIVE keeps torch's threads from spinning against it"
        return Finding("noise", "warn", detail, cure)
    return Finding("noise", "ok", detail)


def compiler() -> Finding:
    path = shutil.which("g++")
    if path is None:
        return Finding(
            "compiler", "warn", "no g++: compiled helpers stay unused", "install g++ (Debian: apt install g++)"
        )
    return Finding("compiler", "ok", path)
