"""Events of a running study: plain records for a screen, a log or a tracker."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.records.device import Device
from autotune.records.trial import Trial


class StudyPhase(StrEnum):
    """Phases of a study, in order."""

    PREPARE = "prepare"
    """Capture the step and profile its ops."""
    BASELINE = "baseline"
    """Measure the step in plain PyTorch eager."""
    SMALLEST = "smallest"
    """Make and measure the smallest plan."""
    SEEDS = "seeds"
    """Measure plans made from the settings of another run."""
    PLANNERS = "planners"
    """Measure the plans that the planners choose by estimate."""
    PRIORS = "priors"
    """Simulate many settings, which the sampler reads beside the measured trials."""
    SEARCH = "search"
    """Measure changes of the fastest plan, and plans made from settings that the sampler chooses."""
    CONFIRM = "confirm"
    """Re-measure the best plans in new processes."""


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """The study enters its next phase."""

    phase: StudyPhase


@dataclass(frozen=True, slots=True)
class Preparing:
    """Capture, profile or baseline is in progress."""

    activity: str
    """Activity with its counts: `profiling ops: 40 of 365`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Capture and profile are complete."""

    graph: TrainGraph
    costs: Costs
    device: Device


@dataclass(frozen=True, slots=True)
class Resolved:
    """The budget in bytes."""

    budget_bytes: int
    """Maximum charge of the step, without the floor."""
    floor_bytes: int
    profile_ratio: float | None
    """Sum of the profiled op seconds over the measured step's; None where the plain step did not run.

    Far above 1, other work disturbed the profile, and predicted times are too long.
    """


@dataclass(frozen=True, slots=True)
class Measuring:
    """A trial's plan starts to run. `Finished` follows when the trial ends, possibly minutes later.

    A search on several devices runs several trials, so their events interleave.
    """

    trial: Trial


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Other work disturbed the measurement of the running trial, which is repeated now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A trial ended and is on disk."""

    trial: Trial
    ratio: float | None
    """Step time over the baseline's; None where no step ran to its end."""
    leads: bool
    """True if its plan became the best so far."""
    resumed: bool
    """True if an earlier session ran the trial."""


@dataclass(frozen=True, slots=True)
class Logged:
    """The run was logged to a store beside its own records, or could not be; or a line about a batch size, a device or seeds."""

    message: str
    """Address of the logged run, or the reason for the failure and the next step."""
    store: str = "mlflow"
    """`mlflow`; `optuna` for a shared database of Optuna; `size` for the search for a batch size; `kernels` for their choice;
    `device` for a device of a fleet that is lost or not used; `seeds` for seeds that are not used."""


Event = PhaseStarted | Preparing | Ready | Resolved | Measuring | Disturbed | Finished | Logged
Progress = Callable[[Event], None]
"""Listener of a study; it is called between measurements, never during one. `Preparing` also comes during the profile."""


def ignore_event(event: Event) -> None:
    """Discard an event: the listener of a study without one."""
    del event
