"""Tables of the coverage suite: one row for each model, and the counts."""

from collections import Counter
from typing import Any

from experiments.benchmarks.coverage.subjects import SUBJECTS

PLANNING_SECONDS = 10.0
"""Process time within which a plan shall be made."""
MiB = 2**20


def describe(name: str, record: dict[str, Any]) -> str:
    """Return a record as one line of text."""
    lowest, ratio = lowest_share(record), peak_ratio(record)
    parts = [
        f"{name}: {record['verdict']}",
        f"{record['ops']} ops" if "ops" in record else "",
        f"lowest {lowest:.0%}" if lowest else "",
        f"measured/predicted {ratio:.3f}" if ratio else "",
        f"planning {planning_seconds(record):.1f} s" if "lowest_seconds" in record else "",
        record.get("detail", ""),
    ]
    return ", ".join(part for part in parts if part)


def lowest_share(record: dict[str, Any]) -> float | None:
    """Return the predicted peak of the lowest plan over eager's peak."""
    if "lowest_bytes" not in record:
        return None
    share: float = record["lowest_bytes"] / record["eager_bytes"]
    return share


def peak_ratio(record: dict[str, Any]) -> float | None:
    """Return the measured peak of the lowest plan over the predicted one."""
    if "measured_bytes" not in record:
        return None
    ratio: float = record["measured_bytes"] / record["lowest_bytes"]
    return ratio


def planning_seconds(record: dict[str, Any]) -> float:
    """Return the process time of the slower of the two plans."""
    return max(record.get("lowest_seconds", 0.0), record.get("budget_seconds", 0.0))


def versions(document: dict[str, Any]) -> str:
    """Return the libraries and their versions in words."""
    return ", ".join(f"{name} {version}" for name, version in document.get("versions", {}).items())


def rows(document: dict[str, Any]) -> list[str]:
    """Return the rows of the table of all models."""
    lines = [
        "| model | from | what | captured | equal | lowest, % of eager | measured / predicted | planning, s | refusal or difference |",
        "|---|---|---|---|---|--:|--:|--:|---|",
    ]
    for name, record in document["models"].items():
        subject, verdict = SUBJECTS[name], record["verdict"]
        lowest, ratio = lowest_share(record), peak_ratio(record)
        captured = "no" if verdict in ("refused", "not run") or "ops" not in record else "yes"
        equal = {"equal": "yes", "refused": "", "not run": ""}.get(verdict, verdict)
        cells = (
            f"`{name}`",
            subject.library or "torch",
            subject.what + (" (follows data)" if subject.follows_data else ""),
            captured,
            equal,
            f"{100 * lowest:.0f}" if lowest else "",
            f"{ratio:.3f}" if ratio else "",
            f"{planning_seconds(record):.1f}" if "lowest_seconds" in record else "",
            record.get("detail", "").replace("|", "\\|").replace("<", "&lt;"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def counts(document: dict[str, Any]) -> list[str]:
    """Return the counts of all models, and of those whose shapes do not depend on data."""
    models = {name: record for name, record in document["models"].items() if record["verdict"] != "not run"}
    static = {name: record for name, record in models.items() if not SUBJECTS[name].follows_data}
    lines = [
        "| models | tried | captured and equal | rounding | wrong | refused | crashes |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups = {
        "all": models,
        "shapes and branches independent of data": static,
        "shapes or branches that follow data": {name: record for name, record in models.items() if name not in static},
    }
    for title, group in groups.items():
        verdicts = Counter(record["verdict"] for record in group.values())
        equal = f"{verdicts['equal']} ({verdicts['equal'] / max(1, len(group)):.1%})"
        cells = (title, len(group), equal, *(verdicts[key] for key in ("rounding", "wrong", "refused", "crash")))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def summarize(document: dict[str, Any]) -> str:
    """Return the summary: origin, counts, and what is not as it should be."""
    models = document["models"]
    planned = [record for record in models.values() if "lowest_seconds" in record]
    slow = [record["name"] for record in planned if planning_seconds(record) > PLANNING_SECONDS]
    ratios = [ratio for record in models.values() if (ratio := peak_ratio(record)) is not None]
    lines = [
        f"{document.get('machine', {}).get('silicon', 'unknown')}, {document.get('date', '')}, {versions(document)}.",
        "",
        *counts(document),
        "",
    ]
    if ratios:
        exact = sum(abs(ratio - 1) < 0.01 for ratio in ratios)
        lines += [f"Predicted peak within 1 % of the measured one: {exact} of {len(ratios)}.", ""]
    if planned:
        lines += [
            f"Planning within {PLANNING_SECONDS:g} s of process time: {len(planned) - len(slow)} of {len(planned)}"
            + (f"; slower: {', '.join(slow)}" if slow else "") + ".",
            "",
        ]  # fmt: skip
    rest = [describe(name, record) for name, record in models.items() if record["verdict"] != "equal"]
    if rest:
        lines += ["Not captured, or not equal:", "", *(f"- {line}" for line in rest), ""]
    return "\n".join(lines)
