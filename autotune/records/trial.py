"""Store trials as JSON lines, synced to disk before anything else reads them, so that a killed study loses none."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.ir.plan import Plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.json_codec import append_line, read_lines, to_json
from autotune.records.measurement import Measurement, Outcome

if TYPE_CHECKING:
    import pandas as pd


class TrialKind(StrEnum):
    """Origin of a trial's plan."""

    BASELINE = "baseline"
    """No plan: the user's step in plain PyTorch eager."""
    SMALLEST = "smallest"
    """Smallest plan that the planners make."""
    SEED = "seed"
    """Plan made from settings of another run."""
    PLANNER = "planner"
    """Plan that the planners choose for the budget by estimate."""
    SEARCH = "search"
    """Plan made from settings that the sampler chose."""
    MOVE = "move"
    """Plan near the leader's: a change of the plan itself, such as a dropped recomputation."""
    REPEAT = "repeat"
    """Plan measured before: the trial carries the earlier measurement and was not run."""
    LOWERED = "lowered"
    """Plan for fewer bytes, from the settings of a leading plan that missed the budget by little."""
    CONFIRM = "confirm"
    """One of the best plans, re-measured in new processes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: its settings and plan, the estimate and the measurement."""

    number: int
    kind: TrialKind
    workload: str
    graph_digest: str
    settings: Settings = field(default_factory=dict)
    plan: Plan | None = None
    """Plan of the trial; None for the baseline, which runs in plain eager."""
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    """Result of the run; None while the trial runs."""
    started: float = 0.0
    """Start in seconds since the epoch."""
    target_bytes: int | None = None
    """Peak bytes that the planners were asked to meet; the settings make the plan again with them. None where unknown."""
    parent: int | None = None
    """Number of the trial whose plan was changed to this one; None for a plan that the settings make."""
    move: str = ""
    """Description of that change; empty for a plan that the settings make."""

    @property
    def label(self) -> str:
        """Kind of the trial, for a move with the trial whose plan it changes: `planner`, `move of 4`."""
        return f"{self.kind} of {self.parent}" if self.kind is TrialKind.MOVE else self.kind.value

    @property
    def was_run(self) -> bool:
        """True if the plan ran on the device, rather than being rejected by estimate."""
        result = self.measurement
        return result is not None and (result.outcome is not Outcome.OVER_BUDGET or result.highest_bytes is not None)

    @property
    def has_failed(self) -> bool:
        """True if this trial's own run failed; a repeated plan was not run again."""
        result = self.measurement
        return result is not None and self.kind is not TrialKind.REPEAT and result.outcome.is_failure

    @property
    def step_bytes(self) -> int | None:
        """Measured bytes of the step, without the process's floor; None where nothing was measured."""
        return self.measurement.step_bytes if self.measurement is not None else None

    @property
    def step_charged_bytes(self) -> int | None:
        """Bytes charged for the step, without the process's floor; None where no charge was measured."""
        return self.measurement.step_charged_bytes if self.measurement is not None else None

    @property
    def time_cost(self) -> float | None:
        """Step time over the baseline's, else seconds where no baseline ran; None where no step was timed."""
        return self.measurement.time_cost if self.measurement is not None else None


def append_trial(path: Path, trial: Trial) -> None:
    """Append a trial and sync it; an incomplete last line, left by a crash, is removed first."""
    append_line(path, trial)


def load_trials(path: Path) -> list[Trial]:
    """Return the trials by number, the last record of each; an incomplete last line is skipped.

    Raises ConfigError for a bad line.
    """
    records = read_lines(Trial, path, remedy="restore the file or start a new run directory")
    trials = {trial.number: trial for trial in records}
    return [trials[number] for number in sorted(trials)]


def to_frame(trials: Iterable[Trial]) -> "pd.DataFrame":
    """Return a data frame with one row per trial: settings, estimate and measurement side by side."""
    import pandas as pd

    rows = []
    for trial in trials:
        row: dict[str, object] = {"number": trial.number, "kind": trial.kind.value, "workload": trial.workload}
        row |= {"parent": trial.parent, "move": trial.move}
        for kind, knobs in trial.settings.items():
            for knob, value in knobs.items():
                row[kind if knob == "planner" else f"{kind}.{knob}"] = value
        if trial.estimate is not None:
            row |= {f"estimate.{name}": value for name, value in to_json(trial.estimate).items()}
        if (result := trial.measurement) is not None:
            row |= {
                "outcome": result.outcome.value,
                "detail": result.detail,
                "peak_bytes": result.peak_bytes,
                "charged_bytes": result.charged_bytes,
                "floor_bytes": result.floor_bytes,
                "step_seconds": result.median_seconds,
                "time_ratio": result.time_ratio,
                "max_error": result.max_error,
                "disturbed": result.disturbed,
            }
        rows.append(row)
    return pd.DataFrame(rows)
