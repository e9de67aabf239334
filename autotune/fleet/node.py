"""Describe and prepare the far end's process, and check what its class promises."""

import os
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import DeviceRefusedError
from autotune.fleet.messages import DevicePromise, NodeFacts, code_identity
from autotune.records.device import Device
from autotune.records.speed_environment import AFFINITY, format_cpus, list_changes, speed_variables
from autotune.units import fmt_bytes

MEMORY_TOLERANCE = 0.05
"""Relative difference of a device's memory from its class that is accepted."""
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def prepare_process(environment: Mapping[str, str]) -> None:
    """Set the variables of the measuring processes, and undo what job systems do to theirs where that is allowed.

    Ray marks its workers as the kernel's first victims. Only a privileged process may take that back.
    """
    os.environ.update(environment)
    try:
        if int(_OOM_SCORE.read_text(encoding="utf-8")) > 0:
            _OOM_SCORE.write_text("0", encoding="utf-8")
    except (OSError, ValueError):
        return


def read_node_facts() -> NodeFacts:
    """Return the facts of this process and its machine."""
    try:
        score = int(_OOM_SCORE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        score = 0
    return NodeFacts(
        host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        pid=os.getpid(),
        code=code_identity(),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        oom_score_adj=score,
        cpus=format_cpus(os.sched_getaffinity(0)),
        environment=speed_variables(),
    )


def check_node(device_class: str, facts: NodeFacts) -> None:
    """Raise DeviceRefusedError for a far end whose times would not be those of an ordinary process."""
    if facts.nice > 0:
        raise DeviceRefusedError(
            f"{facts.host} of class {device_class}: measuring processes would run at nice {facts.nice}, which slows them "
            "beside any other work; start its job system at nice 0 (Ray: RAY_worker_niceness=0 ray start ...)"
        )


def check_promise(device_class: str, host: str, device: Device, promise: DevicePromise) -> None:
    """Raise DeviceRefusedError where a device is not what its class promises.

    >>> check_promise("a100", "n7", Device("cpu", "EPYC", 2**34, 8, "2.13.0"), DevicePromise("cpu", cores=16))
    Traceback (most recent call last):
    autotune.errors.DeviceRefusedError: n7 of class a100 has 8 cores, the class promises 16; take the node out of the class
    """
    remedy = "take the node out of the class"
    place = f"{host} of class {device_class}"
    if device.kind != promise.kind:
        raise DeviceRefusedError(f"{place} is a {device.kind} device, the class promises {promise.kind}; {remedy}")
    if promise.name and promise.name.lower() not in f"{device.silicon} {device.key}".lower():
        raise DeviceRefusedError(f"{place} is {device.silicon!r}, the class promises {promise.name!r}; {remedy}")
    memory = promise.memory_bytes
    if memory is not None and abs(device.memory_bytes - memory) > MEMORY_TOLERANCE * memory:
        has = fmt_bytes(device.memory_bytes)
        raise DeviceRefusedError(f"{place} has {has} of memory, the class promises {fmt_bytes(memory)}; {remedy}")
    if promise.cores is not None and device.cores != promise.cores:
        raise DeviceRefusedError(f"{place} has {device.cores} cores, the class promises {promise.cores}; {remedy}")


def check_same_device(
    device_class: str, host: str, device: Device, first: Device, class_file: Path | None = None
) -> None:
    """Raise DeviceRefusedError where a device of a class differs from the one that measured before.

    `class_file` records that device; it is None where the device measured in this session.
    """
    upgrade = "" if class_file is None else f"; after an upgrade of all nodes delete {class_file}"
    for name in ("kind", "silicon", "cores", "torch", "driver"):
        ours, theirs = getattr(device, name), getattr(first, name)
        if ours != theirs:
            raise DeviceRefusedError(
                f"{host} of class {device_class} has {name} {ours}, the class's first device has {theirs}, and "
                f"measurements of both cannot be compared; make the nodes equal, or make two classes{upgrade}"
            )
    changes = [each for each in list_changes(first.environment, device.environment) if not each.startswith(AFFINITY)]
    if changes:
        raise DeviceRefusedError(
            f"{host} of class {device_class} runs with other settings than the class's first device: {'; '.join(changes)}; "
            f"set them by `environment` of the class{upgrade}"
        )
    if abs(device.memory_bytes - first.memory_bytes) > MEMORY_TOLERANCE * first.memory_bytes:
        raise DeviceRefusedError(
            f"{host} of class {device_class} has {fmt_bytes(device.memory_bytes)} of memory, the class's first device has "
            f"{fmt_bytes(first.memory_bytes)}; make two classes{upgrade}"
        )
