"""The plan file: JSON that a training loop reads, with what it was made for and what it was seen to do."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.device import Device
from autotune.records.json_codec import read_whole, write_whole
from autotune.records.measurement import Measurement
from autotune.workloads.reference import WorkloadRef

SCHEMA = 1
NOT_VERIFIED = "not verified"
"""Verification of a plan whose results were never compared with eager's."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan with its provenance."""

    workload: WorkloadRef
    graph_digest: str
    budget: str
    budget_bytes: int
    """What the step itself may take: the budget less the floor."""
    floor_bytes: int
    settings: Settings
    plan: Plan
    estimate: Estimate
    device: Device | None = None
    measurement: Measurement | None = None
    verified: str = NOT_VERIFIED
    """How the plan's results were compared with eager's."""
    schema: int = SCHEMA


def write(path: Path, file: PlanFile, *, cure: str = "name another file with -o") -> None:
    """Write whole or not at all; ConfigError with the `cure`."""
    write_whole(path, file, what="plan", cure=cure)


def read(path: Path) -> PlanFile:
    """Read and validate; ConfigError names the file and the first thing wrong in it."""
    return read_whole(PlanFile, path, schema=SCHEMA, what="plan", again="make one with autotune tune")


class Captured(Protocol):
    """A workload, captured on a device."""

    @property
    def graph(self) -> TrainGraph: ...
    @property
    def device(self) -> Device: ...


def match_plan(path: Path, file: PlanFile, surveyed: Captured) -> None:
    """PlanError that names what differs, unless the plan was made for this graph on this kind of device."""
    graph, device = surveyed.graph, surveyed.device
    if file.device is not None and file.device.kind != device.kind:
        raise PlanError(
            f"{path}: made on {file.device.kind}, this is {device.kind}; tune here: autotune tune {file.workload}"
        )
    if file.graph_digest != graph.digest:
        ops = len(set(file.plan.order))
        what = (
            f"a graph of {ops} ops, this one has {len(graph.ops)}"
            if ops != len(graph.ops)
            else f"the same {ops} ops on other shapes, types or wiring"
        )
        raise PlanError(
            f"{path}: made for {what} (digest {file.graph_digest[:8]}, {graph.name} has {graph.digest[:8]}); "
            f"give the arguments that it was made with, or tune anew"
        )
    check(graph, file.plan)
    if file.device is not None and file.device.silicon != device.silicon:
        print(f"note: made on {file.device.silicon}, measured on {device.silicon}", file=sys.stderr, flush=True)
