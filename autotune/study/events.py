"""What a study tells while it goes on: plain events, for a screen, a log or a tracker to make something of."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.records.device import Device
from autotune.records.trial import Trial


@dataclass(frozen=True, slots=True)
class Phase:
    """The study goes on to `prepare`, `baseline`, `smallest`, `seeds`, `planners`, `search` or `confirm`."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Graph, costs and device are known."""

    graph: TrainGraph
    costs: Costs
    device: Device


@dataclass(frozen=True, slots=True)
class Resolved:
    """The budget in bytes."""

    budget_bytes: int
    """What the step itself may take."""
    floor_bytes: int
    profile_ratio: float | None
    """Seconds that the profile's ops add up to, over the plain step's; None where that did not run. Far above 1 the profile
    was made beside other work, and so is off in what it predicts."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """A trial's plan is made, and about to be run: the next is heard when it has been, minutes later."""

    trial: Trial


@dataclass(frozen=True, slots=True)
class Finished:
    """A trial is on disk."""

    trial: Trial
    ratio: float | None
    """Step time over the baseline's; None where nothing ran to its end."""
    leads: bool
    """Its plan is the best so far, and was not before."""
    resumed: bool
    """An earlier session ran it."""


Event = Phase | Ready | Resolved | Measuring | Finished
Progress = Callable[[Event], None]
"""Called between measurements, never during one."""


def silent(event: Event) -> None:
    """Tell nobody."""
    del event
