"""Run two nights of one config, and record what the second one verifies.

`python -m experiments.benchmarks.nights`

Recorded nights are not run again. Run the command again to continue an interrupted night.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune.records.run_dir import write_text
from experiments.common.commands import exit_unfinished, run_to_end
from experiments.common.facts import ROOT, collect_facts, format_origin
from experiments.common.long_run import parse_paths
from experiments.common.result_file import write_result
from experiments.common.resumption import note_session, resume_results

HERE = Path(__file__).parent
NIGHTS = 2
TINY = f"""
time: 2m
entries:
  - {{name: tiny, workload: '{ROOT}/experiments/common/tiny_workload.py:make', budget: 80%, time: 110s, trials: 4, samples: 4}}
"""
"""Config of the tiny nights."""

RunCommand = Callable[[Sequence[str], Path], tuple[int, str]]
"""`run(command, directory)`: exit code and standard output of a command."""


def run_command(command: Sequence[str], directory: Path) -> tuple[int, str]:
    """Run a command in a directory; its standard error is shown."""
    process = run_to_end(command, cwd=directory, stdout=subprocess.PIPE)
    return process.returncode, process.stdout


def run_nights(
    config: Path, work: Path, out: Path, facts: Callable[[], dict[str, Any]], run: RunCommand = run_command
) -> dict[str, Any]:
    """Run the nights that the results lack, and return all results.

    Args:
        config: config of the nights.
        work: directory in which the nights run; its `runs/` keeps champions and histories between two calls.
        out: directory of the results.
        facts: collects machine, commit and date.
        run: runs a command.
    """
    path, begun = out / "nights.json", work / "begun"
    session = facts()
    results = resume_results(path, session, {"nights": []})
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(results["nights"]) + 1, NIGHTS + 1):
        # `--resume` continues the latest night: it has to be of these results, and not on record
        latest = max((path.parent.name for path in work.glob("runs/**/nights/*/nightly.json")), default=None)
        is_new = latest is not None and latest not in (night["night"] for night in results["nights"])
        mark = f"{number} {out.resolve()}"
        is_resumed = is_new and begun.exists() and begun.read_text(encoding="utf-8") == mark
        write_text(begun, mark)
        command = [
            sys.executable,
            "-m",
            "autotune",
            "nightly",
            str(config),
            *(["--resume"] if is_resumed else []),
            "--json",
        ]
        began = time.monotonic()
        try:
            code, text = run(command, work)
        except KeyboardInterrupt:
            exit_interrupted(number)
        document = read_night(text)
        if document is None:
            raise SystemExit(f"night {number} ended with exit code {code}; run the command again to continue")
        if document["interrupted"]:
            exit_interrupted(number)
        seconds = round(time.monotonic() - began)
        name = str(config.relative_to(ROOT)) if config.is_relative_to(ROOT) else config.name
        results["nights"].append({"seconds": seconds, "code": code, "resumed": is_resumed, **document, "config": name})
        copy_pages(work, document["night"], out / f"night-{number}")
        note_session(results, session)
        write_result(path, results, read_graphs(results))
    write_text(out / "summary.md", summarize(results))
    return results


def exit_interrupted(number: int) -> NoReturn:
    """End this process as unfinished, in the night with this number."""
    exit_unfinished(f"night {number} was interrupted; run the command again to continue")


def read_night(text: str) -> dict[str, Any] | None:
    """Return the JSON document of a night; None where the command printed an error instead."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) and "entries" in document else None


def read_graphs(results: dict[str, Any]) -> dict[str, str]:
    """Return the first digits of each entry's graph digest, as the nights record them."""
    entries = [entry for night in results["nights"] for entry in night["entries"]]
    return {
        entry["entry"]: graph
        for entry in entries
        if (graph := (entry.get("conditions") or {}).get("code", {}).get("graph"))
    }


def copy_pages(work: Path, night: str, target: Path) -> None:
    """Copy the pages of a night: table and JUnit file."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("nightly.md", "junit.xml"):
        for source in work.glob(f"runs/**/nights/{night}/{name}"):
            shutil.copyfile(source, target / name)


def summarize(results: dict[str, Any]) -> str:
    """Format a table with a row for each entry and night."""
    champions = {entry["entry"]: entry["champion"] for entry in results["nights"][0]["entries"]}
    second = results["nights"][-1]["entries"]
    kept = sum(bool(champions.get(entry["entry"])) and entry["verdict"] in ("same", "promoted") for entry in second)
    lines = [
        format_origin(results), "",
        f"The second night verified the champions of {kept} of {len(second)} entries.", "",
        "| entry | night | verdict | champion | time over eager's | seconds | detail |", "|---|--:|---|---|--:|--:|---|",
    ]  # fmt: skip
    names = [entry["entry"] for entry in second]
    for name in names:
        for number, night in enumerate(results["nights"], start=1):
            for entry in night["entries"]:
                if entry["entry"] != name:
                    continue
                ratio = "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
                detail = entry["detail"].replace("|", "\\|") or "-"
                lines.append(
                    f"| {name} | {number} | {entry['verdict']} | {entry['champion'][:8] or '-'} | {ratio} | "
                    f"{entry['seconds']:.0f} | {detail} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    config, work, out = parse_paths(
        __doc__ or "", HERE, config="nightly.yaml", tiny=TINY, tiny_help="two short nights, to test the command"
    )
    print(summarize(run_nights(config, work, out, collect_facts)))


if __name__ == "__main__":
    main()
