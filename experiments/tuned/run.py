"""Tune ResNet-50, GPT-2 and the LSTM with the command line, and compare every prediction with its measurement."""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = ("resnet50", "gpt2", "lstm")
COLUMNS = (
    "trial", "kind", "outcome", "predicted_peak_bytes", "measured_peak_bytes", "error_percent", "charged_bytes",
    "time_ratio", "max_error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=CONFIGS)
    parser.add_argument("--time", default="8m", help="for each search")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for model in chosen.models:
        began, load = time.perf_counter(), os.getloadavg()
        document = tune(model, chosen.time)
        rows = trials(document)
        with (chosen.out / f"{model}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        record = summed(document, rows) | {
            "budget": budget(model),
            "device": document["best"]["measurement"]["device"],
            "kernel": platform.release(),
            "load": {"began": load, "ended": os.getloadavg()},
            "seconds": round(time.perf_counter() - began),
            "command": " ".join(["python", "experiments/tuned/run.py", *sys.argv[1:]]),
        }
        (chosen.out / f"{model}.json").write_text(json.dumps(record, indent=1) + "\n")
    (chosen.out / "summary.md").write_text(summary(chosen.out))


def config(model: str) -> Path:
    return (HERE.parent.parent / "configs" / f"{model}.yaml").resolve()


def budget(model: str) -> str:
    return next(line.split()[1] for line in config(model).read_text().splitlines() if line.startswith("budget:"))


def tune(model: str, limit: str) -> dict[str, Any]:
    """What the command prints, run from a folder of its own so that nothing else is touched."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", "tune", str(config(model)), "--time", limit, "--json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model}: exit {done.returncode}\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def trials(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each trial that ran a plan."""
    rows = []
    for trial in document["trials"]:
        seen, predicted = trial["measurement"], trial["estimate"]
        if trial["kind"] == "repeat" or not predicted or not seen or seen["peak_bytes"] is None:
            continue
        measured = seen["peak_bytes"] - seen["floor_bytes"]
        rows.append(
            {
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


def summed(document: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer in a few numbers."""
    eager, best = (document[name]["measurement"] for name in ("baseline", "best"))
    return {
        "eager_peak_bytes": eager["peak_bytes"] - eager["floor_bytes"],
        "eager_charged_bytes": eager["charged_bytes"] - eager["floor_bytes"],
        "best_peak_bytes": best["peak_bytes"] - best["floor_bytes"],
        "best_charged_bytes": best["charged_bytes"] - best["floor_bytes"],
        "best_time_ratio": ratio(best),
        "best_max_error": best["max_error"],
        "trials_that_ran": len(rows),
        "largest_error_percent": max(abs(row["error_percent"]) for row in rows),
    }


def summary(folder: Path) -> str:
    """One table of all models that have a result."""
    lines = [
        "| model | eager peak MiB | eager charged MiB | budget | best charged MiB | best time | results "
        "| trials that ran | largest error of the predicted peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        one = json.loads(path.read_text())
        eager, charged, best = (
            f"{one[name] / 2**20:.1f}" for name in ("eager_peak_bytes", "eager_charged_bytes", "best_charged_bytes")
        )
        same = "bit for bit" if one["best_max_error"] == 0 else f"off by {one['best_max_error']:.1e}"
        lines.append(
            f"| {path.stem} | {eager} | {charged} | {one['budget']} | {best} | {one['best_time_ratio']:.3f}x | {same} "
            f"| {one['trials_that_ran']} | {one['largest_error_percent']:.2f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
