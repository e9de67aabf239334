"""One training step under glibc's malloc, jemalloc, tcmalloc and the arena: charged bytes, seconds, page faults, results.

`python -m experiments.benchmarks.allocators [--models NAME...] [--time 300]` measures in alternating blocks and writes `results/`.

Models that the results have are left out, unless `--models` names them: run it again to continue.
"""

import argparse
import ctypes.util
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.child import Child
from autotune.measure.device.this_device import this_device
from autotune.measure.interleaving import describe_mismatch
from autotune.measure.messages import BeginTiming, DigestsRequest, FinishTiming, SurveyRequest, TimeBlock
from autotune.measure.spec import Spec
from autotune.predict.simulate import simulate
from autotune.records.json_codec import to_json
from autotune.study.verdicts.statistics import CONFIDENCE, Interval, median_interval
from autotune.workloads.reference import WorkloadRef
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_interval, is_same_machine, judge_at_most, list_arguments
from experiments.common.result_file import (
    NOT_RECORDED,
    ORIGINS,
    capture_digests,
    join_digests,
    read_origins,
    write_result,
)

HERE = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 8},
    "mobilenet_v2": {"batch": 8},
    "gpt2": {"batch": 8},
    "lstm": {"batch": 32},
}
ALLOCATORS = {"glibc": "", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal", "arena": ""}
"""Preloaded library of each allocator."""
PACKAGES = "libjemalloc2 libtcmalloc-minimal4"
LEAST_ROUNDS = 6
LIMIT_SECONDS = 600.0
"""Time limit of one reply of a child process, in seconds."""
SLOWER, EXCESS = 1.02, 0.01
"""Targets of the arena: its time over the fastest other's, and its charge over the predicted bytes, less 1."""
MIB = 2**20


def preload_environment(library: str) -> dict[str, str]:
    """Return the environment that puts a library's malloc in front of glibc's."""
    if not library:
        return {}
    path = ctypes.util.find_library(library)
    if path is None:
        raise SystemExit(
            f"there is no lib{library} here: apt-get install {PACKAGES}, or leave it out with --allocators"
        )
    return {"LD_PRELOAD": path}


def loaded_library(pid: int, library: str) -> str:
    """Return the file of that library in a process, or "" for glibc's own. SystemExit: it is not loaded."""
    if not library:
        return ""
    names = {
        line.split()[-1]
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        if f"lib{library}" in line
    }
    if not names:
        raise SystemExit(f"lib{library} was not loaded into the process")
    return Path(min(names)).name


def measure(
    model: str, arguments: dict[str, Any], allocators: list[str], rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure every allocator in its own process, all alive at once; one runs a block of steps while the others rest."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allocators-")))
        spec = Spec(WorkloadRef(model, arguments), scratch, scratch=scratch)

        def start(name: str) -> Child:
            library = ALLOCATORS.get(name, "")
            child = Child.start(spec, scratch / f"{name}.log", preload_environment(library))
            stack.callback(child.end)
            return child

        log(f"{model}: profile")
        child = start("prepare")
        surveyed = child.ask(SurveyRequest(), LIMIT_SECONDS)
        child.end()
        graph, costs = surveyed.graph, surveyed.costs
        traced = Plan.traced(graph)
        record: dict[str, Any] = {
            "arguments": arguments,
            "predicted_step_bytes": simulate(graph, lower(graph, traced), costs).peak_bytes,
            "static_bytes": graph.static_bytes,
            "ops": len(graph.ops),
            "load": [os.getloadavg()[0]],
            "allocators": {name: {"charged_bytes": 0} for name in allocators},
            "blocks": [],
        }
        plans = {name: Plan(traced.order, allocator="arena" if name == "arena" else "system") for name in allocators}
        children: dict[str, Child] = {}
        for name in allocators:
            log(f"{model}: {name} gets ready")
            child = children[name] = start(name)
            child.ask(BeginTiming(plans[name]), LIMIT_SECONDS)
            first_block = child.ask(TimeBlock(), LIMIT_SECONDS)
            entry = record["allocators"][name]
            entry |= {"library": loaded_library(child.pid, ALLOCATORS[name]), "meter": first_block.meter}
            entry["charged_bytes"] = first_block.charged_bytes
        start = time.monotonic()
        for number in range(rounds):
            if number >= LEAST_ROUNDS and time.monotonic() - start > seconds:
                break
            for name in random.Random(number).sample(allocators, len(allocators)):
                block = children[name].ask(TimeBlock(), LIMIT_SECONDS)
                entry = record["allocators"][name]
                entry["charged_bytes"] = block.charged_bytes
                record["blocks"].append(
                    {
                        "round": number,
                        "allocator": name,
                        "seconds": list(block.seconds),
                        "page_faults": list(block.page_faults),
                    }
                )
        for name, child in children.items():
            log(f"{model}: what {name} left behind")
            end_reply = child.ask(FinishTiming(), LIMIT_SECONDS)
            if end_reply.mismatch:
                raise SystemExit(f"{model}, {name}: {describe_mismatch(end_reply)}")
            record["allocators"][name]["floor_bytes"] = end_reply.floor_bytes
            digests = child.ask(DigestsRequest(plans[name]), LIMIT_SECONDS).digests
            record["allocators"][name]["digests"] = digests
        record["load"].append(os.getloadavg()[0])
    compare_digests(record)
    return record


def compare_digests(record: dict[str, Any]) -> None:
    """Replace the hashes by the names of the results that differ from the first allocator's."""
    digests = {name: entry.pop("digests") for name, entry in record["allocators"].items()}
    first = next(iter(digests.values()))
    for name, hashes in digests.items():
        names = {*hashes, *first}
        differs = sorted(
            name_of_result for name_of_result in names if hashes.get(name_of_result) != first.get(name_of_result)
        )
        record["allocators"][name] |= {"results": len(names), "differs": differs}


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """One allocator on one model."""

    allocator: str
    charged_bytes: int
    """Charged bytes of the step, above the floor."""
    waste: float
    """Charged over predicted bytes of the step, less 1."""
    excess: float
    """Charged over predicted bytes of the whole process, floor included, less 1."""
    median_seconds: float
    ratio: Interval
    """The arena's time over this allocator's, one sample per round."""
    page_faults: float
    """Median number of page faults of a step."""
    equal: bool
    """True if every result and weight equals the first allocator's bit for bit."""


def build_rows(record: Mapping[str, Any]) -> list[AllocatorRow]:
    """Return the figures of each allocator.

    A preloaded malloc's own floor includes freed memory that it keeps. That memory is to count as its cost, so its
    charge is taken above glibc's floor.
    """
    rows = []
    predicted = record["predicted_step_bytes"]
    for name, entry in record["allocators"].items():
        floors = [
            record["allocators"][owner]["floor_bytes"] for owner in (name, "glibc") if owner in record["allocators"]
        ]
        floor = floors[-1] if ALLOCATORS[name] else floors[0]
        charged = entry["charged_bytes"] - floor
        blocks = [block for block in record["blocks"] if block["allocator"] == name]
        rows.append(
            AllocatorRow(
                name,
                charged,
                charged / predicted - 1,
                (entry["charged_bytes"] - floor - predicted) / (floor + predicted),
                statistics.median(second for block in blocks for second in block["seconds"]),
                median_interval(arena_ratios(record, name)),
                statistics.median(faults for block in blocks for faults in block["page_faults"]),
                not entry["differs"],
            )
        )
    return rows


def arena_ratios(record: Mapping[str, Any], other: str) -> list[float]:
    """Return the arena's median step over the other's for each round."""
    steps: dict[int, dict[str, float]] = {}
    for block in record["blocks"]:
        steps.setdefault(block["round"], {})[block["allocator"]] = statistics.median(block["seconds"])
    return [medians["arena"] / medians[other] for medians in steps.values() if other in medians and "arena" in medians]


def fastest_other(rows: list[AllocatorRow]) -> AllocatorRow:
    """Return the fastest allocator except the arena: the one with the largest ratio of the arena's time to its own."""
    return max((row for row in rows if row.allocator != "arena"), key=lambda row: row.ratio.middle)


def overall_ratio(models: Mapping[str, Mapping[str, Any]]) -> Interval:
    """Return the geometric mean over the models of the arena's median time over the fastest other's.

    Its ends are the means of the models' ends. Each model's interval has the confidence with which all contain their
    medians at 95 %. `samples` is the smallest number of rounds; where that is too small, the interval is a range.
    """
    level = 1 - (1 - CONFIDENCE) / len(models)
    ratios = [arena_ratios(record, fastest_other(build_rows(record)).allocator) for record in models.values()]
    intervals = [median_interval(samples, level) for samples in ratios]
    middle, low, high = (
        statistics.geometric_mean(ends)
        for ends in zip(*((interval.middle, interval.low, interval.high) for interval in intervals), strict=True)
    )
    certain = all(interval.confidence is not None for interval in intervals)
    return Interval(middle, low, high, min(map(len, ratios)), CONFIDENCE if certain else None)


def summary(results: Mapping[str, Any]) -> str:
    """Format the summary page."""
    device = results["device"]
    models = results["models"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, {device['driver']}, torch {device['torch']}; measured by"
        f" {', then by '.join(results['commands'])}",
        "",
        "Charged: the highest that the kernel charged the process at any time from its first step on, above the floor. Waste: of it"
        " what lies beyond the predicted bytes of the step (weights, state, batch and the most that lives at once). Excess: the"
        " same bytes, as a part of the whole process that is predicted, floor included. Arena's time: over this allocator's,"
        " median of the rounds. Page faults: median of the measured steps. Results: loss, weights, buffers and optimizer"
        " state after four steps.",
    ]
    for model, record in models.items():
        rows = build_rows(record)
        count = 1 + max(block["round"] for block in record["blocks"])
        lines += [
            "",
            f"## {model} {json.dumps(record['arguments'])}",
            "",
            f"Predicted: {record['predicted_step_bytes'] / MIB:.1f} MiB of a step, {record['static_bytes'] / MIB:.1f} of them static;"
            f" {record['ops']} ops; {count} rounds; load {record['load'][0]:.2f} to {record['load'][1]:.2f}"
            f"{format_commit(results.get(ORIGINS, {}).get(model, {}))}.",
            "",
            "| allocator | charged MiB | waste | excess | step s | arena's time | page faults a step | results |",
            "|---|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in rows:
            entry = record["allocators"][row.allocator]
            name = row.allocator + (f" ({entry['library']})" if entry["library"] else "")
            ratio = "" if row.allocator == "arena" else format_interval(row.ratio)
            bits = f"{entry['results']} equal" if row.equal else f"{len(entry['differs'])} of {entry['results']} differ"
            lines.append(
                f"| {name} | {row.charged_bytes / MIB:.1f} | {row.waste:+.1%} | {row.excess:+.2%} | {row.median_seconds:.3f}"
                f" | {ratio} | {row.page_faults:.0f} | {bits} |"
            )
    lines += ["", "## Held to", "", *target_table(models)]
    return "\n".join(lines) + "\n"


def format_commit(facts: Mapping[str, Any]) -> str:
    """Format commit and date of a model's measurement, behind other facts; empty where they are not recorded."""
    if facts.get("commit", NOT_RECORDED) == NOT_RECORDED:
        return ""
    return f"; commit {facts['commit']}, {facts['date']}"


def target_table(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format each target with the figures, and mark those that are missed or not decided."""
    rows_by_model = {model: build_rows(record) for model, record in models.items()}
    ours = {model: next(row for row in rows if row.allocator == "arena") for model, rows in rows_by_model.items()}
    lines = ["| aim | " + " | ".join(rows_by_model) + " |", "|---" * (1 + len(rows_by_model)) + "|"]

    def line(what: str, cells: list[tuple[str, bool | str]]) -> None:
        verdicts = {True: "", False: "missed"}
        words = [(text, verdict if isinstance(verdict, str) else verdicts[verdict]) for text, verdict in cells]
        lines.append(f"| {what} | " + " | ".join(f"{text}{word and f', {word}'}" for text, word in words) + " |")

    line(
        f"excess of the arena at most {EXCESS:.0%}",
        [(f"{row.excess:+.2%}", row.excess <= EXCESS) for row in ours.values()],
    )
    others = [fastest_other(rows) for rows in rows_by_model.values()]
    line(
        f"time at most {SLOWER} of the best other's",
        [
            (f"{row.allocator}: {format_interval(row.ratio)}", judge_at_most(row.ratio, SLOWER).replace("kept", ""))
            for row in others
        ],
    )
    line(
        "page faults of the arena's step near zero",
        [(f"{row.page_faults:.0f}", row.page_faults < 100) for row in ours.values()],
    )
    line(
        "equal bits",
        [
            ("yes" if all(row.equal for row in rows) else "no", all(row.equal for row in rows))
            for rows in rows_by_model.values()
        ],
    )
    lines += ["", f"Over all models the arena takes {format_interval(overall_ratio(models))} of the best other's time."]
    return lines


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw waste and time of every allocator, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = results["models"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = list(next(iter(models.values()))["allocators"])
    width = 0.8 / len(names)
    for position, name in enumerate(names):
        rows = [next(row for row in build_rows(record) if row.allocator == name) for record in models.values()]
        places = [number + (position - (len(names) - 1) / 2) * width for number in range(len(models))]
        left.bar(places, [100 * row.waste for row in rows], width, label=name)
        # the others' time beside the arena's: one over its own
        ratios = [1 / row.ratio.middle for row in rows]
        errors = [[r - 1 / row.ratio.high for r, row in zip(ratios, rows, strict=True)],
                  [1 / row.ratio.low - r for r, row in zip(ratios, rows, strict=True)]]  # fmt: skip
        right.bar(places, ratios, width, yerr=errors, label=name, error_kw={"linewidth": 1})
    left.set_ylabel("charged beyond the predicted bytes of the step, %")
    right.set_ylabel("time of a step, arena = 1")
    right.axhline(1.0, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set_xticks(range(len(models)), list(models))
        axes.grid(axis="y", alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def log(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="measured, again if they have a result; all without one by default"
    )
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--rounds", type=int, default=60, help="a block of every allocator each, at most")
    parser.add_argument("--time", type=float, default=300.0, help="seconds of rounds for each model")
    parser.add_argument("--out", type=Path, help="a folder; by default results/ beside this file")
    parser.add_argument("--tiny", action="store_true", help="models of a blink, to try the script itself")
    parser.add_argument("--summary", action="store_true", help="measure nothing, regenerate the table and the picture")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    if "arena" not in options.allocators or len(options.allocators) < 2:
        parser.error("--allocators: the arena, and something to compare it with")
    out = options.out or HERE / ("results/tiny-models" if options.tiny else "results")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results: dict[str, Any] = {"device": to_json(this_device("cpu")), "commands": [], "models": {}}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not is_same_machine(stored["device"], results["device"]) and not options.summary:
            raise SystemExit(f"{path} is of another machine: choose another --out, or take it away")
        results = stored
    origins = results[ORIGINS] = read_origins(results, {name: name for name in results["models"]})
    facts = collect_facts()
    refuse_busy_machine(anyway=options.anyway or options.tiny or options.summary)
    models = options.models or [name for name in MODELS if name not in results["models"]]
    for name in () if options.summary else models:
        arguments = _tiny(name) if options.tiny else MODELS[name]
        record = measure(name, arguments, options.allocators, options.rounds, options.time)
        results["models"] = {
            model_name: {**results["models"], name: record}[model_name]
            for model_name in MODELS
            if model_name in {*results["models"], name}
        }
        command = shlex.join(["python", "-m", "experiments.benchmarks.allocators", *list_arguments()])
        results["commands"] = list(dict.fromkeys([*results["commands"], command]))
        origins[name] = {**facts, "graphs": capture_digests({name: (name, arguments)})}
        results |= facts
        write_result(path, results, join_digests(origins))
    text = summary(results)
    (out / "summary.md").write_text(text, encoding="utf-8")
    plot(results, out / "allocators.png")
    print(text)


def _tiny(model: str) -> dict[str, Any]:
    from tests.workloads.zoo.tiny import TINY

    return TINY[model]


if __name__ == "__main__":
    main()
