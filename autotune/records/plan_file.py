"""Read and write plan files: JSON with a plan, its workload and device, its estimate and its measurement."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from autotune.errors import CaptureError, ConfigError, PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.graph_summary import GraphSummary, describe_differences, summarize_graph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.budget import Budget, tolerated_bytes
from autotune.records.device import Device
from autotune.records.json_codec import from_json, parse_json, read_whole, write_whole
from autotune.records.measurement import Measurement
from autotune.records.run_dir import RunDir
from autotune.records.speed_environment import list_changes
from autotune.workloads.reference import WorkloadRef

T = TypeVar("T")

SCHEMA = 1
NOT_VERIFIED = "not verified"
"""Verification text of a plan whose results were never compared with eager's."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Plan with its provenance."""

    workload: WorkloadRef
    graph_digest: str
    budget: str
    budget_bytes: int
    """Budget of the step: the budget without the floor."""
    floor_bytes: int
    settings: Settings
    plan: Plan
    estimate: Estimate
    device: Device | None = None
    measurement: Measurement | None = None
    verified: str = NOT_VERIFIED
    """Method of comparing the plan's results with eager's."""
    run: str = ""
    """Run directory of the study, relative to the directory of plans; empty for a plan made without a study."""
    loop: str = ""
    """Training loop that the plan was made for, such as `clip,accumulate=4`; empty for updates at once."""
    target_bytes: int | None = None
    """Peak bytes that the planners were asked to meet; the settings make the plan again with them. None where unknown."""
    move: str = ""
    """Last change of the plan that `settings` make; empty where they make the plan itself."""
    summary: GraphSummary | None = None
    """Counts and bytes of the graph that the plan was made for; None in files of older versions."""
    schema: int = SCHEMA

    @property
    def accepted_bytes(self) -> int:
        """Highest charge of the step that is within the budget and its tolerance."""
        return tolerated_bytes(self.budget_bytes, Budget.parse(self.budget).tolerance)


def write(path: Path, file: PlanFile, *, remedy: str = "name another file with -o") -> None:
    """Write a plan file in one step; ConfigError with the text `remedy` where that fails."""
    write_whole(path, file, what="plan", remedy=remedy)


def read(path: Path) -> PlanFile:
    """Read and validate a plan file; ConfigError names the file and the first error in it."""
    if path.is_dir() and RunDir(path).plan.exists():
        raise ConfigError(f"{path}: a run, not a plan file; name its plan: {RunDir(path).plan}")
    return read_whole(PlanFile, path, schema=SCHEMA, what="plan", again="make one with autotune tune")


class Captured(Protocol):
    """Captured workload on a device."""

    @property
    def graph(self) -> TrainGraph: ...
    @property
    def device(self) -> Device: ...


def match_plan(path: Path, file: PlanFile, surveyed: Captured) -> None:
    """Raise PlanError that names the difference, unless the plan was made for this graph on this kind of device.

    Another chip of the same kind, and other settings of threads, print a note only.
    """
    graph, device = surveyed.graph, surveyed.device
    if file.device is not None and file.device.kind != device.kind:
        settings = [part for key, value in file.workload.arguments.items() for part in ("--set", f"{key}={value}")]
        command = shlex.join(["autotune", "tune", file.workload.reference, *settings])
        raise PlanError(f"{path}: made on {file.device.kind}, this is {device.kind}; tune here: {command}")
    if file.graph_digest != graph.digest:
        raise PlanError(
            f"{path}: made for another graph (digest {file.graph_digest[:8]}, {graph.name} has {graph.digest[:8]}): "
            f"{describe_other_graph(file, graph)}; use the arguments of the plan, or tune again"
        )
    check(graph, file.plan)
    try:
        lower(graph, file.plan)
    except PlanError as error:  # the digest leaves out layers, which set the times of transfers
        raise PlanError(f"{path}: made for another graph, whose layers differ: {error}; tune again") from error
    if file.device is None:
        return
    if file.device.silicon != device.silicon:
        print(f"note: made on {file.device.silicon}, measured on {device.silicon}", file=sys.stderr, flush=True)
    for change in list_changes(file.device.environment, device.environment):
        print(f"note: {change}; times differ from the recorded ones", file=sys.stderr, flush=True)


def describe_other_graph(file: PlanFile, graph: TrainGraph) -> str:
    """Name what differs between the graph that a plan was made for and another one."""
    if file.summary is not None:
        return describe_differences(file.summary, summarize_graph(graph))
    ops = len(set(file.plan.order))
    return (
        f"{len(graph.ops)} ops instead of {ops}"
        if ops != len(graph.ops)
        else f"the same {ops} ops on other shapes, types or wiring"
    )


def refer_to_run(run_dir: Path, directory: Path) -> str:
    """Return the path of a run directory as seen from the directory of a plan file, for its field `run`."""
    # the system follows a link before it goes up from there
    return os.path.relpath(os.path.realpath(run_dir), os.path.realpath(directory))


def find_records(path: Path, file: PlanFile) -> tuple[TrainGraph | None, Costs | None]:
    """Return the graph and the measured costs of a plan file, from its run directory; None for what is not there.

    The run directory is the file's own, the one that it names, or for an old plan `../runs/NAME` of a plan `NAME.json`.

    Raises PlanError where the plan is no plan of the graph, as after a change of the file.
    """
    places = (
        [path.parent, path.parent / file.run] if file.run else [path.parent, path.parent.parent / "runs" / path.stem]
    )
    for files in map(RunDir, places):
        graph = _read_record(files.graph, TrainGraph)
        if graph is not None and graph.digest == file.graph_digest:
            try:
                check(graph, file.plan)
            except PlanError as error:
                raise PlanError(f"{path}: {error}; make the plan again with autotune tune") from error
            costs = _read_record(files.costs, Costs)
            return graph, costs if costs is not None and costs.matches(graph) else None
    return None, None


def read_records(path: Path, file: PlanFile) -> tuple[TrainGraph, Costs]:
    """Return the graph and the measured costs of a plan file; ConfigError where its run directory has none."""
    graph, costs = find_records(path, file)
    if graph is None or costs is None:
        missing = f"{path}: its graph.json and costs.json are not beside it"
        if not file.run:
            raise ConfigError(
                f"{missing}: it names no run of a study, which records them; make a plan with autotune tune"
            )
        raise ConfigError(f"{missing} or in {path.parent / file.run}; name the plan.json of its run directory")
    return graph, costs


def _read_record(path: Path, kind: type[T]) -> T | None:
    try:
        return from_json(kind, parse_json(path.read_bytes()), where=str(path))
    except (OSError, ValueError, ConfigError, CaptureError):
        return None
