"""Tune ResNet-50, GPT-2 and the LSTM to 65 % with the command line, and compare every prediction with its measurement."""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = ("resnet50", "gpt2", "lstm")
COLUMNS = (
    "model", "trial", "kind", "outcome", "predicted_peak_bytes", "measured_peak_bytes", "error_percent", "charged_bytes",
    "time_ratio", "max_error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=CONFIGS)
    parser.add_argument("--time", default="8m", help="for each search")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = {model: tune(model, chosen.time) for model in chosen.models}
    rows = [row for model, document in found.items() for row in trials(model, document)]
    with (chosen.out / "trials.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    machine = {
        "device": found[chosen.models[0]]["baseline"]["measurement"]["device"],
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "command": " ".join(["python", "experiments/tuned/run.py", *sys.argv[1:]]),
    }
    (chosen.out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
    (chosen.out / "summary.md").write_text(summary(found, rows))


def tune(model: str, time: str) -> dict[str, Any]:
    """What the command prints, run from a folder of its own so that nothing else is touched."""
    config = (HERE.parent.parent / "configs" / f"{model}.yaml").resolve()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", "tune", str(config), "--time", time, "--json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model}: exit {done.returncode}\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def trials(model: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each trial that ran a plan."""
    rows = []
    for trial in document["trials"]:
        seen, predicted = trial["measurement"], trial["estimate"]
        if trial["kind"] == "repeat" or not predicted or not seen or seen["peak_bytes"] is None:
            continue
        measured = seen["peak_bytes"] - seen["floor_bytes"]
        rows.append(
            {
                "model": model,
                "trial": trial["number"],
                "kind": trial["kind"],
                "outcome": seen["outcome"],
                "predicted_peak_bytes": predicted["peak_bytes"],
                "measured_peak_bytes": measured,
                "error_percent": round(100 * (predicted["peak_bytes"] / measured - 1), 3),
                "charged_bytes": None if seen["charged_bytes"] is None else seen["charged_bytes"] - seen["floor_bytes"],
                "time_ratio": ratio(seen),
                "max_error": seen["max_error"],
            }
        )
    return rows


def ratio(seen: dict[str, Any]) -> float | None:
    """Median step over the median of eager's steps beside it."""
    both = [sorted(seen[side]) for side in ("step_seconds", "baseline_seconds")]
    if not all(both):
        return None
    ours, eager = (samples[len(samples) // 2] for samples in both)
    return round(ours / eager, 4)


def summary(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The tables."""
    lines = [
        "| model | eager peak MiB | eager charged MiB | budget MiB | best charged MiB | best time | results |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, document in found.items():
        eager, best = (document[name]["measurement"] for name in ("baseline", "best"))
        peak = eager["peak_bytes"] - eager["floor_bytes"]
        same = "bit for bit" if best["max_error"] == 0 else f"off by {best['max_error']:.1e}"
        lines.append(
            f"| {model} | {peak / 2**20:.0f} | {(eager['charged_bytes'] - eager['floor_bytes']) / 2**20:.0f} "
            f"| {0.65 * peak / 2**20:.0f} | {(best['charged_bytes'] - best['floor_bytes']) / 2**20:.0f} "
            f"| {ratio(best):.3f}x | {same} |"
        )
    lines += ["", "| model | trials that ran | largest error of the predicted peak |", "|---|---|---|"]
    for model in found:
        errors = [abs(row["error_percent"]) for row in rows if row["model"] == model]
        lines.append(f"| {model} | {len(errors)} | {max(errors):.2f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
