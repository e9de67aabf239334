"""Facts that every result file holds: how a command writes them, and which of them an older file lacks."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from autotune.capture.tracer import capture
from autotune.records.json_codec import to_json
from autotune.records.run_dir import write_text
from autotune.workloads.factory import load_workload

NOT_RECORDED = "not recorded"
"""Value of a fact that an older result lacks."""
FACTS = ("machine", "commit", "graphs", "date", "command")
"""Facts of a result: processor and software, commit, digest of each captured graph by its name, date, and command line."""
OLDER_NAMES: Mapping[str, frozenset[str]] = {
    "machine": frozenset(["device"]),
    "command": frozenset(["commands", "sessions"]),
    "graphs": frozenset(["graph", "captures", "plan", "baseline"]),
}
"""Names under which files written before `write_result` hold a fact."""
PLANS = ".plans.json"
"""End of the name of a file of plans, which belongs to the result beside it."""


def write_result(path: Path, document: Mapping[str, Any], graphs: Mapping[str, str]) -> None:
    """Write a result file, with the digests as `graphs` and the age of this process in seconds as `command_seconds`.

    Raises ValueError if the document lacks one of `FACTS`.

    Args:
        path: file to replace.
        document: facts and figures.
        graphs: digest of each captured graph by the name of its workload; empty for a result of no captured graph.
    """
    seconds = round(time.time() - psutil.Process().create_time())
    complete = {**document, "graphs": dict(graphs), "command_seconds": seconds}
    if missing := [fact for fact in FACTS if fact not in complete]:
        raise ValueError(f"{path.name}: the result lacks {', '.join(missing)}; add the facts of collect_facts()")
    path.parent.mkdir(parents=True, exist_ok=True)
    # one line for each part: samples are thousands of numbers
    parts = [f"{json.dumps(key)}: {json.dumps(to_json(part))}" for key, part in complete.items()]
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def capture_digests(workloads: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Capture workloads and return the digest of each graph by name. `workloads` has (reference, arguments) by name."""
    return {
        name: capture(load_workload(reference, dict(arguments)), reference).graph.digest
        for name, (reference, arguments) in workloads.items()
    }


def find_results(folder: Path) -> Iterator[Path]:
    """Yield the result files below a folder, without files of plans."""
    for path in sorted(folder.rglob("*.json")):
        if "results" in path.relative_to(folder).parts and not path.name.endswith(PLANS):
            yield path


def missing_facts(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the facts that a result, or a part of a claim's result, lacks.

    >>> missing_facts({"device": {}, "commands": ["python"], "graph": {"digest": "08ff"}})
    ('commit', 'date')
    """
    origins = document.get("origins")
    recorded = [
        {name for name, fact in part.items() if fact != NOT_RECORDED}
        for part in (origins.values() if origins else [document])
    ]
    return tuple(
        fact for fact in FACTS if not all(names & ({fact} | OLDER_NAMES.get(fact, frozenset())) for names in recorded)
    )
