"""Inspect a device of a class without measuring on it: for `autotune doctor --fleet`."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.fleet.far_end import device_lock
from autotune.measure.device.conditions import measure_busy_share
from autotune.measure.device.this_device import cpu_name, open_nvml, usable_cores
from autotune.measure.meters.cgroup import OwnCgroup


@dataclass(frozen=True, slots=True)
class DeviceInspection:
    """Properties of a far end that decide whether its measurements can be trusted."""

    host: str
    nice: int
    oom_score_adj: int
    cpus: str
    device_name: str
    """Name of the chip; empty for a GPU whose driver does not answer."""
    memory_bytes: int
    cores: int | None
    """Physical cores of a CPU; None for a GPU, which must be opened to count its multiprocessors."""
    busy: float
    """Share of all cores that other processes use."""
    in_use: bool
    """True if another study measures on the device."""
    limits_memory: bool
    """True if the kernel can limit the memory of one process alone."""
    store_problems: dict[str, str] = field(default_factory=dict)
    """Reason why a store cannot be used, by the store's name."""


def inspect_device(kind: str, stores: Mapping[str, str], environment: Mapping[str, str]) -> DeviceInspection:
    """Return the properties of this machine's device and of this process, prepared as for a measurement.

    The variables of `environment` are set meanwhile: they may choose the GPU.
    """
    from autotune.fleet.node import prepare_process

    # the class of another device may be inspected in this process later
    before = {name: os.environ.get(name) for name in environment}
    try:
        prepare_process(environment)
        return _inspect(kind, stores)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _inspect(kind: str, stores: Mapping[str, str]) -> DeviceInspection:
    from autotune.fleet.node import read_node_facts

    facts = read_node_facts()
    name, memory = (
        (cpu_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if kind == "cpu" else _read_gpu()
    )
    return DeviceInspection(
        host=facts.host,
        nice=facts.nice,
        oom_score_adj=facts.oom_score_adj,
        cpus=facts.cpus,
        device_name=name,
        memory_bytes=memory,
        cores=usable_cores() if kind == "cpu" else None,
        busy=measure_busy_share(),
        in_use=device_lock.is_in_use(kind),
        limits_memory=_can_limit_memory(),
        store_problems={name: problem for name, place in stores.items() if (problem := _find_problem(Path(place)))},
    )


def _read_gpu() -> tuple[str, int]:
    with contextlib.suppress(Exception):  # containers make the library fail with many kinds of exceptions
        nvml = open_nvml()
        gpu = device_lock.find_visible_gpu()
        by_index = gpu.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else nvml.nvmlDeviceGetHandleByUUID(gpu)
        name = nvml.nvmlDeviceGetName(handle)
        name = name if isinstance(name, str) else name.decode()
        try:
            return name, int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError:  # as for a slice of a GPU in a container
            return name, 0
    return "", 0


def _can_limit_memory() -> bool:
    try:
        OwnCgroup(f"{os.getpid()}-doctor").remove()
    except OSError:
        return False
    return True


def _find_problem(directory: Path) -> str:
    if not directory.is_dir():
        return f"no directory {directory}"
    return "" if os.access(directory, os.W_OK | os.X_OK) else f"{directory} is read-only"
