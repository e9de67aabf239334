"""`autotune plan`: make one plan from estimates alone."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.launch import plan_batch_size, survey
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError
from autotune.records import plan_file as planfile
from autotune.records.config import BATCH_OBJECTIVES
from autotune.records.json_codec import to_json
from autotune.records.run_dir import check_file_place
from autotune.study.plan_by_estimate import make_plan_file, refuse_front
from autotune.units import fmt_seconds

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.records.plan_file import PlanFile


def run(config: "Config", *, out: Path | None, json: bool) -> None:
    """Make a plan, write it to `out` if that is a path, and describe it."""
    if out is None and not json:
        raise ConfigError("no file for the plan; add -o FILE, or --json to print it")
    refuse_front(config)
    check_file_place(out)
    with answer_stream() as answer:
        start = time.perf_counter()
        if config.objective in BATCH_OBJECTIVES:
            file, surveyed = plan_batch_size(config, print_note)
        else:
            surveyed = survey(config, print_note)
            print_note(f"planning {len(surveyed.graph.ops)} ops for {config.budget}")
            start = time.perf_counter()
            file = make_plan_file(config, surveyed)
        seconds = time.perf_counter() - start
        if out is not None:
            planfile.write(out, file)
        if json:
            print_json(_document(file, seconds), answer)
            return
        from autotune.report.plan_text import describe_plan

        lines = [
            *describe_plan(file, surveyed.graph, surveyed.costs),
            f"planned in {fmt_seconds(seconds)}",
            f"plan       {out}",
        ]
        answer.write("\n".join(lines) + "\n")


def _document(file: "PlanFile", seconds: float) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    return {
        "plan": to_json(file.plan),
        "estimate": to_json(file.estimate),
        "gap": file.estimate.gap,
        "seconds_gap": file.estimate.seconds_gap,
        "layout_gap": file.estimate.layout_gap,
        "planning_seconds": seconds,
        "verified": file.verified,
    }
