"""Collect the conditions of a night that may explain a change of its measurements."""

from autotune.measure.device.conditions import MachineConditions
from autotune.nightly.diagnosis import Conditions
from autotune.records.device import Device


def collect_conditions(
    machine: MachineConditions, device: Device | None, graph_digest: str, *, baseline_seconds: float | None
) -> Conditions:
    """Return the versions, the device and the load of a night.

    Collect `machine` on the device's own machine, before the night starts its own work. A workload that did not prepare
    has no `device` and an empty `graph_digest`; what they would name is left out.
    """
    environment, code = dict(machine.environment), dict(machine.code)
    silicon: dict[str, str] = {}
    threads: dict[str, str] = {}
    if device is not None:
        environment["driver"], threads = device.driver, device.environment
        silicon = {"silicon": device.silicon, "memory": str(device.memory_bytes), "cores": str(device.cores)}
    if graph_digest:
        code["graph"] = graph_digest[:12]
    return Conditions(code, environment, silicon, machine.busy, machine.clock_mhz, baseline_seconds, threads)
