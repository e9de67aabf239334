"""Trials as JSON lines: synced to disk before anyone is told, so that a killed study loses none."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.ir.plan import Plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate
from autotune.records.json_codec import append_line, read_lines, to_json
from autotune.records.measurement import Measurement

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate: what was decided, predicted and seen."""

    number: int
    kind: str
    """`baseline`, `smallest`, `seed` (settings from elsewhere), `planner` or `search`; `repeat` for a plan seen before, which carries that measurement
    and was not run; `confirm` for one of the best plans measured afresh."""
    workload: str
    graph_digest: str
    settings: Settings = field(default_factory=dict)
    plan: Plan | None = None
    """None for the baseline, which runs in plain eager."""
    estimate: Estimate | None = None
    measurement: Measurement | None = None
    """None while the trial runs."""
    started: float = 0.0
    """Seconds since the epoch."""


def append(path: Path, trial: Trial) -> None:
    """Add one line and sync it; a torn last line, left by a crash, is cut off first."""
    append_line(path, trial)


def load(path: Path) -> list[Trial]:
    """All whole lines, the last of each number; a torn last line is passed over."""
    found = read_lines(Trial, path, cure="restore the file or start a new run directory")
    trials = {trial.number: trial for trial in found}
    return [trials[number] for number in sorted(trials)]


def frame(trials: Iterable[Trial]) -> "pd.DataFrame":
    """One row a trial: settings, estimate and measurement side by side, for pandas and the dashboards."""
    import pandas as pd

    rows = []
    for trial in trials:
        row: dict[str, object] = {"number": trial.number, "kind": trial.kind, "workload": trial.workload}
        for kind, knobs in trial.settings.items():
            for knob, value in knobs.items():
                row[kind if knob == "planner" else f"{kind}.{knob}"] = value
        if trial.estimate is not None:
            row |= {f"estimate.{name}": value for name, value in to_json(trial.estimate).items()}
        if (seen := trial.measurement) is not None:
            row |= {
                "outcome": seen.outcome.value,
                "detail": seen.detail,
                "peak_bytes": seen.peak_bytes,
                "charged_bytes": seen.charged_bytes,
                "floor_bytes": seen.floor_bytes,
                "step_seconds": seen.median_seconds,
                "time_ratio": seen.time_ratio,
                "max_error": seen.max_error,
            }
        rows.append(row)
    return pd.DataFrame(rows)
