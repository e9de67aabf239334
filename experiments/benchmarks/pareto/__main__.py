"""Search a verified Pareto front of ResNet-50 and GPT-2 with the command line, and compare its points with recorded peers."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.measure.device.this_device import this_device
from autotune.study.captures import MeasuredCapture, select_capture
from autotune.units import mib
from experiments.benchmarks.frontier.models import MODELS as FRONTIER_MODELS
from experiments.benchmarks.pareto.comparison import (
    MEASURES,
    POINTS_WANTED,
    PeerVerdict,
    compare_with_peers,
    read_peers,
)
from experiments.common.commands import run_to_end
from experiments.common.facts import collect_facts, format_origin
from experiments.common.result_file import write_result

HERE = Path(__file__).parent
FRONTIER = HERE.parent / "frontier" / "results"
MODELS = {name: FRONTIER_MODELS[name] for name in ("resnet50", "gpt2")}
"""Workload and arguments by name: those whose peers `experiments/benchmarks/frontier` records."""
KERNELS = {"any": ["--kernels", "any"], "aten": []}
"""Options of `tune`: the fastest of all kernels and memory formats, or eager's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--time", default="20m", help="for each search")
    parser.add_argument("--trials", type=int, help="most searched trials; by default the time alone ends a search")
    parser.add_argument("--kernels", default="any", choices=KERNELS, help="kernels and memory formats of the plans")
    parser.add_argument("--frontier", type=Path, help="folder of the peers' records; by default this processor's")
    parser.add_argument("--out", type=Path, help="by default results/NAME, named by the processor")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    parser.add_argument("--summary", action="store_true", help="measure nothing, compare and write the tables again")
    options = parser.parse_args()
    key = this_device("cpu").key
    out = options.out or HERE / "results" / f"{'tiny-' if options.tiny else ''}{key}"
    frontier = options.frontier or FRONTIER / f"{'tiny-' if options.tiny else ''}{key}"
    out.mkdir(parents=True, exist_ok=True)
    for name in () if options.summary else options.models:
        model, arguments = MODELS[name]
        if options.tiny:
            from tests.workloads.zoo.tiny import TINY

            arguments = {**TINY[model]}
        facts, began = collect_facts(), time.monotonic()
        limits = ["--time", options.time, *(["--trials", str(options.trials)] if options.trials else [])]
        document, table, captures = tune(model, arguments, [*KERNELS[options.kernels], *limits])
        record = facts | {
            "model": model,
            "arguments": arguments,
            "kernels": options.kernels,
            "captures": captures,
            "load": {"began": facts["load_before"], "ended": os.getloadavg()[0]},
            "seconds": round(time.monotonic() - began),
            **summarize_run(document),
            **{name: table[name] for name in ("limit_bytes", "eager_bytes", "plans")},
        }
        digest = captures[0]["graph_digest"] if captures else document["best"]["graph_digest"]
        write_result(out / f"{name}.json", record, {name: digest})
    text = summarize(out, frontier)
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text)


def tune(
    model: str, arguments: Mapping[str, Any], options: list[str]
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return the JSON document of the command, the table of its front, and the kernels that it compared.

    The command runs in a temporary directory.
    """
    pairs = [f"{key}={json.dumps(value)}" for key, value in arguments.items()]
    settings = [argument for pair in pairs for argument in ("--set", pair)]
    with tempfile.TemporaryDirectory(prefix="pareto-") as folder:
        command = [
            sys.executable,
            "-m",
            "autotune",
            "tune",
            model,
            *settings,
            "--objective",
            "pareto",
            "--name",
            "front",
        ]
        process = run_to_end([*command, *options, "--json"], cwd=folder, capture_output=True)
        if process.returncode:
            sys.exit(f"{model}: exit {process.returncode}\n{process.stderr[-2000:]}")
        run = Path(folder) / "runs" / "front"
        table = json.loads((run / "front" / "table.json").read_text(encoding="utf-8"))
        compared = run / "captures.json"
        captures = json.loads(compared.read_text(encoding="utf-8")) if compared.exists() else []
    return json.loads(process.stdout), table, captures


def summarize_run(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a study: its trials by kind, those that ran, and what disturbed them."""
    trials = document["trials"]
    ran = [trial for trial in trials if trial["plan"] and trial["kind"] != "repeat" and has_run(trial)]
    return {
        "trials": len(trials),
        "trials_that_ran": len(ran),
        "kinds": {kind: sum(trial["kind"] == kind for trial in trials) for kind in sorted({t["kind"] for t in trials})},
        "disturbed": document["disturbed"],
    }


def has_run(trial: Mapping[str, Any]) -> bool:
    """Return true if the plan of a trial was executed, rather than rejected by its estimate."""
    measurement = trial["measurement"]
    return bool(measurement and (measurement["outcome"] != "over_budget" or measurement["peak_bytes"] is not None))


def summarize(out: Path, frontier: Path) -> str:
    """Compare every recorded front with the recorded peers, and return the summary page."""
    lines = [
        f"Target: at least {POINTS_WANTED} verified points, none of them dominated by a peer. A point is faster than every smaller one,"
        " and each interval excludes equal time. A peer has eager's gradients, and eager's kernels beside a front on those; its bytes and"
        " seconds are of `experiments/benchmarks/frontier`, in a session of its own, with glibc's malloc as the front. It dominates a point if it needs no more bytes, by peak or by"
        " charge, and its interval of time lies below the point's.",
        "",
        "| model | kernels | points | smallest, MiB | time | fastest, MiB | time | eager's peak, MiB | plans that ran | peers that were timed "
        "| dominated at peak | at charge | within the noise |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    details: list[str] = []
    for path in sorted(out.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        kernels = record.get("kernels", "aten")
        peers = read_peers(frontier, path.stem, record["arguments"], compiled=kernels == "any")
        timed = [peer for peer in peers if peer.ratio]
        compared = {measure: compare_with_peers(record["plans"], peers, measure) for measure in MEASURES}
        flat = [comparison for measure in MEASURES for comparison in compared[measure]]
        front = [row for row in record["plans"] if row["status"] == "front"]
        counts = [
            sum(one.verdict is PeerVerdict.DOMINATED for one in compared[measure]) if timed else "-"
            for measure in MEASURES
        ]
        noisy = sum(one.verdict is PeerVerdict.UNCERTAIN for one in flat) if timed else "-"
        ends = [cell for row in (front[0], front[-1]) for cell in (mib(row["step_charged_bytes"]), _ratio(row))]
        cells = [
            path.stem,
            kernels,
            len(front),
            *ends,
            mib(record["eager_bytes"]),
            record["trials_that_ran"],
            f"{len(timed)} of {len(peers)}",
        ]
        lines.append(f"| {' | '.join(map(str, [*cells, *counts, noisy]))} |")
        details += [
            "",
            f"## {path.stem}",
            "",
            format_origin(record),
            "",
            *_list_captures(record),
            *_table(record["plans"]),
        ]
        details += _list_dominated(flat)
    return "\n".join([*lines, *details]) + "\n"


def _list_captures(record: Mapping[str, Any]) -> list[str]:
    measured = [MeasuredCapture(**each) for each in record.get("captures", ())]
    if not measured:
        return []
    return [*(f"- {each}" for each in measured), f"- tuned on {select_capture(measured).name}", ""]


def _table(plans: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| plan | charged MiB | of eager | time | interval | blocks | runs | status |",
        "|--:|--:|--:|--:|---|--:|--:|---|",
    ]
    for row in plans:
        ratio, share = row["time_ratio"], row["share_of_eager"]
        interval = "-" if ratio is None else f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        blocks = "-" if ratio is None else ratio["samples"]
        cells = [
            row["plan"], mib(row["step_charged_bytes"]), "-" if share is None else f"{100 * share:.1f} %", _ratio(row),
            interval, blocks, row["rounds"], row["status"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _list_dominated(compared: list[Any]) -> list[str]:
    lines = [
        f"- plan {one.plan} at {one.measure}: {one.verdict} by {one.peer}, {mib(one.peer_bytes)} MiB at {one.peer_ratio:.3f}x"
        for one in compared
        if one.verdict is not PeerVerdict.CLEAR
    ]
    return ["", *lines] if lines else []


def _ratio(row: Mapping[str, Any]) -> str:
    return "-" if row["time_ratio"] is None else f"{row['time_ratio']['middle']:.3f}x"


if __name__ == "__main__":
    main()
