"""Facts that every result file holds: how a command writes them, which of them an older file lacks, and those of each part."""

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
ORIGINS = "origins"
"""Key of the facts of each part, by the part's name, in results whose parts come from different calls.

The facts at the top level are those of the call that wrote the file last. In an older file they are those of all parts.
"""
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


def read_origins(document: Mapping[str, Any], graphs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the facts of each part of a stored result, with the digest of its graph as `graphs`.

    A part without facts of its own has those at the top level. What these lack is `NOT_RECORDED`.

    Args:
        document: stored result.
        graphs: name of the graph of each part, by the part's name.

    >>> older = {"device": {"silicon": "x"}, "commit": "c0ffee", "graphs": {"gpt2": "08ff"}}
    >>> read_origins(older, {"gpt2": "gpt2"})["gpt2"]["graphs"]
    {'gpt2': '08ff'}
    """
    shared: dict[str, Any] = {}
    shared_facts = [fact for fact in FACTS if fact != "graphs"]
    for fact in shared_facts:
        names = [name for name in (fact, *OLDER_NAMES.get(fact, ())) if name in document]
        shared |= {name: document[name] for name in names[:1]} or {fact: NOT_RECORDED}
    digests, stored = read_digests(document), document.get(ORIGINS, {})
    return {
        part: stored.get(part) or {**shared, "graphs": {name: digests[name]} if name in digests else NOT_RECORDED}
        for part, name in graphs.items()
    }


def read_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the graphs of a result, or of one of its parts; empty where they are not recorded."""
    graphs = facts.get("graphs")
    return dict(graphs) if isinstance(graphs, Mapping) else {}


def join_digests(origins: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the digests of the graphs of all parts, by the facts of each part."""
    return {name: digest for facts in origins.values() for name, digest in read_digests(facts).items()}


def refuse_other_graph(
    path: Path, origins: Mapping[str, Mapping[str, Any]], graphs: Mapping[str, str], remedy: str
) -> None:
    """Raise SystemExit if a stored part that stays is of another graph than the one that is captured now.

    A part whose graph is not recorded stays: its facts say so.

    Args:
        path: file of the results.
        origins: facts of each part that stays.
        graphs: digest of each graph that this call captured, by name.
        remedy: next step, at the end of the message.
    """
    for part, facts in origins.items():
        for name, digest in read_digests(facts).items():
            if digest != graphs.get(name, digest):
                raise SystemExit(
                    f"{path}: {part} is of the graph {digest} of {name}, which is captured as {graphs[name]} now; {remedy}"
                )


def find_results(folder: Path) -> Iterator[Path]:
    """Yield the result files below a folder, without files of plans."""
    for path in sorted(folder.rglob("*.json")):
        if "results" in path.relative_to(folder).parts and not path.name.endswith(PLANS):
            yield path


def find_tables_alone(folder: Path) -> Iterator[Path]:
    """Yield the CSV files of results below a folder that have no result file beside them to hold their facts."""
    results = {path.parent for path in find_results(folder)}
    for path in sorted(folder.rglob("*.csv")):
        if "results" in path.relative_to(folder).parts and path.parent not in results:
            yield path


def missing_facts(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the facts that a result, or one of its parts, lacks.

    A list of claims has a part of simulated and modelled figures, and one of measured ones.

    >>> missing_facts({"device": {}, "commands": ["python"], "graph": {"digest": "08ff"}})
    ('commit', 'date')
    """
    origins: Mapping[str, Mapping[str, Any]] = document.get(ORIGINS) or {}
    parts = [*origins.values()] or [document]
    claimed = {"measured" if claim["kind"] == "measured" else "simulated" for claim in document.get("claims", ())}
    parts += [{} for part in sorted(claimed) if origins and part not in origins]
    recorded = [{name for name, fact in part.items() if fact != NOT_RECORDED} for part in parts]
    return tuple(
        fact for fact in FACTS if not all(names & ({fact} | OLDER_NAMES.get(fact, frozenset())) for names in recorded)
    )
