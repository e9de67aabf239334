"""Tables of the loops: one row for each, and the counts."""

from collections import Counter
from typing import Any

from experiments.benchmarks.loops.cases import CASES, GROUPS
from experiments.benchmarks.loops.trial import Verdict
from experiments.common.facts import format_origin

TITLES = {
    "values": "Python values, modules and hooks that change",
    "data": "Batches",
    "updates": "Optimizers, clipping, accumulation",
    "checkpoints": "Checkpoints",
    "backward": "Uses of `backward()` and of gradients",
    "modes": "Modes, copies, threads",
    "models": "Several models, adapters",
    "frameworks": "transformers, TRL, Lightning, Accelerate",
    "distributed": "Two processes",
}
"""Heading of each group."""


def rows(document: dict[str, Any], group: str) -> list[str]:
    """Return the table of one group: loop, result, and the refusal or the remark."""
    lines = ["| loop | under a plan | refusal, or what plain PyTorch raises |", "|---|---|---|"]
    for case in GROUPS[group]:
        if (record := document["loops"].get(case.__name__)) is None:
            continue
        detail = record["detail"].replace("|", "\\|").replace("<", "&lt;")
        if record["plain_error"] and record["verdict"] == Verdict.REFUSED:
            error = record["plain_error"].partition(":")[0]
            detail += f" (plain PyTorch raises {error})"
        description = (case.__doc__ or "").splitlines()[0].rstrip(".")
        lines.append(f"| {description} | {record['verdict']} | {detail} |")
    return lines


def counts(document: dict[str, Any]) -> Counter[str]:
    """Return the number of loops of each verdict."""
    return Counter(record["verdict"] for record in document["loops"].values())


def tables(document: dict[str, Any]) -> list[str]:
    """Return the tables of all groups, with headings."""
    return [line for group, title in TITLES.items() for line in (f"## {title}", "", *rows(document, group), "")]


def summarize(document: dict[str, Any]) -> str:
    """Return the summary: counts, what is neither equal nor refused, and the tables."""
    found = counts(document)
    total = ", ".join(f"{found[verdict]} {verdict}" for verdict in Verdict)
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{len(document['loops'])} of {len(CASES)} loops: {total}.",
        "",
        f"{format_origin(document)} {versions}.",
        "",
    ]
    return "\n".join(lines + tables(document))
