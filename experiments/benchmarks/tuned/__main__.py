"""Tune real training steps with the command line, and compare every prediction with its measurement."""

import argparse
import csv
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.records.config import load_config
from autotune.records.json_codec import from_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import write_text
from autotune.study.captures import MeasuredCapture, select_capture
from autotune.study.verdicts.statistics import Interval
from experiments.common.commands import run_to_end
from experiments.common.facts import collect_facts, format_interval, list_arguments
from experiments.common.result_file import PLANS, write_result
from experiments.common.turns import shorten_reason

HERE = Path(__file__).parent
RUNS: dict[str, tuple[str, list[str]]] = {
    "resnet18": ("resnet18", []),
    "resnet50": ("resnet50", []),
    "gpt2": ("gpt2", []),
    "gpt2-ssd": ("gpt2", ["--budget", "60%", "--store", "ssd={ssd}"]),
    "lstm": ("lstm", []),
    "resnet18-kernels": ("resnet18", ["--kernels", "any"]),
    "resnet50-kernels": ("resnet50", ["--kernels", "any"]),
    "gpt2-kernels": ("gpt2", ["--kernels", "any"]),
    "lstm-kernels": ("lstm", ["--kernels", "any"]),
    "mobilenet_v2-kernels": ("mobilenet_v2", ["--kernels", "any"]),
}
"""Config of `configs/` and extra options by run."""
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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.runs:
        start, load, facts = time.perf_counter(), os.getloadavg(), collect_facts()
        model, extra_options = RUNS[name]
        extra_options = [argument.format(ssd=options.ssd.resolve()) for argument in extra_options]
        document, captures = tune(model, ["--time", options.time, *extra_options])
        rows = trial_rows(document)
        with (options.out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        config = load_config(str(config_path(model)))
        record = summarize_run(document, rows) | {
            "model": config.workload,
            "arguments": config.arguments,
            "budget": extra_options[1 + extra_options.index("--budget")]
            if "--budget" in extra_options
            else read_budget(model),
            "device": document["best"]["measurement"]["device"],
            "kernel": platform.release(),
            "load": {"began": load, "ended": os.getloadavg()},
            "captures": captures,
            "seconds": round(time.perf_counter() - start),
            "command": " ".join(["python", "-m", "experiments.benchmarks.tuned", *list_arguments()]),
        }
        digest = captures[0]["graph_digest"] if captures else document["best"]["graph_digest"]
        if captures:
            plans = {"tuned": document["best"]["plan"]}
            write_text((options.out / name).with_suffix(PLANS), json.dumps(plans) + "\n")
        write_result(options.out / f"{name}.json", facts | record, {model: digest})
    (options.out / "summary.md").write_text(summary(options.out), encoding="utf-8")


def config_path(model: str) -> Path:
    return (HERE.parents[2] / "configs" / f"{model}.yaml").resolve()


def read_budget(model: str) -> str:
    return next(
        line.split()[1]
        for line in config_path(model).read_text(encoding="utf-8").splitlines()
        if line.startswith("budget:")
    )


def tune(model: str, options: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the JSON document of the command, which runs in a temporary directory, and the kernels that it compared."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", "tune", str(config_path(model)), *options, "--json"]
        process = run_to_end(command, cwd=folder, capture_output=True)
        captures = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("runs/*/captures.json")]
    if process.returncode:
        sys.exit(f"{model}: exit {process.returncode}\n{process.stderr[-2000:]}")
    return json.loads(process.stdout), captures[0] if captures else []


def trial_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each trial whose peak was measured, re-measurements included."""
    rows = []
    for trial in document["trials"]:
        measurement, predicted = trial["measurement"], trial["estimate"]
        if trial["kind"] == "repeat" or not predicted or not measurement or measurement["peak_bytes"] is None:
            continue
        measured = measurement["peak_bytes"] - measurement["floor_bytes"]
        rows.append(
            {
                "trial": trial["number"],
                "kind": trial["kind"],
                "outcome": measurement["outcome"],
                "predicted_peak_bytes": predicted["peak_bytes"],
                "measured_peak_bytes": measured,
                "error_percent": round(100 * (predicted["peak_bytes"] / measured - 1), 3),
                "charged_bytes": None
                if measurement["charged_bytes"] is None
                else measurement["charged_bytes"] - measurement["floor_bytes"],
                "time_ratio": time_ratio(measurement),
                "transfer_bytes": measurement["transfer_bytes"],
                "stall_seconds": measurement["stall_seconds"],
                "max_error": measurement["max_error"],
            }
        )
    return rows


def time_ratio(measurement: dict[str, Any]) -> float | None:
    """Return the tool's ratio: the median step over eager's of the same round."""
    ratio = from_json(Measurement, measurement, where="measurement").time_ratio
    return None if ratio is None else round(ratio, 4)


def summarize_run(document: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the main figures of a run."""
    eager, best = (document[name]["measurement"] for name in ("baseline", "best"))
    smallest = next((row for row in rows if row["kind"] == "smallest"), {})
    return {
        "eager_peak_bytes": eager["peak_bytes"] - eager["floor_bytes"],
        "eager_charged_bytes": eager["charged_bytes"] - eager["floor_bytes"],
        "best_peak_bytes": best["peak_bytes"] - best["floor_bytes"],
        "best_charged_bytes": best["charged_bytes"] - best["floor_bytes"],
        "best_time_ratio": time_ratio(best),
        "best_time": find_confirmed(document),
        "best_from": find_origin(document),
        "best_max_error": best["max_error"],
        "smallest": {key: smallest.get(key) for key in ("charged_bytes", "time_ratio", "transfer_bytes")},
        "trials_that_ran": len(rows),
        "largest_error_percent": max(abs(row["error_percent"]) for row in rows),
    }


def find_confirmed(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the best plan's time over eager's as a JSON `Interval`, from its re-measurements; None without any."""
    best = (row for row in document["confirmed"] if row["verdict"] == "BEST" and row["time_ratio"])
    interval: dict[str, Any] | None = next((row["time_ratio"] for row in best), None)
    return interval


def find_origin(document: dict[str, Any]) -> str:
    """Return the `TrialKind` of the first trial with the best plan, such as `planner` or `move`; `unknown` if none has it."""
    kinds = (trial["kind"] for trial in document["trials"] if trial["plan"] == document["best"]["plan"])
    return str(next(kinds, "unknown"))


def format_time(record: dict[str, Any]) -> str:
    """Return the best plan's time over eager's, with its interval if that was recorded."""
    if not record.get("best_time"):
        return f"{record['best_time_ratio']:.3f}x"
    return format_interval(from_json(Interval, record["best_time"], where="best_time"))


def format_choices(record: dict[str, Any]) -> list[str]:
    """Return a row for each combination of kernels, memory format and rebuild price that a run compared."""
    captures = [MeasuredCapture(**capture) for capture in record.get("captures", [])]
    chosen = select_capture(captures) if captures else None
    rows = []
    for capture in captures:
        is_timed = capture.outcome == Outcome.OK and capture.time_ratio is not None
        reason = shorten_reason(capture.detail) or capture.outcome
        ratio = f"{capture.time_ratio:.3f} ± {capture.time_ratio * capture.noise:.3f}" if is_timed else reason
        tuned_time = format_time(record) if capture is chosen else ""
        rows.append(f"| {capture.name} | {mib(capture.charged_bytes)} | {ratio} | {tuned_time} |")
    return rows


def summary(folder: Path) -> str:
    """Format one table of all runs with a result, and one of the kernels that runs compared."""
    choices: list[str] = []
    lines = [
        "| run | eager: peak, charged MiB | budget | best: charged MiB | time | kind of its first trial | results | smallest: charged MiB | time "
        "| through the disk, MiB a step | measurements with a peak | largest error of the predicted peak |",
        "|---|--:|--:|--:|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(PLANS):
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        results = "bit for bit" if record["best_max_error"] == 0 else f"off by {record['best_max_error']:.1e}"
        small = record["smallest"]
        cells = [
            path.stem,
            f"{mib(record['eager_peak_bytes'])}, {mib(record['eager_charged_bytes'])}",
            record["budget"],
            mib(record["best_charged_bytes"]),
            format_time(record),
            record.get("best_from", "not recorded"),
            results,
            mib(small["charged_bytes"]),
            "-" if small["time_ratio"] is None else f"{small['time_ratio']:.3f}x",
            mib(small["transfer_bytes"]),
            str(record["trials_that_ran"]),
            f"{record['largest_error_percent']:.2f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        choices += [f"| {path.stem} {row}" for row in format_choices(record)]
    if choices:
        lines += ["", "Kernels that runs compared, each by the planners' fastest plan for the budget:", ""]
        lines += [
            "| run | kernels, memory format | charged MiB | time over eager's | tuned on these |",
            "|---|---|--:|--:|--:|",
        ]
        lines += choices
    return "\n".join(lines) + "\n"


def mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
