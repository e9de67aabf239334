"""What was asked of a device and what was seen on it."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from autotune.records.device import Device
from autotune.units import fmt_bytes


class Outcome(StrEnum):
    """How a trial ended; everything but a fault of ours is one of these, not an exception."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    STOPPED_EARLY = "stopped_early"
    WRONG_RESULT = "wrong_result"
    CRASHED = "crashed"
    DISK_FULL = "disk_full"


Span = tuple[float, float]
"""(start, end), in seconds from the step's begin."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a step's lanes did."""

    seconds: float = 0.0
    """Of the whole step."""
    saves: tuple[Span, ...] = ()
    loads: tuple[Span, ...] = ()
    save_stalls: tuple[Span, ...] = ()
    """Execution waited at the bound, for memory that a write still held."""
    load_stalls: tuple[Span, ...] = ()
    """Execution waited for a value that it needed."""

    @property
    def stall_seconds(self) -> float:
        """Waited in all."""
        return busy(self.save_stalls) + busy(self.load_stalls)

    @property
    def hidden(self) -> float | None:
        """Part of the store's time that execution did not wait for; None where the store did nothing."""
        moving = busy(self.saves) + busy(self.loads)
        return 1 - min(1.0, self.stall_seconds / moving) if moving else None


def busy(lane: Iterable[Span]) -> float:
    """Seconds of all pieces of a lane."""
    return sum(end - start for start, end in lane)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One plan, run for real. Bytes of the whole process, as the meter saw them; None where it was not seen."""

    outcome: Outcome
    detail: str = ""
    """For people: the reason of a failure, with the last lines of the worker's error."""
    peak_bytes: int | None = None
    """Highest bytes of a warm step, the plan's own doing: every byte goes back as soon as it is free, by malloc or, where
    the plan names an arena, by the heap of the steps that an arena records."""
    charged_bytes: int | None = None
    """Highest bytes with the allocator as it is in production, an arena's first steps among them; a budget binds these."""
    floor_bytes: int | None = None
    """The same meter between steps less the tensors that live through a step: interpreter, libraries, context."""
    step_seconds: tuple[float, ...] = ()
    """Raw samples."""
    baseline_seconds: tuple[float, ...] = ()
    """Raw samples of plain eager steps, taken in turns with `step_seconds` in a process beside theirs; the baseline's own
    where that process ended."""
    stall_seconds: float | None = None
    """Of one step: waited for a store."""
    transfer_bytes: int | None = None
    """Of one step: really written to and read from the store."""
    lanes: Lanes | None = None
    """Of one step that offloads."""
    max_error: float | None = None
    """Largest error over results, gradients, parameters, state and buffers, each as a share of what the gate
    (`autotune.runtime.verification.gates`) admits of that tensor: 0 if every bit agrees, above 1 refused. In records of earlier versions the
    largest absolute difference."""
    verified: str = ""
    """How the results were compared with eager's; empty if they were not."""
    meter: str = ""
    limit: str = ""
    """What enforced a memory limit, if one was: `cgroup`, `rlimit (emulated)`, `fraction (emulated)`."""
    device: Device | None = None

    @property
    def step_peak_bytes(self) -> int | None:
        """Peak above the floor: what `Estimate.peak_bytes` predicts."""
        if self.peak_bytes is None or self.floor_bytes is None:
            return None
        return self.peak_bytes - self.floor_bytes

    @property
    def step_charged_bytes(self) -> int | None:
        """Charge above the floor."""
        if self.charged_bytes is None or self.floor_bytes is None:
            return None
        return self.charged_bytes - self.floor_bytes

    @property
    def median_seconds(self) -> float | None:
        """Median step time."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def time_ratio(self) -> float | None:
        """The median of each step over the baseline's of the same turn; None where the baseline did not run.

        A machine that others share changes its pace within minutes, but seldom within a turn. Where the two did not run
        as often, the ratio of their medians.
        """
        if not self.step_seconds or not self.baseline_seconds:
            return None
        if len(self.step_seconds) != len(self.baseline_seconds):
            return statistics.median(self.step_seconds) / statistics.median(self.baseline_seconds)
        return statistics.median(
            step / eager for step, eager in zip(self.step_seconds, self.baseline_seconds, strict=True)
        )


def held_to(measurement: Measurement, budget_bytes: int | None) -> Measurement:
    """The measurement, over budget if the step was charged more. Two processes differ by a little in what is no step's."""
    charged = measurement.step_charged_bytes
    if budget_bytes is None or charged is None or charged <= budget_bytes:
        return measurement
    detail = f"the step was charged {fmt_bytes(charged)} of a budget of {fmt_bytes(budget_bytes)}"
    return replace(measurement, outcome=Outcome.OVER_BUDGET, detail=detail)
