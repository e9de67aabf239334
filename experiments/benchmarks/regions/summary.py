"""Tables of the measured models."""

import json
from pathlib import Path
from typing import Any

from autotune.study.verdicts.statistics import median_interval
from experiments.common.facts import format_interval, format_origin

MIB = 2**20


def write_summary(out: Path) -> str:
    """Write summary.md from every record of a folder, and return its text."""
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))}
    lines = [
        "Own bytes of a step are those above parameters, state and batch. Prediction: largest error of the rows below.",
        "",
        "| model | ops | fused | regions | kernels | overwrite an input | compiled, s | from the cache, s | prediction |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(_size_row(name, record) for name, record in records.items()),
        "",
        "| model | plan | own peak, MiB | of eager | bound, MiB | overwritten | estimated s | time to eager |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for name, record in records.items():
        lines.append(f"| {name} | eager | {record['eager_bytes'] / MIB:.1f} | 1.000 | | | | |")
        lines += [_plan_row(name, plan, record) for plan in _plans(record)]
    lines += ["", *(f"- {name}: {format_origin(record)}" for name, record in records.items())]
    text = "\n".join(lines) + "\n"
    (out / "summary.md").write_text(text, encoding="utf-8")
    return text


def _plans(record: dict[str, Any]) -> list[str]:
    return [key for key in record if key.startswith(("aten ", "inductor "))]


def _size_row(name: str, record: dict[str, Any]) -> str:
    errors = [
        abs(record[plan]["predicted_bytes"] / record[plan]["measured_bytes"] - 1)
        for plan in _plans(record)
        if record[plan]["measured_bytes"]
    ]
    cells = [
        record["ops"], record["ops_fused"], record["regions"], record["kernels"], record["overwriting"],
        f"{record['cold_seconds']:.1f}", f"{record['warm_seconds']:.1f}", f"{max(errors):.3%}",
    ]  # fmt: skip
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _plan_row(name: str, plan: str, record: dict[str, Any]) -> str:
    row = record[plan]
    seconds = record.get("seconds", {})
    ratio = ""
    if plan in seconds:
        pairs = zip(seconds[plan], seconds["eager"], strict=True)
        ratio = format_interval(median_interval([taken / eager for taken, eager in pairs]))
    cells = [
        f"{row['measured_bytes'] / MIB:.1f}", f"{row['measured_bytes'] / record['eager_bytes']:.3f}",
        f"{row['bound_bytes'] / MIB:.1f}", row["overwritten"], f"{row['estimated_seconds']:.3f}", ratio,
    ]  # fmt: skip
    return f"| {name} | {plan} | {' | '.join(map(str, cells))} |"
