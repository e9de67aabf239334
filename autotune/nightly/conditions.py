"""Collect the conditions of a night that may explain a change of its measurements."""

from autotune.measure.device.conditions import MachineConditions
from autotune.nightly.diagnosis import Conditions
from autotune.records.device import Device


def collect_conditions(
    machine: MachineConditions, device: Device | None, graph_digest: str, *, baseline_seconds: float | None
) -> Conditions:
    """Return the versions, the device and the load of a night.

    Collect `machine` on the device's own machine, before the night starts its own work.
    """
    environment = {**machine.environment, "driver": device.driver if device else ""}
    silicon = {}
    if device is not None:
        silicon = {"silicon": device.silicon, "memory": str(device.memory_bytes), "cores": str(device.cores)}
    threads = device.environment if device is not None else {}
    code = {**machine.code, "graph": graph_digest[:12]}
    return Conditions(code, environment, silicon, machine.busy, machine.clock_mhz, baseline_seconds, threads)
