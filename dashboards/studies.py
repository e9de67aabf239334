"""Read one study for its page: headline, chart points, rows, failures and progress."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.records.run_dir import RunDir, find_active_process, resume_command
from autotune.report import tables
from autotune.report.charts import TrialPoint
from autotune.report.run_charts import cost_label, trial_points
from autotune.report.summary import summarize_run
from autotune.study.recorded_run import RecordedRun, read_session_end
from autotune.units import fmt_seconds, parse_seconds

COLUMNS = (
    "plan", "kind", "verdict", "charged MiB", "time", "step ms", "peak MiB", "predicted MiB",
    "order", "update", "recompute", "offload",
)  # fmt: skip
DEFAULT_TIME = "10m"
"""Time limit of a study whose config names none."""
Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Study:
    """Contents of a study's page."""

    records: RecordedRun
    headline: str
    summary: str
    points: tuple[TrialPoint, ...]
    cost_label: str
    """Axis label of the points' costs."""
    rows: tuple[tuple[Cell, ...], ...]
    """Rows under `COLUMNS`, the last trial first."""
    confirmed: tuple[tuple[str, ...], ...]
    """Rows under `tables.CONFIRMED_COLUMNS`: eager, then the re-measured plans; empty before the confirmation, and for a front."""
    front: tuple[tuple[str, ...], ...]
    """Rows under `tables.FRONT_COLUMNS` of a study of the Pareto front; else empty."""
    failures: tuple[tuple[int, str, str], ...]
    """(trial, outcome, error message of the worker)."""


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Progress of a study."""

    text: str
    running: bool = False
    share: float | None = None
    """Used share of its trials or its time, whichever ends it first; None if it does not run, or if no limit is known."""


def read_study(run_dir: Path) -> Study:
    """Read a study completely, so that an unreadable record raises here and not inside the page."""
    records = RecordedRun.load(run_dir)
    headline, summary = summarize_run(records)
    return Study(
        records,
        headline,
        summary,
        tuple(trial_points(records)),
        cost_label(records),
        tuple(map(_cells, reversed(tables.trial_rows(records.trials, records.best)))),
        tuple(row.cells for row in tables.confirmed_rows(records.confirmed, records.baseline))
        if records.baseline is not None and not records.is_front
        else (),
        tuple(row.cells for row in tables.front_rows(records.front_plans, records.baseline)),
        tuple(
            (trial.number, tables.trial_verdict(trial), trial.measurement.detail)
            for trial in records.trials
            if trial.has_failed and trial.measurement and trial.measurement.detail
        ),
    )


def read_progress(run_dir: Path, trials: int, config: Mapping[str, Any]) -> StudyProgress:
    """Return the progress of a study with `trials` recorded trials, from its lock and the end of its last session."""
    count = f"{trials} trial{'' if trials == 1 else 's'}"
    process = find_active_process(run_dir)
    if process is not None:
        used = max(0.0, time.time() - RunDir(run_dir).lock.stat().st_mtime)
        time_limit = str(config.get("time", DEFAULT_TIME))
        limit, most = parse_seconds(time_limit), config.get("trials")
        # the config has the time limit of the first session; a resumed one may have a later limit
        timed = limit > 0.0 and used <= limit
        shares = [used / limit] if timed else []
        shares += [min(trials / most, 1.0)] if isinstance(most, int) and most else []
        of_most, of_time = f" of {most}" if most else "", f" of {time_limit}" if timed else ""
        text = f"running as process {process}: {count}{of_most}, {fmt_seconds(math.floor(used))}{of_time}"
        return StudyProgress(text, True, max(shares, default=None))
    signal = read_session_end(run_dir, trials).get("interrupted")
    if signal == 0:
        return StudyProgress(f"ended after {count}")
    reason = "cut off" if signal is None else f"interrupted by signal {signal}"
    return StudyProgress(f"{reason} after {count}; go on with: {resume_command(run_dir)}")


def _cells(row: tables.TrialRow) -> tuple[Cell, ...]:
    measurement, estimate = row.trial.measurement, row.trial.estimate
    seconds = measurement.median_seconds if measurement else None
    return (
        *row.cells[:2],
        row.cells[-1],
        _to_mib(measurement.step_charged_bytes if measurement else None),
        measurement.time_ratio if measurement else None,
        None if seconds is None else 1e3 * seconds,
        _to_mib(measurement.step_peak_bytes if measurement else None),
        _to_mib(estimate.peak_bytes if estimate else None),
        *row.cells[2:6],
    )


def _to_mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20
