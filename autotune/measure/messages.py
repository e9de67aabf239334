"""Messages between the coordinator and a child process: one dataclass for each request and each reply.

A message is one line of JSON with the name of its class. The first line that a child receives is its `Spec`.
"""

import json
import typing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from autotune import errors
from autotune.errors import AutotuneError
from autotune.ir.plan import Plan
from autotune.measure.spec import Spec
from autotune.measure.survey import WorkloadSurvey
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome, TransferTrace

UNMEASURED_STEPS = 2
"""Steps at the start of a block that are not measured. While other processes ran, this one returned its memory, and plain
eager's second step is still up to a fifth slower than those that follow."""
BLOCK_STEPS = 2
"""Measured steps of a block; the other processes run between blocks."""


class RoundingWitness(StrEnum):
    """Further runs of eager that bound its rounding error."""

    FLOAT64 = "float64"
    MOVED_0 = "moved 0"
    """From weights moved by one rounding."""
    MOVED_1 = "moved 1"
    """From weights moved by one rounding, the other way."""


ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class Expects(Generic[ReplyT_co]):
    """A request whose reply is a `ReplyT_co`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Reply without content."""


@dataclass(frozen=True, slots=True)
class SurveyRequest(Expects[WorkloadSurvey]):
    """Capture the step, profile its ops, measure the stores. Runs no step."""


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Bytes of one warm step."""

    peak_bytes: int
    floor_bytes: int
    """Bytes of the idle process, without the workload's tensors."""
    meter: str
    free_bytes: int | None = None
    """Bytes of the GPU that this process and others could still use together; None on a CPU."""


@dataclass(frozen=True, slots=True)
class EagerPeakRequest(Expects[MemoryPeak]):
    """Run plain eager steps, write their results to a directory, and measure the peak."""

    results: Path


@dataclass(frozen=True, slots=True)
class EagerResultsRequest(Expects[Done]):
    """Run plain eager steps and write their results to a directory, without a measurement."""

    results: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest error of a step's results against a reference."""

    max_error: float
    """Share of the bound that the gate admits; 0 if every bit agrees."""
    detail: str = ""
    """Name and error of the worst tensor; empty if every bit agrees."""


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """Results and bytes of a plan."""

    comparison: Comparison | None = None
    """None where nothing was compared."""
    memory: MemoryPeak | None = None
    """None where the error exceeds the tolerance."""


@dataclass(frozen=True, slots=True)
class PlanCheckRequest(Expects[PlanCheck]):
    """Compare a plan's results with those in a directory, then measure its peak."""

    plan: Plan
    reference: Path | None
    """None: compare nothing."""
    tolerance: float
    """Largest error for which the peak is measured."""


@dataclass(frozen=True, slots=True)
class TracedResultsRequest(Expects[Done]):
    """Run the graph as it was traced and write its results to a directory."""

    results: Path


@dataclass(frozen=True, slots=True)
class RegionComparison:
    """Comparison of compiled regions, one at a time."""

    step: Comparison
    """The step whose regions run their ops one by one, against eager."""
    regions: Comparison
    """The worst output of a compiled region, against float64 on the same inputs."""
    differs: str = ""
    """Difference of the step with compared regions to the traced step; empty if every bit agrees, or none was compared."""


@dataclass(frozen=True, slots=True)
class RegionsRequest(Expects[RegionComparison]):
    """Compare each compiled region of the traced step with float64, on the inputs that it has there."""

    plan: Plan
    reference: Path
    """Results of eager."""
    traced: Path | None
    """Results of the traced step; None: bits may differ between two runs."""


@dataclass(frozen=True, slots=True)
class WitnessRequest(Expects[Done]):
    """Run plain eager steps as a witness; write the results beside eager's."""

    reference: Path
    witness: RoundingWitness


@dataclass(frozen=True, slots=True)
class GateDescription:
    """Description of how tensors are compared."""

    text: str


@dataclass(frozen=True, slots=True)
class BoundsRequest(Expects[GateDescription]):
    """Derive the bound of each tensor from the witnesses beside eager's results."""

    reference: Path
    reasons: dict[str, str]
    """Reason why a witness is missing, by its name."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """First dimension of the first tensor of the batch."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchSizeRequest(Expects[BatchSize]):
    """Return the batch size of the workload."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Everything of a graph that a plan depends on; equal for two batch sizes unless the model inspects them."""

    text: str


@dataclass(frozen=True, slots=True)
class WiringRequest(Expects[Wiring]):
    """Return the wiring of the captured graph."""


@dataclass(frozen=True, slots=True)
class CompileRequest(Expects[Done]):
    """Compile the regions of the captured step, and those that write over an input in a plan in traced order."""


@dataclass(frozen=True, slots=True)
class TimingBegin:
    """Floor of a process that is ready to be timed."""

    floor_bytes: int = 0
    """Bytes of the idle process before the first step, without the workload's tensors; 0 for plain eager."""


@dataclass(frozen=True, slots=True)
class BeginTiming(Expects[TimingBegin]):
    """Make a plan ready to be timed in blocks; lay out its arena if it has one."""

    plan: Plan | None = None
    """None: plain eager steps."""
    rests: bool = True
    """True to return the memory until the first block: another process runs before it."""


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """Measured steps of one block."""

    seconds: tuple[float, ...]
    stalls: tuple[float, ...]
    """Seconds of each step in which execution waited for a store."""
    page_faults: tuple[int, ...]
    transfer_bytes: int
    lanes: TransferTrace | None
    """Transfers of the last step; None where the plan uses no store."""
    charged_bytes: int
    """Highest charge of all counted blocks so far; of this block alone where it does not count."""
    meter: str


@dataclass(frozen=True, slots=True)
class TimeBlock(Expects[TimedBlock]):
    """Time a few steps of the begun plan."""

    counts: bool = True
    """False where the block's charge includes a compiler."""
    rests: bool = True
    """Return the memory after the block, for other processes; the next block then runs unmeasured steps first."""


@dataclass(frozen=True, slots=True)
class TimingEnd:
    """Result of ended timing."""

    floor_bytes: int
    mismatch: str = ""
    """Name of a tensor that differs between arena and malloc; empty if none does, or none was compared."""


@dataclass(frozen=True, slots=True)
class FinishTiming(Expects[TimingEnd]):
    """End the timing and measure the floor."""

    verify: bool = True
    """Compare steps in an arena with the same steps on malloc."""


@dataclass(frozen=True, slots=True)
class StopTiming(Expects[Done]):
    """End the timing if it was begun."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Hash of each tensor that the last of a few steps from the initial state computes or leaves."""

    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class DigestsRequest(Expects[Digests]):
    """Run a few steps of a plan with its allocator and hash what they leave."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class TimedDigestsRequest(Expects[Digests]):
    """Run the begun plan to the step whose results `DigestsRequest` hashes, and hash what it leaves."""


@dataclass(frozen=True, slots=True)
class WorkProgress:
    """Progress of the running request; a child may send any number of them before its reply."""

    activity: str
    done: int = 0
    total: int = 0
    """Number of parts of the activity; 0 if it has none."""

    def __str__(self) -> str:
        return f"{self.activity}: {self.done} of {self.total}" if self.total else self.activity


def ignore_progress(progress: WorkProgress) -> None:
    """Discard the progress of a request."""
    del progress


@dataclass(frozen=True, slots=True)
class Failure:
    """Reply of a child whose request raised an exception."""

    outcome: Outcome
    detail: str
    error: str
    """Class name of the exception."""
    trace: str = ""
    """Traceback of the exception, which the coordinator shows under `-v`."""


Request = (
    SurveyRequest
    | EagerPeakRequest
    | EagerResultsRequest
    | PlanCheckRequest
    | TracedResultsRequest
    | RegionsRequest
    | WitnessRequest
    | BoundsRequest
    | BatchSizeRequest
    | WiringRequest
    | CompileRequest
    | BeginTiming
    | TimeBlock
    | FinishTiming
    | StopTiming
    | DigestsRequest
    | TimedDigestsRequest
)
Reply = (
    WorkloadSurvey
    | MemoryPeak
    | PlanCheck
    | RegionComparison
    | Done
    | GateDescription
    | BatchSize
    | Wiring
    | TimingBegin
    | TimedBlock
    | TimingEnd
    | Digests
    | WorkProgress
    | Failure
)
_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Spec, *typing.get_args(Request), *typing.get_args(Reply))
}


class Ask(Protocol):
    """A function that sends a request to one child process and returns the reply; it raises ChildError."""

    def __call__(self, request: Expects[ReplyT], /) -> ReplyT: ...


class ChildError(Exception):
    """A request that a child did not answer with a result; the coordinator turns it into an Outcome."""

    def __init__(self, outcome: Outcome, detail: str, error: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.error = error
        """Class name of the child's exception; empty if there was none."""

    def as_autotune_error(self) -> AutotuneError | None:
        """Return the error to raise in the coordinator if the child raised one of autotune's own, else None."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, AutotuneError) and self.outcome is Outcome.CRASHED:
            return kind(self.detail)
        return None

    def summary(self) -> str:
        """Return outcome and detail in one line."""
        text = self.detail if self.as_autotune_error() else f"{self.outcome}: {self.detail}"
        return text.splitlines()[0]


def record_failure(measurement: Measurement, error: ChildError) -> Measurement:
    """Record the outcome of a failed request; raise the child's error if it is one of autotune's own."""
    if (raised := error.as_autotune_error()) is not None:
        raise raised from error
    return replace(measurement, outcome=error.outcome, detail=error.detail)


def encode(message: Spec | Expects[Any] | Reply) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps({"type": type(message).__name__, "fields": to_json(message)}).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Decode one line of JSON to the message that was encoded; its class is `Spec` or a member of the two unions."""
    document = json.loads(line)
    name = document["type"]
    return from_json(_TYPES[name], document["fields"], where=f"message {name}")
