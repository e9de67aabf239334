"""Tune one config several times, some of them beside a job that loads one core, and compare what the searches end with.

`python -m experiments.benchmarks.repeated_tunes --runs 5 --loaded 2`

Runs that the results do not have yet are measured: run it again to continue. `--fresh` measures all of them again.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common.commands import run_to_end
from experiments.common.facts import ROOT, collect_facts, format_origin
from experiments.common.result_file import write_result
from experiments.common.resumption import note_session, resume_results

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "resnet18.yaml")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loaded", type=int, default=2, help="number of runs beside a job that loads one core")
    parser.add_argument("--time", help="time limit of each search; the config's by default")
    parser.add_argument("--fresh", action="store_true", help="drop the runs that the results have")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    facts = collect_facts()
    results = resume_results(path, facts, {"runs": []}, fresh=options.fresh)
    limits = ["--time", options.time] if options.time else []
    for number in range(len(results["runs"]), options.runs):
        loaded = number >= options.runs - options.loaded
        print(f"run {number}{' beside a job that loads one core' if loaded else ''}", file=sys.stderr, flush=True)
        results["runs"].append(tune(options.config.resolve(), limits, loaded=loaded))
        note_session(results, facts)
        write_result(path, results, {options.config.stem: results["runs"][-1].get("graph", "")})
    (options.out / "summary.md").write_text(summary(results), encoding="utf-8")
    print(summary(results))


def tune(config: Path, limits: list[str], *, loaded: bool) -> dict[str, Any]:
    """Run one search in a temporary directory; return its ending."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, busy_core() if loaded else contextlib.nullcontext():
        process = run_to_end(
            [sys.executable, "-m", "autotune", "tune", str(config), *limits, "--json"], cwd=folder, capture_output=True
        )
    record = {"loaded": loaded, "load": load, "seconds": round(time.monotonic() - began), "code": process.returncode}
    if process.returncode:
        return record | {"error": process.stderr.strip().splitlines()[-1]}
    return record | read_ending(json.loads(process.stdout))


def read_ending(document: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that a search ended with, beside all re-measured ones, from its JSON document."""
    best, trials = document["best"], document["trials"]
    first = next((trial for trial in trials if trial["kind"] == "smallest"), None)
    measurement = best["measurement"]
    measured = [trial for trial in trials if trial["kind"] not in ("baseline", "repeat")]
    row = next((row for row in document["confirmed"] if row["trial"] == best["number"]), None)
    return {
        "graph": best.get("graph_digest", ""),
        "best": best["number"],
        "kind": best["kind"],
        "is_smallest": first is not None and best["plan"] == first["plan"],
        "smallest_ratio": None if first is None else _ratio_to_eager(first["measurement"]),
        "confirmed": row is not None,
        "charged_bytes": measurement["charged_bytes"] - measurement["floor_bytes"],
        "time_ratio": None if row is None else row["time_ratio"],
        "over_budget": sum((trial["measurement"] or {}).get("outcome") == "over_budget" for trial in trials),
        "trials": len(trials),
        "measured": sum(bool((trial["measurement"] or {}).get("step_seconds")) for trial in measured),
        "eager_seconds": statistics.median(trials[0]["measurement"]["step_seconds"]),
        "disturbed": document["disturbed"],
    }


def is_good(run: dict[str, Any]) -> bool:
    """Return True for a confirmed plan that is another than the smallest, or for a search that reports a busy machine."""
    return not run["code"] and bool((run["confirmed"] and not run["is_smallest"]) or run["disturbed"])


def count_faster(runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return how many confirmed plans are faster than the smallest one, and how many have its time; older runs have none."""
    timed = [run for run in runs if not run["code"] and run.get("smallest_ratio") is not None and run["time_ratio"]]
    return sum(run["time_ratio"]["high"] < run["smallest_ratio"] for run in timed), len(timed)


def _ratio_to_eager(measurement: dict[str, Any] | None) -> float | None:
    """Return the median ratio of a trial's steps to eager's, of its one measurement in the search; None without both."""
    plain, steps = ((measurement or {}).get(key) for key in ("baseline_seconds", "step_seconds"))
    return statistics.median(steps) / statistics.median(plain) if plain and steps else None


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Load one core while the block runs."""
    job = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        job.kill()
        job.wait()


def summary(results: dict[str, Any]) -> str:
    """Format a table of the runs."""
    runs = results["runs"]
    faster, timed = count_faster(runs)
    lines = [
        format_origin(results),
        "",
        f"{sum(map(is_good, runs))} of {len(runs)} searches ended with a confirmed plan other than the smallest one, or reported a busy "
        f"machine. Beside the smallest plan's time {timed} of them can be compared, and {faster} are faster.",
        "",
        "| run | beside | best plan | charged MiB | time over eager's | over budget | smallest: time | plans timed | eager's step, ms | seconds | other work |",
        "|--:|---|---|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    for number, run in enumerate(runs):
        beside = "a busy core" if run["loaded"] else "nothing"
        if run["code"]:
            lines.append(
                f"| {number} | {beside} | exit {run['code']}: {run['error']} | | | | | | | {run['seconds']} | |"
            )
            continue
        ratio = run["time_ratio"]
        interval = "-" if ratio is None else f"{ratio['middle']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        cells = [
            str(number), beside, f"{run['best']}, {'smallest' if run['is_smallest'] else run['kind']}",
            f"{run['charged_bytes'] / 2**20:.1f}", interval, str(run["over_budget"]), _number(run.get("smallest_ratio")),
            str(run.get("measured", "-")),
            f"{1e3 * run['eager_seconds']:.0f}" if "eager_seconds" in run else "-", str(run["seconds"]), run["disturbed"] or "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
