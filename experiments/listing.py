"""List of all experiments: what their committed results record about themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.all_experiments import Experiment
from experiments.common.facts import ROOT
from experiments.common.result_file import NOT_RECORDED, ORIGINS

HEAD = ("experiment", "timed", "expected", "measured", "commit", "date", "machine")


def format_list(experiments: Sequence[Experiment], root: Path = ROOT) -> str:
    """Return a line per experiment: expected minutes, and duration, commit, date and machine of its latest result."""
    rows = [HEAD, *(_row(experiment, root) for experiment in experiments)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(experiment: Experiment, root: Path) -> tuple[str, ...]:
    documents = [read_facts(path) for path in experiment.find_results(root)]
    latest = max(documents, key=lambda facts: str(facts.get("date", "")), default={})
    machine = latest.get("machine") or latest.get("device") or {}
    return (
        experiment.name,
        "yes" if experiment.is_timed else "no",
        f"{experiment.minutes:.0f} min",
        _duration(documents),
        str(latest.get("commit", NOT_RECORDED)),
        str(latest.get("date", NOT_RECORDED)),
        str(machine.get("silicon", NOT_RECORDED)) if isinstance(machine, dict) else str(machine),
    )


def _duration(documents: Sequence[dict[str, Any]]) -> str:
    """Return the duration of all commands that wrote results; one that wrote several files counts once."""
    if not documents or any("command_seconds" not in facts for facts in documents):
        return NOT_RECORDED
    seconds: dict[str, float] = {}
    for facts in documents:
        run = f"{facts['commit']} {facts['command']}"
        seconds[run] = max(seconds.get(run, 0.0), facts["command_seconds"])
    return f"{sum(seconds.values()) / 60:.0f} min"


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a result file; empty if the file is no JSON object.

    A claim's result has facts for each of its parts alone. Those of the part with the latest date are returned. Facts at the top
    level are of the call that wrote the file last.
    """
    if path.suffix != ".json":
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        return {}
    origins = document.get(ORIGINS)
    if not origins or "commit" in document:
        return document
    return max(origins.values(), key=lambda facts: str(facts["date"]))
