"""The plan file: JSON that a training loop reads, with what it was made for and what it was seen to do."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.measurement import Device, Measurement
from autotune.plan import Plan
from autotune.records import from_json, write_whole
from autotune.simulate import Estimate
from autotune.trial import Settings

SCHEMA = 1


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
    schema: int = SCHEMA


def write(path: Path, file: PlanFile) -> None:
    """Write whole or not at all."""
    write_whole(path, file, what="plan")


def read(path: Path) -> PlanFile:
    """Read and validate; ConfigError names the file and the first thing wrong in it."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the plan ({error.strerror}); make one with autotune tune") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ConfigError(f"{path}: not a plan file: truncated or not JSON; make it again with autotune tune") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ConfigError(
            f"{path}: plan schema {found!r}; this version reads {SCHEMA}. Make the plan again with autotune tune"
        )
    return from_json(PlanFile, document, where=str(path))
