"""Compare a plan that was tuned with `--kernels any` with the planners' plans on eager's kernels, in fresh measurements in turns.

`python -m experiments.benchmarks.tuned.gains [NAME...]`

Needs the plans of `experiments.benchmarks.tuned --runs NAME-kernels`. The planners' plans are the fastest by estimate for the
budget, and the lowest; the faster one as measured is compared.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autotune.ir.plan import Plan
from autotune.measure.child import Child
from autotune.measure.interleaving import EAGER, ProcessVariant, RoundLimits, interleave
from autotune.measure.spec import Spec
from autotune.records.budget import Budget
from autotune.records.config import load_config
from autotune.records.json_codec import from_json
from autotune.records.run_dir import write_text
from autotune.study.captures import AIM, CHOSEN, PLANNING_SECONDS, MeasuredCapture, select_capture
from autotune.study.verdicts.ranking import plan_hash
from autotune.study.verdicts.statistics import Interval, median_interval
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.frontier.ours import SECONDS, Capture, PlanBench
from experiments.benchmarks.frontier.records import compare_variants, ratios_by_round
from experiments.benchmarks.tuned.__main__ import HERE, RUNS, config_path
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_interval, format_origin
from experiments.common.result_file import PLANS, write_result

RESULTS = HERE / "results"
TUNED, FASTEST, LOWEST = "tuned", "planners' fastest", "planners' lowest"
ROUNDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.name.removesuffix(PLANS) for path in RESULTS.glob(f"*{PLANS}"))
    parser.add_argument("names", nargs="*", help=f"runs with a plan; all by default: {', '.join(known)}")
    parser.add_argument("--fresh", action="store_true", help="compare again where the plan has a result")
    options = parser.parse_args()
    missing = sorted(set(options.names) - set(known)) or ([] if known else ["any run"])
    if missing:
        parser.error(f"no plan of {', '.join(missing)}; run experiments.benchmarks.tuned --runs NAME-kernels first")
    out = RESULTS / "gains"
    for name in options.names or known:
        target, plan = out / f"{name}.json", read_plan(name)
        stored = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
        if not options.fresh and stored.get("plan") == plan_hash(plan):
            continue
        refuse_busy_machine()
        facts = collect_facts()
        with tempfile.TemporaryDirectory(prefix="gains-") as scratch:
            result, digest = compare(name, plan, Path(scratch))
        result |= {"run": name, "plan": plan_hash(plan)}
        print(f"{name}: {format_interval(gain(result))}", flush=True)
        write_result(target, {**facts, **result}, {RUNS[name][0]: digest})
    write_text(out / "summary.md", summarize(out))


def read_plan(name: str) -> Plan:
    """Return a run's tuned plan, for the kernels, the memory format and the threads that the run chose: trials do not repeat them."""
    plans = json.loads((RESULTS / f"{name}{PLANS}").read_text(encoding="utf-8"))
    captures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["captures"]
    chosen = select_capture([MeasuredCapture(**capture) for capture in captures])
    return from_json(Plan, plans[TUNED], where=name).captured_as(chosen)


def compare(name: str, tuned: Plan, scratch: Path) -> tuple[dict[str, Any], str]:
    """Time eager, the tuned plan and the planners' plans in turns; return the blocks, and the digest of eager's graph."""
    config = load_config(str(config_path(RUNS[name][0])))
    workload = WorkloadRef(config.workload, config.arguments)
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    budget = Budget.parse(record["budget"]).step_bytes(floor_bytes=0, baseline_step_bytes=record["eager_peak_bytes"])
    with PlanBench(Capture(), workload, scratch, PLANNING_SECONDS, scratch / "profile.json") as bench:
        plans = {TUNED: tuned, FASTEST: bench.fit(int(AIM * budget))[0], LOWEST: bench.fit(0)[0]}
        digest = bench.graph.digest
    variants = {EAGER: ProcessVariant(start(Spec(workload, scratch, scratch=scratch), EAGER))}
    for variant, plan in plans.items():
        variants[variant] = ProcessVariant(start(Capture.of(plan).spec(workload, scratch), variant), plan)
    times = interleave(variants, RoundLimits(ROUNDS, ROUNDS, 1e6, SECONDS), partial(print, file=sys.stderr, flush=True))
    if times.failed or times.left_out:
        sys.exit(f"{name}: not timed: {times.failed or times.left_out}")
    kernels = {key: getattr(tuned, key) for key in CHOSEN}
    workload_of = {"model": config.workload, "arguments": config.arguments}
    return {**workload_of, "budget_bytes": budget, "tuned_on": kernels, "sessions": [asdict(times)]}, digest


def start(spec: Spec, name: str) -> Callable[[], Child]:
    """Return a function that starts a child process with the usual malloc, as `tune` does."""
    return partial(Child.start, spec, spec.log_dir / f"{name.replace(' ', '-')}.log")


def gain(result: Mapping[str, Any]) -> Interval:
    """Return the tuned plan's time over that of the faster one of the planners' plans, by the blocks of a round."""
    record = dict(result)
    medians = {name: statistics.median(ratios_by_round(record, name).values()) for name in (FASTEST, LOWEST)}
    interval = compare_variants(record, TUNED, min(medians, key=medians.__getitem__))
    assert interval is not None, "every round has all variants"
    return interval


def summarize(folder: Path) -> str:
    """Return the table of all results in Markdown."""
    head = [
        "| run | tuned on | tuned plan | planners' fastest by estimate | planners' lowest | the first over the faster other | faster |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    return "\n".join([*head, *_rows(folder), ""])


def _rows(folder: Path) -> Iterator[str]:
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    for result in results:
        ratios = [list(ratios_by_round(result, variant).values()) for variant in (TUNED, FASTEST, LOWEST)]
        times = [format_interval(median_interval(values)) for values in ratios]
        ratio = gain(result)
        verdict = "yes" if ratio.high < 1 else "no" if ratio.low > 1 else "not decided"
        on = Plan((), **result["tuned_on"]).capture_name
        yield f"| {result['run']} | {on} | {' | '.join(times)} | {format_interval(ratio)} | {verdict} |"
    yield ""
    yield "Times over eager's. " + " ".join(f"{result['run']}: {format_origin(result)}" for result in results)


if __name__ == "__main__":
    main()
