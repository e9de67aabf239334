"""Tables of the frontiers that were measured on a GPU."""

from pathlib import Path
from typing import Any

from autotune.study.verdicts.statistics import Interval
from experiments.common.facts import format_interval

MIB = 2**20


def write_summary(document: dict[str, Any], out: Path) -> str:
    """Write the tables of all steps that have some, and return their text.

    A step whose command failed after its first rounds has a table of these.
    """
    steps = {name: step for name, step in document["steps"].items() if step.get("data", {}).get("variants")}
    text = "\n\n".join(_frontier(name, step) for name, step in steps.items()) + "\n"
    out.write_text(text, encoding="utf-8")
    return text


def _frontier(name: str, step: dict[str, Any]) -> str:
    facts, data = step["facts"], step["data"]
    origin = f"{facts['device']['silicon']}, torch {facts['torch']}, commit {facts['commit']}, {facts['date']}"
    lines = [
        f"# {name} {data['arguments']}",
        "",
        f"{origin}. Bytes are those that PyTorch's allocator counts. Prediction: the simulator's bytes over the measured ones. "
        "A step in CUDA graphs also holds their memory.",
        "",
        "| variant | MiB | of eager | prediction | step, ms | estimate / measured | time to eager | recomputed | offloaded values |",
        "|---|--:|--:|--:|--:|--:|---|--:|--:|",
        *(_row(variant, figures) for variant, figures in data["variants"].items()),
    ]
    variants = data["variants"]
    shares = [
        figures["bytes"] / variants[plain]["bytes"]
        for variant, figures in variants.items()
        if figures.get("graphs") and (plain := variant.removesuffix(" graphs")) in variants
    ]
    if shares:
        lines += [
            "", f"In CUDA graphs a step holds {min(shares):.2f} to {max(shares):.2f} times the bytes of the same plan without."
        ]  # fmt: skip
    if data.get("exit"):
        lines += ["", f"The command failed with exit code {data['exit']}. The table holds the rounds saved before."]
    failures = [f"- {failed}: {reason.splitlines()[0]}" for failed, reason in data["failures"].items()]
    return "\n".join([*lines, *(["", *failures] if failures else [])])


def _row(name: str, figures: dict[str, Any]) -> str:
    low, high = figures["interval"]
    # older results hold the larger one of two ratios as their median
    middle = (low + high) / 2 if figures["rounds"] == 2 else figures["time_ratio"]
    interval = Interval(middle, low, high, figures["rounds"], figures.get("confidence"))
    is_plan = "predicted_bytes" in figures and not figures.get("graphs")
    cells = [
        f"{figures['bytes'] / MIB:,.1f}",
        f"{figures['bytes_ratio']:.3f}",
        f"{figures['predicted_bytes'] / figures['bytes'] - 1:+.2%}" if is_plan else "",
        f"{1e3 * figures['seconds']:.2f}",
        f"{figures['predicted_seconds'] / figures['seconds']:.2f}" if is_plan else "",
        format_interval(interval),
        str(figures.get("recomputed", "")),
        str(figures.get("swaps", "")),
    ]
    return f"| {name} | {' | '.join(cells)} |"
