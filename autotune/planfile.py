"""The plan file: JSON that a training loop reads, with what it was made for and what it was seen to do."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.measurement import Device, Measurement
from autotune.plan import Plan
from autotune.records import read_whole, write_whole
from autotune.simulate import Estimate
from autotune.trial import Settings

SCHEMA = 1
NOT_VERIFIED = "not verified"
"""Verification of a plan whose results were never compared with eager's."""


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """How to make the workload again."""

    reference: str
    """A zoo name, `package.module:factory` or `path/file.py:factory`."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.reference}({arguments})"


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
