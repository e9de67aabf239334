"""Measure the largest batches and the samples per second of plain eager and of plans, under an enforced limit.

`python -m experiments.benchmarks.batch_sizes`
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.api.launch import choose_kernels
from autotune.errors import AutotuneError
from autotune.fleet.open_runner import open_runner
from autotune.ir.plan import Plan
from autotune.measure.allocator_env import allocator_environment
from autotune.measure.child import Child
from autotune.measure.interleaving import EAGER, ProcessVariant, RoundLimits, interleave, pair_with_baseline
from autotune.measure.spec import Spec
from autotune.records import plan_file as planfile
from autotune.records.config import Config
from autotune.records.json_codec import from_json, to_json
from autotune.records.run_dir import RunDir
from autotune.study.batch.choice import SEARCH_SHARE, BatchSources, choose_batch
from autotune.study.batch.measurements import enforce_beyond, plan_path
from autotune.study.batch.records import BatchSearch, StepSize, largest_gap, read_batch_search
from autotune.study.captures import CHOSEN
from autotune.study.events import Preparing
from autotune.study.verdicts.statistics import median_interval
from autotune.workloads.loop import Loop
from autotune.workloads.reference import WorkloadRef
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_interval, format_origin, is_same_machine
from experiments.common.result_file import (
    FACTS,
    NOT_RECORDED,
    ORIGINS,
    capture_digests,
    join_digests,
    read_origins,
    refuse_other_graph,
    write_result,
)

HERE = Path(__file__).parent
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"batch": 4, "tokens": 64, "depth": 6, "width": 192, "vocabulary": 512},
    "bert": {"batch": 4, "tokens": 64, "depth": 6, "width": 192, "vocabulary": 512},
    "vit": {"batch": 4, "size": 64, "depth": 6, "width": 192},
    "lstm_fused": {"batch": 8, "tokens": 32, "depth": 2, "width": 192, "vocabulary": 512},
    "resnet18": {"batch": 4, "size": 64, "width": 32},
}
"""Arguments of five workloads with steps of tens of milliseconds."""
TINY: Mapping[str, Mapping[str, Any]] = {"gpt2": {"batch": 4, "tokens": 16, "depth": 2, "width": 32, "vocabulary": 64}}
BUDGET = "200%"
"""Budget of the step, as a share of eager's peak at the workload's own batch."""
SAMPLES = 6
"""Number of timed steps per measurement."""
LIMITS = RoundLimits(rounds=8, least_rounds=3, seconds=25.0, request_seconds=120.0)
"""Rounds of eager and the plan in turns."""
PLAN = "plan"
"""Variant of the chosen plan in the turns."""
OBJECTIVES: Mapping[str, str] = {"batch": "", "throughput": "any"}
"""Kernels of each objective; `any` chooses kernels and memory format at a batch that eager fits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help="names of some workloads; all by default")
    parser.add_argument(
        "--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES),
        help="searches to run; the results of the other one stay",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="time of each search, without its last measurement"
    )
    parser.add_argument("--tiny", action="store_true", help="one workload in the size of a test")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    parser.add_argument("--out", type=Path, help="folder of the result files; results/ by default")
    options = parser.parse_args()
    workloads = TINY if options.tiny else WORKLOADS
    names = options.workloads or list(workloads)
    if unknown := sorted(set(names) - workloads.keys()):
        parser.error(f"unknown workloads {', '.join(unknown)}; known: {', '.join(workloads)}")
    out = options.out or HERE / ("results-tiny" if options.tiny else "results")
    refuse_busy_machine(anyway=options.anyway)
    for name in names:
        path, arguments = out / f"{name}.json", dict(workloads[name])
        facts = collect_facts()
        graphs = capture_digests({name: (name, arguments)})
        document = {**facts, "model": name, "arguments": arguments, "budget": BUDGET}
        kept = read_kept(path, document, graphs, [each for each in OBJECTIVES if each not in options.objectives])
        document |= kept | measure_workload(name, arguments, options.seconds, options.objectives, kept)
        measured = {objective: {**facts, "graphs": graphs} for objective in options.objectives}
        document[ORIGINS] = kept.get(ORIGINS, {}) | measured
        # after each workload: what was measured is kept where a later one fails
        write_result(path, document, join_digests(document[ORIGINS]))
        (out / "summary.md").write_text(summarize(read_documents(out)), encoding="utf-8")
    print(summarize(read_documents(out)))


def read_documents(out: Path) -> list[dict[str, Any]]:
    """Return the result of each workload in a folder; other files in it are left out."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
    return [document for document in documents if "model" in document]


def read_kept(
    path: Path, document: Mapping[str, Any], graphs: Mapping[str, str], objectives: Sequence[str]
) -> dict[str, Any]:
    """Return the stored searches of these objectives, their facts as `origins`, and the turns after the one for throughput.

    SystemExit where they are of another workload, machine or graph. `graphs` has the digest of the workload's graph.
    """
    if not objectives or not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if not is_same_machine(stored["machine"], document["machine"]) or stored["arguments"] != document["arguments"]:
        raise SystemExit(f"{path} is of another machine or of other arguments: leave --objectives out")
    kept = {each: stored[each] for each in objectives if each in stored}
    origins = read_origins(stored, dict.fromkeys(kept, document["model"]))
    for objective, search in kept.items():
        if "commit" in search and objective not in stored.get(ORIGINS, {}):
            # an older version kept this search: its commit is its own, and the facts at the top level are of a later call
            unknown = dict.fromkeys(FACTS, NOT_RECORDED)
            origins[objective] = {**unknown, "machine": stored["machine"], "commit": search["commit"]}
    refuse_other_graph(path, origins, graphs, "leave --objectives out")
    turns = {"turns": stored["turns"]} if "throughput" in kept and "turns" in stored else {}
    return {**kept, **turns, ORIGINS: origins} if kept else {}


def measure_workload(
    name: str, arguments: dict[str, Any], seconds: float, objectives: Sequence[str], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Run searches on a workload; after that for throughput, run eager and the plan in turns, each at its best size."""
    result: dict[str, Any] = {}
    stored = [read_search(kept[each]) for each in OBJECTIVES if each in kept]
    searches = [search for search in stored if search is not None]
    with tempfile.TemporaryDirectory() as folder:
        for objective in objectives:
            config = Config.model_validate(
                {
                    "workload": name, "arguments": arguments, "objective": objective, "budget": BUDGET, "samples": SAMPLES,
                    "time": f"{seconds / SEARCH_SHARE:.0f}s", "runs": folder, "plans": f"{folder}/plans",
                    "kernels": OBJECTIVES[objective],
                }
            )  # fmt: skip
            run_dir = Path(folder) / objective
            try:
                config, search = run_search(config, run_dir)
            except AutotuneError as error:
                result[objective] = {"error": " ".join(str(error).split())}
                continue
            result[objective] = to_json(search)
            if (compared := RunDir(run_dir).captures).exists():
                result[objective]["captures"] = json.loads(compared.read_text(encoding="utf-8"))
            searches.append(search)
            if objective == "throughput":
                result["turns"] = run_in_turns(config, search, best_eager(searches), run_dir)
    return result


def read_search(stored: Mapping[str, Any]) -> BatchSearch | None:
    """Return the search of a result file; None where it ended with an error."""
    if "error" in stored:
        return None
    fields = {key: value for key, value in stored.items() if key not in ("commit", "captures")}
    return from_json(BatchSearch, fields, where="search")


def run_search(config: Config, run_dir: Path) -> tuple[Config, BatchSearch]:
    """Choose kernels where the config leaves them open, then a batch size; return the config and the record of the search."""
    logs = RunDir(run_dir).logs

    def notify(text: str) -> None:
        print(f"{config.workload}: {text}", flush=True)

    config = choose_kernels(
        config, run_dir, lambda event: notify(event.activity if isinstance(event, Preparing) else str(event))
    )
    choose_batch(config, run_dir, BatchSources(lambda sized: open_runner(sized, logs), notify))
    search = read_batch_search(run_dir)
    assert search is not None
    return config, search


def best_eager(searches: Sequence[BatchSearch]) -> list[StepSize]:
    """Return the sizes at which eager may be fastest: the two of the most samples per second in any search, and the largest.

    A search measures one size minutes after another, so its rates alone cannot rank sizes that are nearly as fast.
    """
    rates: dict[StepSize, float] = {}
    for search in searches:
        for each in search.measured:
            if each.eager is not None and each.eager.fits and each.eager.rate is not None:
                rates[each.size] = max(each.eager.rate.middle, rates.get(each.size, 0.0))
    fastest = sorted(rates, key=rates.__getitem__, reverse=True)[:2]
    return list(dict.fromkeys([*fastest, *([max(rates)] if rates else [])]))


def run_in_turns(
    config: Config, search: BatchSearch, eager: Sequence[StepSize], run_dir: Path
) -> dict[str, Any] | None:
    """Time eager at each of its sizes and the chosen plan in turns; None where either is missing."""
    chosen = search.chosen
    if not eager or chosen is None:
        return None
    plan = planfile.read(plan_path(run_dir, chosen)).plan
    sizes = {EAGER: eager[0], **{f"{EAGER} {size}": size for size in eager[1:]}, PLAN: chosen}
    with tempfile.TemporaryDirectory() as scratch:
        variants = {
            # the search compared the plan's results; a step on malloc does not fit in the limit
            name: ProcessVariant(
                partial(start_child, config, search, size, plan if name == PLAN else None, Path(scratch)),
                plan if name == PLAN else None,
                verifies=name != PLAN,
            )
            for name, size in sizes.items()
        }
        times = interleave(variants, LIMITS, lambda text: print(f"{config.workload}: {text}", flush=True))
    return {
        "sizes": to_json(sizes),
        "blocks": times.blocks,
        "charged_bytes": times.charged,
        "failed": times.failed,
        "left_out": times.left_out,
    }


def start_child(config: Config, search: BatchSearch, size: StepSize, plan: Plan | None, scratch: Path) -> Child:
    """Start a process of one batch size under the limit."""
    loop = Loop.parse(search.loop)
    words = config.loop if size.accumulate == loop.accumulate else f"accumulate={size.accumulate}"
    arguments = {**config.arguments, search.argument: size.batch}
    name = f"{EAGER if plan is None else PLAN}-{size.batch}-{size.accumulate}"
    (scratch / name).mkdir()
    spec = Spec(
        WorkloadRef(config.workload, arguments),
        scratch,
        loop=words,
        limit_bytes=enforce_beyond(search.limit_bytes, "cpu"),
        scratch=scratch / name,
    )
    environment: Mapping[str, str] = {}
    if plan is not None:
        spec = replace(spec, **{key: getattr(plan, key) for key in CHOSEN})
        environment = allocator_environment(plan.allocator, "cpu", os.environ)
    return Child.start(spec, scratch / f"{name}.log", environment)


def fastest_eager(turns: dict[str, Any]) -> str:
    """Return the variant of eager with the most samples per second in the turns."""
    medians = {
        name: median_interval(list(rates.values())).middle
        for name in turns["sizes"]
        if name != PLAN and (rates := rates_by_round(turns, name))
    }
    return max(medians, key=medians.__getitem__, default=EAGER)


def speedups(turns: dict[str, Any]) -> list[float]:
    """Return the plan's samples per second over those of eager at its best size, one for each round that has both."""
    ours, theirs = rates_by_round(turns, PLAN), rates_by_round(turns, fastest_eager(turns))
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def rates_by_round(turns: dict[str, Any], variant: str) -> dict[int, float]:
    """Return a variant's samples per second over those of `EAGER` next to it, by round; empty if it failed."""
    rounds = [block["round"] for block in turns["blocks"] if block["variant"] == variant]
    if variant in turns["failed"]:
        return {}
    if variant == EAGER:
        return dict.fromkeys(rounds, 1.0)
    blocks = [(block["variant"], block["seconds"]) for block in turns["blocks"]]
    samples = turns["sizes"][variant]["batch"] / turns["sizes"][EAGER]["batch"]
    pairs = pair_with_baseline(blocks, variant)
    return {number: samples * mean(eager) / mean(steps) for number, (steps, eager) in zip(rounds, pairs, strict=True)}


def mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def summarize(documents: Sequence[dict[str, Any]]) -> str:
    """Return the table of all workloads, and the geometric means."""
    rows = [
        "| workload | limit, MiB | by estimate: eager, plan | eager's largest batch | plan's largest batch | ratio | eager's best size | kernels | chosen size | plan over eager, samples/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    batches: list[float] = []
    rates: list[float] = []
    for document in documents:
        batch, turns = document.get("batch", {}), document.get("turns")
        ratio = least_ratio(document)
        if ratio is not None:
            batches.append(ratio)
        speed = "-"
        if turns and (measured := speedups(turns)):
            interval = median_interval(measured)
            rates.append(interval.middle)
            speed = format_interval(interval)
        estimate = batch.get("estimate") or {}
        limit = (batch["floor_bytes"] + batch["budget_bytes"]) / 2**20 if batch.get("budget_bytes") else math.nan
        cells = (
            document["model"], f"{limit:.1f}", f"{estimate.get('eager_largest', '-')}, {estimate.get('largest', '-')}",
            spell_largest(document, "eager"), spell_largest(document, "plan"), "-" if ratio is None else f"at least {ratio:.2f}",
            spell(turns and turns["sizes"][fastest_eager(turns)]), spell_kernels(document), spell(document.get("throughput", {}).get("chosen")), speed,
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    means = [
        f"{label}: geometric mean {math.exp(mean([math.log(value) for value in values])):.2f} over {len(values)} workloads."
        for label, values in (
            ("Largest batch, plan over eager, at least", batches),
            ("Samples per second, plan over eager", rates),
        )
        if values
    ]
    text = "Limit: the idle process plus twice eager's peak at the workload's own batch, enforced on every process that runs a step."
    origins = [f"{document['model']}: {describe_origin(document)}" for document in documents]
    return "\n".join([text, "", *rows, "", *means, "", *(f"- {origin}" for origin in origins)]) + "\n"


def describe_origin(document: dict[str, Any]) -> str:
    """Format the facts of a workload's result, and commit and date of each search that another call ran."""
    text = format_origin(document)
    for objective, facts in document.get(ORIGINS, {}).items():
        if any(facts[fact] != document[fact] for fact in ("commit", "date", "command")):
            text += f" The search for {objective}: commit {facts['commit']}, date {facts['date']}."
    return text


def least_ratio(document: dict[str, Any]) -> float | None:
    """Return a lower bound of the ratio of the plans' largest batch to eager's.

    Eager's largest batch is at most one below the smallest size at which eager failed. None without such a size.
    """
    (_, refused), (plan, _) = (find_largest(document, side) for side in ("eager", "plan"))
    return plan / (refused - 1) if plan and 1 < refused < math.inf else None


def find_largest(document: dict[str, Any], side: str) -> tuple[int, float]:
    """Return the largest batch that a side was measured to fit, and the smallest larger one that was refused.

    They are 0 and infinity where there is none. Both searches count: their budget is the same share of the same peak.
    """
    measured = [each for objective in OBJECTIVES for each in document.get(objective, {}).get("measured", ())]
    outcomes = [(each["size"]["batch"], each[side]["outcome"] == "ok") for each in measured if each[side]]
    largest = max((batch for batch, fits in outcomes if fits), default=0)
    refused = min((batch for batch, fits in outcomes if not fits and batch > largest), default=math.inf)
    return largest, refused


def spell_largest(document: dict[str, Any], side: str) -> str:
    """Return the largest batch of eager or of plans as text; as two bounds where no size between them was measured."""
    size, refused = find_largest(document, side)
    if not size or refused - size <= largest_gap(size):
        return str(size) if size else "-"
    return f"{size} to {refused - 1:.0f}" if refused < math.inf else f"at least {size}"


def spell_kernels(document: dict[str, Any]) -> str:
    """Return the kernels, the memory format and the threads of the search for throughput as text."""
    config = document.get("throughput", {}).get("config")
    if config is None:
        return "-"
    fields = {key: config[key] for key in CHOSEN if key in config}
    return Plan((), **fields).capture_name


def spell(size: dict[str, int] | None) -> str:
    """Return a size as text: samples, and micro-batches if there are several."""
    return "-" if not size else str(StepSize(**size))


if __name__ == "__main__":
    main()
