"""Tune with two threads, seeded by a tuning with one thread and unseeded, and compare how soon both find a good plan.

`python -m experiments.benchmarks.transfer`

Recorded tunings are not run again. Run the command again after an interruption.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.records.run_dir import write_text
from autotune.records.trial import load_trials
from experiments.common.commands import run_to_end
from experiments.common.facts import ROOT, collect_facts, format_origin
from experiments.common.long_run import parse_paths
from experiments.common.result_file import write_result
from experiments.common.resumption import note_session, resume_results

HERE = Path(__file__).parent
MARGIN = 0.02
"""Maximum excess of a good plan's time over the fastest plan's, as a share."""
TUNINGS = {"source": 1, "unseeded": 2, "seeded": 2}
"""Threads of each tuning, in order."""
TINY = f"""
workload: {ROOT}/experiments/common/tiny_workload.py:make
budget: 80%
time: 2m
trials: 8
samples: 4
"""
"""Config of the tiny tunings."""

RunCommand = Callable[[Sequence[str], Path, Mapping[str, str]], tuple[int, str]]
"""`run(command, directory, environment)`: exit code and standard output of a command."""


def run_command(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command in a directory with additional variables; its standard error is shown."""
    process = run_to_end(command, cwd=directory, env={**os.environ, **environment}, stdout=subprocess.PIPE)
    return process.returncode, process.stdout


def run_tunings(
    config: Path, work: Path, out: Path, facts: Callable[[], dict[str, Any]], run: RunCommand = run_command
) -> dict[str, Any]:
    """Run the tunings that the results lack, and return all results.

    Args:
        config: config of all three tunings.
        work: directory in which they run; its `runs/` keeps their records between two calls.
        out: directory of the results.
        facts: collects machine, commit and date.
        run: runs a command.
    """
    path = out / "transfer.json"
    session = facts()
    results = resume_results(path, session, {"tunings": {}})
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    for name, threads in TUNINGS.items():
        if name in results["tunings"]:
            continue
        shutil.rmtree(work / "runs" / name, ignore_errors=True)  # a continued search would count its time twice
        command = [sys.executable, "-m", "autotune", "tune", str(config), "--name", name, "--json"]
        command += ["--seed-from", "runs/source"] if name == "seeded" else []
        count = str(threads)
        began = time.monotonic()
        code, text = run(command, work, {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count})
        if code:
            raise SystemExit(f"tuning {name} ended with exit code {code}; run the command again to continue")
        document = json.loads(text)
        results["tunings"][name] = {
            "threads": threads,
            "seconds": round(time.monotonic() - began),
            "confirmed": document["confirmed"],
            "disturbed": document["disturbed"],
            "graph": read_graph(work / "runs" / name / "trials.jsonl"),
            "trials": read_trials(work / "runs" / name / "trials.jsonl"),
        }
        note_session(results, session)
        write_result(path, results, {"workload": results["tunings"][name]["graph"]})
    write_text(out / "summary.md", summarize(results))
    return results


def read_trials(path: Path) -> list[dict[str, Any]]:
    """Return number, kind, outcome, time ratio and seconds of each recorded trial, in order.

    `seconds` is the time from the start of the baseline to the end of the trial. A trial's end is the start of the next one,
    because only starts are recorded. It is None for the last trial.
    """
    records = load_trials(path)
    ends = [record.started - records[0].started for record in records[1:]] + [None]
    return [
        {
            "number": record.number,
            "kind": record.kind.value,
            "outcome": record.measurement.outcome.value if record.measurement is not None else None,
            "ratio": record.measurement.time_ratio if record.measurement is not None else None,
            "seconds": ended,
        }
        for record, ended in zip(records, ends, strict=True)
    ]


def read_graph(path: Path) -> str:
    """Return the digest of the graph whose plans a run measured."""
    return load_trials(path)[-1].graph_digest


def find_best(tuning: Mapping[str, Any]) -> float | None:
    """Return the lowest time ratio of a tuning's search, each plan measured once."""
    return min((trial["ratio"] for trial in tuning["trials"] if is_good(trial)), default=None)


def is_good(trial: Mapping[str, Any]) -> bool:
    """Return True if the search measured a trial's plan for the first time, and it ran within the budget.

    Measurements that confirm a plan are left out: they run beside another eager process.
    """
    is_first = trial["kind"] not in ("baseline", "repeat", "confirm")
    return trial["outcome"] == "ok" and trial["ratio"] is not None and is_first


def find_first_good(tuning: Mapping[str, Any], limit: float) -> tuple[int, float | None] | None:
    """Return (trials, seconds) from the baseline to the first plan with a time ratio of at most `limit`.

    The count contains that plan's trial. None if no plan is fast enough. The seconds are None if the trial is the last.
    """
    for count, trial in enumerate(tuning["trials"]):
        if is_good(trial) and trial["ratio"] <= limit:
            return count, trial["seconds"]
    return None


def summarize(results: Mapping[str, Any]) -> str:
    """Format a table of both tunings with two threads, and what the seeds saved."""
    tunings = {name: tuning for name, tuning in results["tunings"].items() if name != "source"}
    bests = [best for best in map(find_best, tunings.values()) if best is not None]
    lines = [format_origin(dict(results)), ""]
    if not bests:
        return "\n".join([*lines, "No tuning measured a plan within the budget."]) + "\n"
    best = min(bests)
    firsts = {name: find_first_good(tuning, best * (1 + MARGIN)) for name, tuning in tunings.items()}
    lines += [
        f"The fastest plan takes {best:.3f} of eager's time; a plan within 2 % of it takes at most {best * (1 + MARGIN):.3f}.", "",
        "| tuning | threads | best | trials until within 2 % | seconds until then | trials in all | other work |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    for name, tuning in results["tunings"].items():
        first_good, own = firsts.get(name), find_best(tuning)
        count, seconds = ("-", "-") if first_good is None else (str(first_good[0]), format_seconds(first_good[1]))
        lines.append(
            f"| {name} | {tuning['threads']} | {'-' if own is None else f'{own:.3f}'} | {count} | {seconds} | "
            f"{len(tuning['trials'])} | {tuning['disturbed'] or '-'} |"
        )
    return "\n".join([*lines, "", describe_saving(firsts["unseeded"], firsts["seeded"])]) + "\n"


def format_seconds(seconds: float | None) -> str:
    """Return seconds as a whole number; a dash where the trial was the last."""
    return "-" if seconds is None else f"{seconds:.0f}"


def describe_saving(unseeded: tuple[int, float | None] | None, seeded: tuple[int, float | None] | None) -> str:
    """Return one sentence about what the seeds saved."""
    if seeded is None:
        return "The seeded tuning did not reach this time."
    if unseeded is None:
        return "Only the seeded tuning reached this time."
    sentence = f"The seeds saved {unseeded[0] - seeded[0]} trials"
    if unseeded[1] is None or seeded[1] is None:
        return f"{sentence}."
    return f"{sentence} and {unseeded[1] - seeded[1]:.0f} s; a negative number is a loss."


def main() -> None:
    config, work, out = parse_paths(
        __doc__ or "",
        HERE,
        config="resnet18.yaml",
        tiny=TINY,
        tiny_help="a small model and short tunings, to test the command",
    )
    print(summarize(run_tunings(config, work, out, collect_facts)))


if __name__ == "__main__":
    main()
