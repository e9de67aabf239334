"""What a run writes: the record as JSON, and its table for machines (CSV) and for people (Markdown)."""

import csv
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 10_000
MIB = 2**20


def write(out: Path, record: dict[str, Any]) -> None:
    """results.json, results.csv and results.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = [row for model, found in record["models"].items() for row in _rows(model, found)]
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (out / "results.md").write_text(_markdown(record, rows))


def ratio_interval(blocks: list[list[float]], eager: list[list[float]]) -> tuple[float, float]:
    """95 % of the ratio of medians: rounds are drawn with replacement, a round's blocks of both sides together."""
    ours, theirs = np.array(blocks), np.array(eager)
    drawn = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))
    ratios = np.median(ours[drawn], axis=(1, 2)) / np.median(theirs[drawn], axis=(1, 2))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _rows(model: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    eager = found["variants"]["eager"]
    rows = []
    for name, seen in found["variants"].items():
        seconds = list(itertools.chain(*seen["blocks"]))
        low, median, high = statistics.quantiles(seconds, n=4)
        ratio = statistics.median(seconds) / statistics.median(itertools.chain(*eager["blocks"]))
        ratio_low, ratio_high = ratio_interval(seen["blocks"], eager["blocks"])
        rows.append(
            {
                "model": model,
                "variant": name,
                "step_peak_bytes": seen["step_peak_bytes"],
                "peak_of_eager": seen["step_peak_bytes"] / eager["step_peak_bytes"],
                "step_charged_bytes": seen["step_charged_bytes"],
                "charged_of_eager": seen["step_charged_bytes"] / eager["step_charged_bytes"],
                "budget_bytes": seen.get("budget_bytes", ""),
                "floor_bytes": seen["floor_bytes"],
                "median_seconds": median,
                "quartile_low_seconds": low,
                "quartile_high_seconds": high,
                "samples": len(seconds),
                "ratio": ratio,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
                **{f"{kind}_error": error for kind, error in seen["errors"].items()},
            }
        )
    return rows


def _markdown(record: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    machine = record["machine"]
    lines = [
        f"`{record['command']}`, {record['started']}, {machine['silicon']}, cores: {machine['cores']},"
        f" processors: {machine['processors']}, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['driver']},"
        f" torch {machine['torch']}",
        "",
        "| model | variant | peak MiB | of eager | charged MiB | of eager | step ms (quartiles) | ratio to eager (95 %)"
        " | loss and gradients | parameters | buffers |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for row in rows:
        low, median, high = (1e3 * row[f"{key}_seconds"] for key in ("quartile_low", "median", "quartile_high"))
        cells = [
            row["model"],
            row["variant"],
            f"{row['step_peak_bytes'] / MIB:.1f}",
            f"{row['peak_of_eager']:.1%}",
            f"{row['step_charged_bytes'] / MIB:.1f}",
            f"{row['charged_of_eager']:.1%}",
            f"{median:.1f} ({low:.1f} to {high:.1f})",
            f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})",
            _equal(max(row["loss_error"], row["gradients_error"])),
            _equal(row["parameters_error"]),
            _equal(row["buffers_error"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    loads = ", ".join(
        f"{model} {found['load']['began'][0]:.2f} to {found['load']['ended'][0]:.2f}"
        for model, found in record["models"].items()
    )
    return "\n".join([*lines, "", f"Load average at the start and end of each model: {loads}."]) + "\n"


def _equal(error: float) -> str:
    return "equal" if error == 0 else f"off by {error:.1e}"
