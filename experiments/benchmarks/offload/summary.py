"""Tables and pictures of the offload benchmark, made from its result file alone."""

import statistics
from pathlib import Path
from typing import Any

from experiments.benchmarks.offload.alternate import ROUNDS

PLANS = ("windows", "media", "joint")
"""Parts whose rows are plans."""


def _cells(row: dict[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return "" if row[key] is None else f"{row[key] / 2**20:.1f}"

    error = f"{row['predicted_peak_bytes'] / row['peak_bytes'] - 1:+.2%}" if row["peak_bytes"] else row["outcome"]
    interval = " ({:.3f} to {:.3f})".format(*row["ratio_without_95"]) if "ratio_without" in row else ""
    return [
        mib("predicted_peak_bytes"), mib("peak_bytes"), error, mib("charged_bytes"),
        f"{row['time_ratio']:.3f}" if row["time_ratio"] else "",
        f"{row['ratio_without']:.3f}{interval}" if interval else "",
        f"{row['transfer_bytes'] / 2**20:.0f}",
        f"{1e3 * row['predicted_stall_seconds']:.1f}", f"{1e3 * row['stall_seconds']:.1f}",
        "" if row["hidden"] is None else f"{row['hidden']:.1%}", str(row["recomputed"]), str(row["offloaded"]),
    ]  # fmt: skip


def _adapt_cells(result: dict[str, Any]) -> str:
    steps = result["steps"]
    runs = [(step["window"], step["offloaded"]) for step in steps]
    changes = [index for index in range(1, len(runs)) if runs[index] != runs[index - 1]]
    first = steps[: changes[0]] if changes else steps
    medians = [
        [statistics.median(step[key] for step in part[-5:]) for part in (first, steps)]
        for key in ("seconds", "stall_seconds")
    ]
    windows = " -> ".join(str(runs[index][0]) for index in (0, *changes))
    highest = max(step["predicted_peak_bytes"] for step in steps)
    return " | ".join(
        [
            f"{result['budget_bytes'] / 2**20:.1f}", windows, str(changes[-1] if changes else 0),
            f"{medians[0][0]:.3f} -> {medians[0][1]:.3f}", f"{1e3 * medians[1][0]:.1f} -> {1e3 * medians[1][1]:.1f}",
            f"{highest / 2**20:.1f}",
        ]
    )  # fmt: skip


HEAD = (
    "plan", "predicted MiB", "peak MiB", "error", "charged MiB", "time to eager", "to none (95 %)", "moved MiB",
    "stall predicted ms", "stall ms", "hidden", "recomputed", "offloaded",
)  # fmt: skip


def summary(results: dict[str, Any]) -> str:
    """Format a table for each model and part."""
    device = results["device"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; measured by"
        f" {', then by '.join(results['commands'])}",
        "",
        "Bytes of the step above the process's floor, page cache and tmpfs of our own files counted. Moved: written and read.",
        "Hidden: share of the store's time for which the step did not wait. Plans run in the arena. To none: step time over the traced",
        f'step without offload, interleaved in one process, {ROUNDS} steps per plan. To eager: "to none" times the ratio of the traced step',
        "to eager, measured in separate processes. Predicted: from the store's rates just before, and op times scaled to the pace of",
        "the run.",
    ]
    for model, results_of_model in results["models"].items():
        rates = "; ".join(
            f"{name} {cost['write_bytes_per_second'] / 1e9:.2f} GB/s write, {cost['read_bytes_per_second'] / 1e9:.2f} read,"
            f" ops beside it {cost['contention']:.2f} times as long"
            for name, cost in results_of_model["stores"].items()
        )
        lines += ["", f"Stores of {model}, as probed last: {rates}."]
        for part in PLANS:
            if not results_of_model.get(part):
                continue
            lines += ["", f"## {model}, {part}", ""]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += [f"| {label} | " + " | ".join(_cells(row)) + " |" for label, row in results_of_model[part].items()]
        if results_of_model.get("adapt"):
            lines += [
                "",
                f"## {model}, adapt",
                "",
                "Medians of the last five steps with the first window, and of the last five of all.",
                "",
            ]
            lines += ["| from | budget MiB | N | settled after step | step s | stall ms | highest predicted MiB |"]
            lines += ["|---|--:|---|--:|--:|--:|--:|"]
            lines += [f"| {label} | {_adapt_cells(result)} |" for label, result in results_of_model["adapt"].items()]
        if "row" in results_of_model.get("search", {}):
            search_result = results_of_model["search"]
            lines += [
                "",
                f"## {model}, what `tune --budget {search_result['budget']}` picks with both stores at hand",
                "",
            ]
            lines += [
                f"offload {search_result['settings']['offload']}, recompute {search_result['settings']['recompute']}",
                "",
            ]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += ["| picked | " + " | ".join(_cells(search_result["row"])) + " |"]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], out: Path) -> None:
    """Draw N against peak and time, a picture for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model, results_of_model in results["models"].items():
        rows = {
            label: row
            for label, row in results_of_model.get("windows", {}).items()
            if label.startswith("N = ") and "," not in label
        }
        if not rows:
            continue
        windows = [int(label.removeprefix("N = ")) for label in rows]
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        axes.plot(
            windows, [row["peak_bytes"] / 2**20 for row in rows.values()], "o-", color="C0", label="peak, measured"
        )
        axes.plot(
            windows, [row["predicted_peak_bytes"] / 2**20 for row in rows.values()], "x:", color="C0", label="predicted"
        )
        axes.set(xlabel="N, layers in memory", ylabel="peak of the step, MiB", title=model)
        axes.axhline(
            results_of_model["windows"]["none"]["peak_bytes"] / 2**20, color="C0", lw=0.8, ls="--", label="no offload"
        )
        right_axes = axes.twinx()
        ratios = [row["ratio_without"] for row in rows.values()]
        low, high = zip(*(row["ratio_without_95"] for row in rows.values()), strict=True)
        errors = [
            [r - end for r, end in zip(ratios, low, strict=True)],
            [end - r for r, end in zip(ratios, high, strict=True)],
        ]
        right_axes.errorbar(windows, ratios, errors, fmt="s-", color="C1", capsize=2)
        right_axes.axhline(1.0, color="C1", lw=0.8, ls="--")
        right_axes.set(ylabel="step time to the same without offload")
        axes.legend(fontsize=7)
        figure.savefig(out / f"{model}.png", dpi=120, metadata={"Software": None})
        pyplot.close(figure)
