"""Offload on this machine: the window N against peak and time, bytes saved by a store, and offload with recompute.

`python -m experiments.benchmarks.offload --ssd DIR [--ramdisk DIR] [--parts windows media joint adapt search] [--models resnet18 ...]`

Measures the parts that the results do not have yet: run it again to continue.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.measure.harness import Harness
from autotune.measure.spec import Spec
from autotune.planners import make_plan
from autotune.planners.auto import best_plan
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate, peak_bytes, simulate
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import measure_stores
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.offload.alternate import alternate, summarize_steps
from experiments.benchmarks.offload.summary import PLANS, plot, summary
from experiments.common.commands import refuse_busy_machine, run_to_end
from experiments.common.facts import collect_facts, list_arguments
from experiments.common.result_file import (
    ORIGINS,
    capture_digests,
    join_digests,
    read_origins,
    refuse_other_graph,
    write_result,
)
from experiments.common.resumption import refuse_other_machine

HERE = Path(__file__).parent
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet18", {"batch": 10}),
    "mobilenet_v2": ("mobilenet_v2", {"batch": 8}),
    "gpt2": ("gpt2", {"batch": 8, "dropout": 0.1}),
}
WINDOWS = (1, 2, 4, 6, 8)
SEARCHED = "30%"
"""Budget of the search."""
JOINT = (0.75, 0.35, 0.2)
"""Budgets as shares of the traced step's bytes beside its static ones."""
OTHERS = ("adapt", "search")
SavePart = Callable[[str, str], None]
"""`save(model, part)`: write all results after a part was measured."""
SAMPLES = 4
"""Steps of each plan, interleaved with eager's; all plans together place the one without offload beside eager."""
ADAPTED = ((1, 1.1), (8, 1.1), (8, 1.0))
"""First window of `adapt`, and the budget over the lowest peak that it reaches."""
STEPS = 40
KEPT: Settings = {
    "order": {"planner": "traced"}, "update": {"planner": "at_end"}, "recompute": {"planner": "keep"},
    "reorder": {"planner": "keep"}, "inplace": {"planner": "never"}, "offload": {"planner": "keep"},
    "allocator": {"planner": "arena"},
}  # fmt: skip


def offload_settings(store: str, window: int, **knobs: Any) -> Settings:
    """Return settings of offload alone."""
    return {**KEPT, "offload": {"planner": "window", "store": store, "window": window, "share": 1.0, **knobs}}


def plans_to_measure(
    part: str, graph: TrainGraph, costs: Costs, windows: Sequence[int] = WINDOWS
) -> Iterator[tuple[str, Plan, int]]:
    """Yield (name, plan, budget) of every plan of a part."""
    traced = make_plan(graph, KEPT, 0, costs)
    whole = peak_bytes(graph, traced, costs)
    match part:
        case "windows":
            yield "none", traced, 0
            for window in windows:
                yield f"N = {window}", make_plan(graph, offload_settings("ssd", window), 0, costs), 0
            yield "none, again", traced, 0  # how far two runs of one plan lie apart
            yield "N = 1, weights too", make_plan(graph, offload_settings("ssd", 1, what="all"), 0, costs), 0
        case "media":
            disk = make_plan(graph, offload_settings("ssd", 1), 0, costs)
            yield "none", traced, 0
            yield "ssd", disk, 0
            # the planner refuses a RAM-disk, which frees nothing here: the same values are sent there all the same
            yield "ramdisk", replace(disk, store="ramdisk"), 0
        case "joint":
            yield "none", traced, 0
            for share in JOINT:
                budget = int(graph.static_bytes + share * (whole - graph.static_bytes))
                alone = replace(costs, stores={})
                best = best_plan(graph, alone, budget).plan
                yield f"recompute alone at {share:.0%}", replace(best, allocator="arena"), budget
                yield f"offload alone at {share:.0%}", _offload_alone(graph, costs, budget), budget
                yield f"both at {share:.0%}", replace(best_plan(graph, costs, budget).plan, allocator="arena"), budget


def _offload_alone(graph: TrainGraph, costs: Costs, budget: int) -> Plan:
    """Return the fastest fitting plan over all windows with the best updates, orders and buffers, else the smallest."""
    candidates = []
    for window in WINDOWS:
        for order, what, update in product(("traced", "best"), ("activations", "all"), ("at_end", "with_gradient")):
            settings = offload_settings("ssd", window, what=what) | {
                "order": {"planner": order}, "update": {"planner": update}, "inplace": {"planner": "greedy"},
            }  # fmt: skip
            plan = make_plan(graph, settings, budget, costs)
            estimate = simulate(graph, lower(graph, plan), costs)
            candidates.append((max(budget, estimate.peak_bytes), estimate.seconds, len(candidates), plan))
    return min(candidates)[-1]


def build_row(
    plan: Plan, expected: Estimate, measurement: Measurement, timing: dict[str, Any], budget: int
) -> dict[str, Any]:
    """Return predicted and measured figures; `timing` holds seconds and the store's work during them."""
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": expected.peak_bytes,
        "peak_bytes": measurement.step_peak_bytes,
        "charged_bytes": measurement.step_charged_bytes,
        "predicted_stall_seconds": expected.stall_seconds,
        "predicted_seconds": expected.seconds,
        "recomputed": plan.recomputed,
        "offloaded": len(plan.offload),
        "window": plan.window if plan.offload else None,
        "store": plan.store if plan.offload else "",
        "outcome": measurement.outcome.value,
        "detail": measurement.detail,
        "meter": measurement.meter,
    } | timing


def measure(
    model: str,
    parts: list[str],
    windows: list[int],
    stores: dict[str, Path],
    *,
    results: dict[str, Any],
    save: SavePart,
) -> None:
    """Measure every part without a result; `save(model, part)` follows each of them."""
    name, arguments = MODELS[model]
    results_of_model = results.setdefault(model, {})
    results_of_model |= {"model": name, "arguments": arguments}
    missing = [part for part in parts if part not in results_of_model]
    if "adapt" in missing:
        results_of_model["adapt"] = run_adapt_cases(model, stores["ssd"])
        save(model, "adapt")
    if "search" in missing:
        results_of_model["search"] = run_search(name, arguments, stores)
        save(model, "search")
    if not {*missing} & {*PLANS}:
        return
    with (
        tempfile.TemporaryDirectory() as logs,
        Harness(Spec(WorkloadRef(name, arguments), Path(logs), stores=stores, samples=SAMPLES)) as harness,
    ):
        prepared = harness.prepare()
        graph, costs = prepared.graph, prepared.costs
        results_of_model["stores"] = {key: to_json(cost) for key, cost in costs.stores.items()}
        results_of_model["static_bytes"] = graph.static_bytes
        results_of_model["eager_peak_bytes"] = harness.baseline().step_peak_bytes
        for part in [part for part in PLANS if part in missing]:
            plans = list(plans_to_measure(part, graph, costs, windows))
            measurements = {}
            for label, plan, _ in plans:
                print(f"{model}, {part}, {label}: bytes", file=sys.stderr, flush=True)
                measurements[label] = harness.measure(plan)  # compared with eager bit for bit, too
                if measurements[label].outcome is not Outcome.OK:
                    raise SystemExit(
                        f"{model}, {part}, {label}: {measurements[label].outcome}: {measurements[label].detail}"
                    )
            current_costs = measure_stores(costs, stores)
            print(f"{model}, {part}: seconds", file=sys.stderr, flush=True)
            steps = alternate(name, arguments, {label: plan for label, plan, _ in plans}, stores)
            summaries = {label: summarize_steps(steps, label) for label, _, _ in plans}
            scaled_costs = scale_costs(current_costs, summaries["none"]["seconds"])
            eager = statistics.median(
                ratio / summaries[label]["ratio_without"]
                for label, measurement in measurements.items()
                if (ratio := measurement.time_ratio)
            )
            results_of_model[part] = {
                label: build_row(
                    plan,
                    simulate(graph, lower(graph, plan), scaled_costs),
                    measurements[label],
                    summaries[label],
                    budget,
                )
                | {"time_ratio": eager * summaries[label]["ratio_without"]}
                for label, plan, budget in plans
            }
            save(model, part)


def scale_costs(costs: Costs, traced: float) -> Costs:
    """Return the costs scaled to this run, in which the traced step took `traced` seconds."""
    factor = traced / sum(costs.seconds)
    return replace(costs, seconds=tuple(factor * seconds for seconds in costs.seconds))


def run_adapt_cases(model: str, ssd: Path) -> dict[str, Any]:
    """Run `TrainStep(adapt=True)` from each wrong window, in a process of its own."""
    results = {}
    for window, room in ADAPTED:
        request = json.dumps({"model": model, "ssd": str(ssd), "window": window, "room": room})
        process = subprocess.run(
            [sys.executable, "-m", "experiments.benchmarks.offload", "--adapt", request],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            sys.exit(process.stderr[-2000:])
        results[f"N = {window}, budget {room:.0%}"] = json.loads(process.stdout.splitlines()[-1])
    return results


def adapt_steps(*, model: str, ssd: str, window: int, room: float) -> dict[str, Any]:
    """Run forty steps from one window, and return the window of each."""
    workload = load_workload(*MODELS[model])
    program = capture(workload)
    graph = program.graph
    costs = measure_stores(profile(program), {"ssd": Path(ssd)})
    plan = make_plan(graph, offload_settings("ssd", window), 0, costs)
    expected = simulate(graph, lower(graph, plan), costs)
    budget = int(room * expected.peak_bytes)
    file = PlanFile(WorkloadRef(*MODELS[model]), graph.digest, f"{budget}B", budget, 0, {}, plan, expected)
    steps = []
    with TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, file, stores={"ssd": ssd}, adapt=True
    ) as step:
        for _ in range(STEPS):
            plan_before = step.plan
            start = time.perf_counter()
            step(workload.batch)
            steps.append(
                {
                    "seconds": time.perf_counter() - start,
                    "stall_seconds": step.stall_seconds,
                    "window": plan_before.window,
                    "offloaded": len(plan_before.offload),
                    "predicted_peak_bytes": peak_bytes(graph, plan_before, costs),
                }
            )
    return {"budget_bytes": budget, "steps": steps}


def run_search(name: str, arguments: dict[str, Any], stores: dict[str, Path]) -> dict[str, Any]:
    """Return the plan of `autotune tune` with every store available, at a budget with a cost."""
    command = [
        *(sys.executable, "-m", "autotune", "tune", name, "--budget", SEARCHED, "--time", "4m", "--json"),
        *(part for key, value in arguments.items() for part in ("--set", f"{key}={value}")),
        *(part for store, directory in stores.items() for part in ("--store", f"{store}={directory}")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        process = run_to_end(command, cwd=folder, capture_output=True)
    if process.returncode:
        return {"budget": SEARCHED, "failed": process.stderr.strip().splitlines()[-1]}
    document = json.loads(process.stdout)
    best = document["best"]
    plan = from_json(Plan, best["plan"], where="plan")
    expected = from_json(Estimate, best["estimate"], where="estimate")
    measurement = from_json(Measurement, best["measurement"], where="measurement")
    lanes = measurement.lanes
    times = {
        "time_ratio": measurement.time_ratio,
        "stall_seconds": measurement.stall_seconds,
        "seconds": measurement.median_seconds,
        "transfer_bytes": measurement.transfer_bytes,
        "hidden": lanes.hidden if lanes else None,
    }
    return {"budget": SEARCHED, "settings": best["settings"], "row": build_row(plan, expected, measurement, times, 0)}


def find_parts(results_of_model: Mapping[str, Any]) -> list[str]:
    """Return the parts that a model has results of."""
    return [part for part in (*PLANS, *OTHERS) if part in results_of_model]


def name_part(model: str, part: str) -> str:
    """Return the name under which the facts of a part are stored."""
    return f"{model}, {part}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=(*PLANS, *OTHERS), default=[*PLANS, *OTHERS])
    parser.add_argument("--again", action="store_true", help="measure these parts anew")
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    parser.add_argument("--adapt", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.adapt:
        print(json.dumps(adapt_steps(**json.loads(options.adapt))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    facts = collect_facts()
    results: dict[str, Any] = {"models": {}, "commands": []}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
        refuse_other_machine(path, results, facts)
    parts_by_model = {model: find_parts(results_of_model) for model, results_of_model in results["models"].items()}
    graphs = {name_part(model, part): model for model, parts in parts_by_model.items() for part in parts}
    origins = read_origins(results, graphs)
    results |= {"device": to_json(this_device("cpu")), ORIGINS: origins}
    command = shlex.join(["python", "-m", "experiments.benchmarks.offload", *list_arguments()])
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    for model in options.models:
        for part in options.parts if options.again else ():
            results["models"].get(model, {}).pop(part, None)
            origins.pop(name_part(model, part), None)
    missing = {
        model: [part for part in options.parts if part not in results["models"].get(model, {})]
        for model in options.models
    }
    if any(missing.values()):
        refuse_busy_machine(anyway=options.anyway)
        results["commands"].append(f"`{command}` ({started}, commit {facts['commit']}, load {os.getloadavg()[0]:.2f})")
    captured: dict[str, str] = {}

    def save(model: str, part: str) -> None:
        origins[name_part(model, part)] = {**facts, "command": command, "graphs": {model: captured[model]}}
        write_result(path, {**results, **facts, "command": command}, join_digests(origins))

    for model in (model for model in options.models if missing[model]):
        captured |= capture_digests({model: MODELS[model]})
        refuse_other_graph(path, origins, captured, f"measure its parts again: --models {model} --again")
        measure(
            model,
            options.parts,
            options.windows,
            {"ssd": options.ssd, "ramdisk": options.ramdisk},
            results=results["models"],
            save=save,
        )
    (options.out / "summary.md").write_text(summary(results), encoding="utf-8")
    plot(results, options.out)
    print(summary(results))


if __name__ == "__main__":
    main()
