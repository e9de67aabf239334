"""What was asked of a device and what was seen on it."""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from autotune.errors import ConfigError
from autotune.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What the device may charge: absolute bytes, or a share of the baseline's step bytes above the floor."""

    text: str
    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """`65%` and `45.3%` are shares of the baseline's step bytes, `6GiB` and `123456B` the whole process."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
        if match is None:
            try:
                nbytes = parse_bytes(text)
            except ConfigError:
                raise ConfigError(f"cannot read {text!r} as a budget; write 65%, 6GiB, 512MiB or 123456B") from None
            if nbytes == 0:
                raise ConfigError(f"budget {text!r} is nothing; write 65% or 512MiB")
            return cls(text.strip(), nbytes=nbytes)
        share = float(match[1]) / 100
        if not 0 < share <= 10:
            raise ConfigError(f"budget {text!r} must lie above 0% and at most 1000% of the baseline's step bytes")
        return cls(text.strip(), share=share)

    def step_bytes(self, *, floor_bytes: int, baseline_step_bytes: int) -> int:
        """Bytes left for the training step itself once the process's floor is paid; may be negative."""
        if self.share is not None:
            return int(self.share * baseline_step_bytes)
        assert self.nbytes is not None
        return self.nbytes - floor_bytes


_NO_SILICON = re.compile(
    r"\((?:r|tm|c)\)|@.*|\b(?:cpu|processor|nvidia|pcie|sxm\d*|hbm\w*|\d+-core|[\d.]+ ?ghz)(?![\w])"
)
"""Of a silicon's name, in small letters: marks, the pace it was sold at, and the board that it sits on."""


@dataclass(frozen=True, slots=True)
class Device:
    """What makes two numbers comparable: the silicon, its memory, and the software that drives it."""

    kind: str
    """`cpu` or `cuda`."""
    silicon: str
    memory_bytes: int
    cores: int
    torch: str
    driver: str = ""

    @property
    def key(self) -> str:
        """Name of the silicon alone, fit for file names and experiment names: makers spell one chip in several ways."""
        name = self.silicon.lower()
        name = _NO_SILICON.sub(" ", name).strip() or name
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{name}-{self.cores}").strip("-")


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
    (`autotune.gates`) admits of that tensor: 0 if every bit agrees, above 1 refused. In records of earlier versions the
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
