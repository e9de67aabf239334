"""Tune real training steps with the command line, and compare every prediction with its measurement."""

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

from autotune.records.json_codec import from_json
from autotune.records.measurement import Measurement

HERE = Path(__file__).parent
RUNS: dict[str, tuple[str, list[str]]] = {
    "resnet18": ("resnet18", []),
    "resnet50": ("resnet50", []),
    "gpt2": ("gpt2", []),
    "gpt2-ssd": ("gpt2", ["--budget", "60%", "--store", "ssd={ssd}"]),
    "lstm": ("lstm", []),
}
"""By name: a file of `configs/`, and what the command line adds to it."""
COLUMNS = (
    "trial", "kind", "outcome", "predicted_peak_bytes", "measured_peak_bytes", "error_percent", "charged_bytes",
    "time_ratio", "transfer_bytes", "stall_seconds", "max_error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--time", default="8m", help="for each search")
    parser.add_argument("--ssd", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.runs:
        began, load = time.perf_counter(), os.getloadavg()
        model, more = RUNS[name]
        more = [argument.format(ssd=chosen.ssd.resolve()) for argument in more]
        document = tune(model, ["--time", chosen.time, *more])
        rows = trials(document)
        with (chosen.out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        record = summed(document, rows) | {
            "budget": more[1 + more.index("--budget")] if "--budget" in more else budget(model),
            "device": document["best"]["measurement"]["device"],
            "kernel": platform.release(),
            "load": {"began": load, "ended": os.getloadavg()},
            "seconds": round(time.perf_counter() - began),
            "command": " ".join(["python", "experiments/tuned/run.py", *sys.argv[1:]]),
        }
        (chosen.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (chosen.out / "summary.md").write_text(summary(chosen.out))


def config(model: str) -> Path:
    return (HERE.parent.parent / "configs" / f"{model}.yaml").resolve()


def budget(model: str) -> str:
    return next(line.split()[1] for line in config(model).read_text().splitlines() if line.startswith("budget:"))


def tune(model: str, options: list[str]) -> dict[str, Any]:
    """What the command prints, run from a folder of its own so that nothing else is touched."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", "tune", str(config(model)), *options, "--json"]
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
                "transfer_bytes": seen["transfer_bytes"],
                "stall_seconds": seen["stall_seconds"],
                "max_error": seen["max_error"],
            }
        )
    return rows


def ratio(seen: dict[str, Any]) -> float | None:
    """The tool's own: the median step over eager's of the same turn."""
    found = from_json(Measurement, seen, where="measurement").time_ratio
    return None if found is None else round(found, 4)


def summed(document: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer in a few numbers."""
    eager, best = (document[name]["measurement"] for name in ("baseline", "best"))
    smallest = next((row for row in rows if row["kind"] == "smallest"), {})
    return {
        "eager_peak_bytes": eager["peak_bytes"] - eager["floor_bytes"],
        "eager_charged_bytes": eager["charged_bytes"] - eager["floor_bytes"],
        "best_peak_bytes": best["peak_bytes"] - best["floor_bytes"],
        "best_charged_bytes": best["charged_bytes"] - best["floor_bytes"],
        "best_time_ratio": ratio(best),
        "best_max_error": best["max_error"],
        "smallest": {key: smallest.get(key) for key in ("charged_bytes", "time_ratio", "transfer_bytes")},
        "trials_that_ran": len(rows),
        "largest_error_percent": max(abs(row["error_percent"]) for row in rows),
    }


def summary(folder: Path) -> str:
    """One table of all runs that have a result."""
    lines = [
        "| run | eager: peak, charged MiB | budget | best: charged MiB | time | results | smallest: charged MiB | time "
        "| through the disk, MiB a step | trials that ran | largest error of the predicted peak |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for path in sorted(folder.glob("*.json")):
        one = json.loads(path.read_text())
        same = "bit for bit" if one["best_max_error"] == 0 else f"off by {one['best_max_error']:.1e}"
        small = one["smallest"]
        cells = [
            path.stem,
            f"{mib(one['eager_peak_bytes'])}, {mib(one['eager_charged_bytes'])}",
            one["budget"],
            mib(one["best_charged_bytes"]),
            f"{one['best_time_ratio']:.3f}x",
            same,
            mib(small["charged_bytes"]),
            "-" if small["time_ratio"] is None else f"{small['time_ratio']:.3f}x",
            mib(small["transfer_bytes"]),
            str(one["trials_that_ran"]),
            f"{one['largest_error_percent']:.2f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
