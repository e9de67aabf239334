"""Define the measurement of a plan on a device: outcome, bytes, times and transfers."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from autotune.records.budget import tolerated_bytes
from autotune.records.device import Device
from autotune.records.machine_load import MachineLoad
from autotune.units import fmt_bytes


class Outcome(StrEnum):
    """End of a trial. Every failure of a plan is an outcome; only defects of this program are exceptions."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    STOPPED_EARLY = "stopped_early"
    WRONG_RESULT = "wrong_result"
    CRASHED = "crashed"
    DISK_FULL = "disk_full"

    @property
    def is_failure(self) -> bool:
        """True if the plan did not run as it should; a plan that is too large or too slow is no failure."""
        return self not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.STOPPED_EARLY)


Span = tuple[float, float]
"""Start and end in seconds from the begin of the step."""


KILLED = tuple(f"killed by {name}" for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"))
"""Beginnings of a crash's detail where a signal from outside ended the process; a segmentation fault is the step's own."""


@dataclass(frozen=True, slots=True)
class TransferTrace:
    """Transfers of one step, and the waits for them."""

    seconds: float = 0.0
    """Duration of the whole step."""
    saves: tuple[Span, ...] = ()
    """Writes to the store."""
    loads: tuple[Span, ...] = ()
    """Reads from the store."""
    save_stalls: tuple[Span, ...] = ()
    """Waits for memory that a write still occupied, at the memory limit."""
    load_stalls: tuple[Span, ...] = ()
    """Waits for a value that the next op reads."""

    @property
    def stall_seconds(self) -> float:
        """Total wait of the step."""
        return total_seconds(self.save_stalls) + total_seconds(self.load_stalls)

    @property
    def hidden(self) -> float | None:
        """Share of the transfer time that execution did not wait for; None without transfers."""
        moving = total_seconds(self.saves) + total_seconds(self.loads)
        return 1 - min(1.0, self.stall_seconds / moving) if moving else None


def total_seconds(spans: Iterable[Span]) -> float:
    """Return the summed seconds of spans.

    >>> total_seconds([(0.0, 1.0), (2.0, 4.0)])
    3.0
    """
    return sum(end - start for start, end in spans)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one plan. Bytes are of the whole process, by the meter; None where nothing was measured."""

    outcome: Outcome
    detail: str = ""
    """Reason of a failure for people, with the last lines of the worker's error."""
    peak_bytes: int | None = None
    """Peak bytes of a warm step where every freed byte returns to the system: the plan's own peak.

    Without an arena malloc returns the bytes; with one, the heap of the steps that the arena records.
    """
    charged_bytes: int | None = None
    """Peak bytes with the production allocator, first steps of an arena included; a budget limits these."""
    process_charged_bytes: tuple[int, ...] = ()
    """Charge of the same steps in each of several new processes, of the baseline only; the first is `charged_bytes`."""
    floor_bytes: int | None = None
    """Bytes between steps without the tensors that live through a step: interpreter, libraries, context."""
    step_seconds: tuple[float, ...] = ()
    """Seconds of each timed step."""
    baseline_seconds: tuple[float, ...] = ()
    """Raw samples of plain eager steps, taken in turns with `step_seconds` in a process beside theirs; the baseline's own
    where that process ended."""
    stall_seconds: float | None = None
    """Seconds of one step spent waiting for a store."""
    transfer_bytes: int | None = None
    """Bytes of one step written to and read from the store."""
    lanes: TransferTrace | None = None
    """Transfers of one step that offloads."""
    max_error: float | None = None
    """Largest error over results, gradients, parameters, state and buffers, each as a share of what the gate
    (`autotune.runtime.verification.gates`) admits of that tensor: 0 if every bit agrees, above 1 refused. In records of earlier versions the
    largest absolute difference."""
    verified: str = ""
    """Method of comparing the results with eager's; empty without a comparison."""
    meter: str = ""
    limit: str = ""
    """Mechanism of the memory limit, if there is one: `cgroup`, `rlimit (emulated)`, `fraction (emulated)`."""
    device: Device | None = None
    load: MachineLoad | None = None
    """Load of the machine beside the timed steps; None where it was not read."""
    disturbed: str = ""
    """Reason why other work disturbed the times; empty if nothing indicates it."""
    node: str = ""
    """Host that measured it through a fleet; empty for this machine."""
    lost_nodes: tuple[str, ...] = ()
    """Hosts that were lost while they measured the same plan before."""

    @property
    def was_killed(self) -> bool:
        """True if a signal from outside ended a process of the measurement, so that the plan may fit all the same."""
        return self.outcome is Outcome.CRASHED and self.detail.startswith(KILLED)

    @property
    def step_peak_bytes(self) -> int | None:
        """Peak above the floor, which `Estimate.peak_bytes` predicts."""
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
    def highest_bytes(self) -> int | None:
        """Highest bytes of the process: the charge, or the peak where a plan stopped before its charge was measured."""
        return self.peak_bytes if self.charged_bytes is None else self.charged_bytes

    @property
    def step_bytes(self) -> int | None:
        """Highest bytes above the floor."""
        if self.highest_bytes is None or self.floor_bytes is None:
            return None
        return self.highest_bytes - self.floor_bytes

    @property
    def time_cost(self) -> float | None:
        """Time ratio to the baseline, or the median seconds where the baseline did not run."""
        return self.median_seconds if self.time_ratio is None else self.time_ratio

    @property
    def median_seconds(self) -> float | None:
        """Median step time."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def time_ratio(self) -> float | None:
        """Median of each step's time over the baseline's of the same turn; None where the baseline did not run.

        A shared machine changes speed within minutes, but rarely within a turn. Where the two did not run the same
        number of steps, it is the ratio of their medians.
        """
        if not self.step_seconds or not self.baseline_seconds:
            return None
        if len(self.step_seconds) != len(self.baseline_seconds):
            return statistics.median(self.step_seconds) / statistics.median(self.baseline_seconds)
        return statistics.median(
            step / eager for step, eager in zip(self.step_seconds, self.baseline_seconds, strict=True)
        )


def apply_budget(measurement: Measurement, budget_bytes: int | None, tolerance: float = 0.0) -> Measurement:
    """Return the measurement, with the outcome OVER_BUDGET if the step's charge exceeds the budget and its tolerance.

    The step's charge counts, without the floor: floors differ a little from process to process.
    """
    charged = measurement.step_charged_bytes
    if budget_bytes is None or charged is None or charged <= tolerated_bytes(budget_bytes, tolerance):
        return measurement
    excess = charged - budget_bytes
    share = f" ({100 * excess / budget_bytes:.2g} %)" if budget_bytes > 0 else ""
    accepted = f"; {100 * tolerance:g} % is tolerated" if tolerance else ""
    detail = (
        f"the step was charged {fmt_bytes(charged)}, {excess:,} bytes{share} over the budget of "
        f"{fmt_bytes(budget_bytes)}{accepted}"
    )
    return replace(measurement, outcome=Outcome.OVER_BUDGET, detail=detail)
