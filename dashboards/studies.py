"""One study: whether somebody works on it now, how far it is, and all that a page shows of it."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.records.measurement import Outcome
from autotune.records.run_dir import at_work
from autotune.records.trial import Trial
from autotune.report import html as report
from autotune.report import tables as table
from autotune.report.charts import Dot
from autotune.study.recorded_run import Records
from autotune.units import fmt_seconds, parse_seconds

COLUMNS = (
    "plan", "kind", "verdict", "charged MiB", "time", "step ms", "peak MiB", "predicted MiB",
    "order", "update", "recompute", "offload",
)  # fmt: skip
Cell = str | float | None


@dataclass(frozen=True, slots=True)
class Study:
    """What is recorded of it, ready to be shown."""

    records: Records
    headline: str
    story: str
    dots: tuple[Dot, ...]
    cost_label: str
    """What the dots' costs are."""
    rows: tuple[tuple[Cell, ...], ...]
    """Under `COLUMNS`, the last trial first."""
    failures: tuple[tuple[int, str, str], ...]
    """(trial, outcome, what the worker said)."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far it is."""

    words: str
    running: bool = False
    share: float | None = None
    """Of its trials or its time, whichever will end it first; None where it does not run."""


def read(run_dir: Path) -> Study:
    """Everything, made at once: what the records do not allow shows here and not in a page."""
    records = Records.load(run_dir)
    headline, story = report.words(records)
    failed = [trial for trial in records.trials if _failed(trial)]
    return Study(
        records,
        headline,
        story,
        tuple(report.dots(records)),
        report.cost_label(records),
        tuple(map(_cells, reversed(table.rows(records.trials, records.best)))),
        tuple((one.number, table.verdict(one), one.measurement.detail) for one in failed if one.measurement),
    )


def standing(run_dir: Path, trials: int, config: Mapping[str, Any]) -> Standing:
    """From the lock and what the last session wrote at its end; `trials`: how many are recorded."""
    counted = f"{trials} trial{'' if trials == 1 else 's'}"
    process = at_work(run_dir)
    if process is not None:
        used = max(0.0, time.time() - (run_dir / "lock").stat().st_mtime)
        limit, most = parse_seconds(str(config.get("time", "10m"))), config.get("trials")
        share = max(used / limit if limit else 0.0, trials / most if isinstance(most, int) and most else 0.0)
        of = f" of {most}" if most else ""
        told = f"running as process {process}: {counted}{of}, {fmt_seconds(math.floor(used))} of {config.get('time', '10m')}"
        return Standing(told, True, min(share, 1.0))
    ended = _ended(run_dir)
    if ended == 0:
        return Standing(f"ended after {counted}")
    why = "cut off" if ended is None else f"interrupted by signal {ended}"
    return Standing(f"{why} after {counted}; go on with: autotune resume {run_dir}")


def _ended(run_dir: Path) -> int | None:
    """The signal that ended the last session, 0 for none; None where it did not come to its end."""
    try:
        return int(json.loads((run_dir / "study.json").read_text())["interrupted"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cells(row: table.Row) -> tuple[Cell, ...]:
    seen, expected = row.trial.measurement, row.trial.estimate
    return (
        *row.cells[:2],
        row.cells[-1],
        _mib(seen.step_charged_bytes if seen else None),
        None if seen is None else seen.time_ratio,
        None if seen is None or seen.median_seconds is None else 1e3 * seen.median_seconds,
        _mib(seen.step_peak_bytes if seen else None),
        _mib(expected.peak_bytes if expected else None),
        *row.cells[2:6],
    )


def _mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def _failed(trial: Trial) -> bool:
    seen = trial.measurement
    return seen is not None and bool(seen.detail) and seen.outcome not in (Outcome.OK, Outcome.OVER_BUDGET)
