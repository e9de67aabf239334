"""Write the verified front of a run: a table as JSON and CSV, and one plan file per point."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.predict.simulate import peak_bytes
from autotune.records import plan_file as planfile
from autotune.records.budget import MAX_PERCENT, STEP_PREFIX, Budget
from autotune.records.config import Config
from autotune.records.json_codec import to_json, without_infinities
from autotune.records.plan_file import PlanFile
from autotune.records.run_dir import RunDir, resume_command, write_json, write_text
from autotune.records.trial import Trial
from autotune.study.outcome import build_plan_file
from autotune.study.preparation import reference_step_bytes
from autotune.study.verdicts.front import FrontPoint, FrontStatus, assess_front
from autotune.study.verdicts.ranking import Rules, eager_step_bytes, plan_hash

SCHEMA = 1
SPREAD_BYTES = 256 * 2**10
"""Margin in bytes for the difference of one plan's charge between processes, whatever the size of its step."""
CSV_COLUMNS = (
    "plan", "status", "step_charged_bytes", "step_peak_bytes", "share_of_eager", "time_ratio", "time_ratio_low",
    "time_ratio_high", "step_seconds", "rounds", "rival", "file",
)  # fmt: skip
"""Columns of `table.csv`."""


def write_front(
    config: Config, files: RunDir, prepared: PreparedWorkload, rules: Rules, trials: Sequence[Trial]
) -> None:
    """Write the table of all re-measured plans, and a plan file for each point of the front; remove other plan files.

    Args:
        config: The config of the study.
        files: Paths of the run directory.
        prepared: The workload and the device that measured it.
        rules: Rules of the study, with the upper limit in bytes.
        trials: All trials of the study, the baseline first.

    Raises:
        ConfigError: A file cannot be written.
    """
    points = assess_front(trials, rules)
    traced_bytes = peak_bytes(prepared.graph, Plan.traced(prepared.graph), prepared.costs)
    reference_bytes = reference_step_bytes(trials[0].measurement, traced_bytes)
    eager_bytes = eager_step_bytes(trials[0].measurement)
    rows, kept = list_front(points, eager_bytes), set()
    try:
        files.front.mkdir(exist_ok=True)
        for point in points:
            if point.status is FrontStatus.FRONT:
                path = files.front_plan(point.number)
                kept.add(path)
                file = build_point_file(config, point, prepared, rules, reference_bytes)
                planfile.write(path, file, remedy=f"free space there, then: {resume_command(files.path)}")
        for path in files.front.iterdir():
            if re.fullmatch(r"plan-\d+\.json", path.name) and path not in kept:  # traces of plans stay
                path.unlink()  # its plan is no point of the front any more
        table = {"schema": SCHEMA, "limit_bytes": rules.budget_bytes, "eager_bytes": eager_bytes, "plans": rows}
        write_json(files.front_table, without_infinities(table))
        write_text(files.front_csv, _to_csv(rows))
    except OSError as error:
        raise ConfigError(
            f"{files.front}: cannot write the front ({error.strerror}); free space there, then: "
            f"{resume_command(files.path)}"
        ) from None


def build_point_file(
    config: Config, point: FrontPoint, prepared: PreparedWorkload, rules: Rules, reference_bytes: int
) -> PlanFile:
    """Return the plan file of one point.

    Its budget is the point's charge plus `SPREAD_BYTES`, in percent of eager's bytes, rounded up to 0.1 %; in bytes for a step
    of a few KiB, of which that is more than a budget in percent may be.
    `reference_bytes` are the bytes of eager's step, which a budget in percent refers to.
    """
    charged_bytes = point.charged_bytes + SPREAD_BYTES
    percent = max(1, math.ceil(1000 * charged_bytes / max(reference_bytes, 1))) / 10
    budget = f"{percent:g}%" if percent <= MAX_PERCENT else f"{STEP_PREFIX}{charged_bytes}B"
    nbytes = Budget.parse(budget).step_bytes(floor_bytes=rules.floor_bytes, baseline_step_bytes=reference_bytes)
    file = build_plan_file(
        config, prepared.device, rules, point.trial, run="..", graph=prepared.graph, loop=prepared.loop
    )
    return replace(file, budget=budget, budget_bytes=max(nbytes, charged_bytes))


def list_front(points: Sequence[FrontPoint], reference_bytes: int | None) -> list[dict[str, Any]]:
    """Return the re-measured plans as JSON rows, the smallest first: base units in the names, None for unknown."""
    return [
        {
            "plan": point.number,
            "status": point.status.value,
            "step_charged_bytes": point.trial.step_charged_bytes,
            "step_peak_bytes": point.trial.measurement.step_peak_bytes if point.trial.measurement else None,
            "share_of_eager": point.charged_bytes / reference_bytes if reference_bytes else None,
            "time_ratio": to_json(point.ratio) if point.ratio else None,
            "step_seconds": to_json(point.seconds) if point.seconds else None,
            "rounds": point.rounds,
            "rival": point.rival,
            "versus_rival": to_json(point.versus_rival) if point.versus_rival else None,
            "target_bytes": point.trial.target_bytes,
            "plan_hash": plan_hash(point.trial.plan) if point.trial.plan is not None else None,
            "trial": point.trial.number,
            "file": f"plan-{point.number}.json" if point.status is FrontStatus.FRONT else None,
        }
        for point in points
    ]


def _to_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        ratio, seconds = row["time_ratio"] or {}, row["step_seconds"] or {}
        flat = row | {
            "time_ratio": ratio.get("middle"),
            "time_ratio_low": ratio.get("low"),
            "time_ratio_high": ratio.get("high"),
            "step_seconds": seconds.get("middle"),
        }
        writer.writerow("" if flat[column] is None else flat[column] for column in CSV_COLUMNS)
    return text.getvalue()
