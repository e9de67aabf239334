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
from collections.abc import Iterator, Sequence
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
from experiments.benchmarks.offload.alternate import ROUNDS, alternate, summarize_steps

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
PLANS, OTHERS = ("windows", "media", "joint"), ("adapt", "search")
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
    model: str, parts: list[str], windows: list[int], stores: dict[str, Path], *, results: dict[str, Any], save: Any
) -> None:
    """Measure every part without a result."""
    name, arguments = MODELS[model]
    results_of_model = results.setdefault(model, {})
    missing = [part for part in parts if part not in results_of_model]
    if "adapt" in missing:
        results_of_model["adapt"] = run_adapt_cases(model, stores["ssd"])
        save()
    if "search" in missing:
        results_of_model["search"] = run_search(name, arguments, stores)
        save()
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
            save()


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
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
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


def _cells(row: dict[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return "" if row[key] is None else f"{row[key] / 2**20:.1f}"

    error = f"{row['predicted_peak_bytes'] / row['peak_bytes'] - 1:+.2%}" if row["peak_bytes"] else row["outcome"]
    interval = " ({:.3f} to {:.3f})".format(*row["ratio_without_95"]) if "ratio_without" in row else ""
    return [
        mib("predicted_peak_bytes"), mib("peak_bytes"), error, mib("charged_bytes"),
        f"{row['time_ratio']:.3f}" if row["time_ratio"] else "",
        f"{row['ratio_without']:.3f}{interval}" if interval else "",
        f"{row['transfer_bytes'] / 2**20:.0f}",
        f"{1e3 * row['predicted_stall_seconds']:.1f}", f"{1e3 * row['stall_seconds']:.1f}",
        "" if row["hidden"] is None else f"{row['hidden']:.1%}", str(row["recomputed"]), str(row["offloaded"]),
    ]  # fmt: skip


def _adapt_cells(result: dict[str, Any]) -> str:
    steps = result["steps"]
    runs = [(step["window"], step["offloaded"]) for step in steps]
    changes = [index for index in range(1, len(runs)) if runs[index] != runs[index - 1]]
    first = steps[: changes[0]] if changes else steps
    medians = [
        [statistics.median(step[key] for step in part[-5:]) for part in (first, steps)]
        for key in ("seconds", "stall_seconds")
    ]
    windows = " -> ".join(str(runs[index][0]) for index in (0, *changes))
    highest = max(step["predicted_peak_bytes"] for step in steps)
    return " | ".join(
        [
            f"{result['budget_bytes'] / 2**20:.1f}", windows, str(changes[-1] if changes else 0),
            f"{medians[0][0]:.3f} -> {medians[0][1]:.3f}", f"{1e3 * medians[1][0]:.1f} -> {1e3 * medians[1][1]:.1f}",
            f"{highest / 2**20:.1f}",
        ]
    )  # fmt: skip


HEAD = (
    "plan", "predicted MiB", "peak MiB", "error", "charged MiB", "time to eager", "to none (95 %)", "moved MiB",
    "stall predicted ms", "stall ms", "hidden", "recomputed", "offloaded",
)  # fmt: skip


def summary(results: dict[str, Any]) -> str:
    """Format a table for each model and part."""
    device = results["device"]
    lines = [
        f"{device['silicon']}, cores: {device['cores']}, torch {device['torch']}; measured by"
        f" {', then by '.join(results['commands'])}",
        "",
        "Bytes of the step above the process's floor, page cache and tmpfs of our own files counted. Moved: written and read.",
        "Hidden: of the store's time what execution did not wait for. Plans run in the arena. To none: over the step as traced,",
        f"without offload; {ROUNDS} steps of each plan, every one between two of that, in one process. To eager: that, times how the step",
        "without offload lies beside plain eager's, of steps of all plans in turns with eager's in processes of their own.",
        "Predicted: with what the store did just before, and ops at the pace of the run, which changes by a third within minutes",
        "here: as profiled, times what the traced step took then over what the profile says of it.",
    ]
    for model, results_of_model in results["models"].items():
        rates = "; ".join(
            f"{name} {cost['write_bytes_per_second'] / 1e9:.2f} GB/s write, {cost['read_bytes_per_second'] / 1e9:.2f} read,"
            f" ops beside it {cost['contention']:.2f} times as long"
            for name, cost in results_of_model["stores"].items()
        )
        lines += ["", f"Stores of {model}, as probed last: {rates}."]
        for part in PLANS:
            if not results_of_model.get(part):
                continue
            lines += ["", f"## {model}, {part}", ""]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += [f"| {label} | " + " | ".join(_cells(row)) + " |" for label, row in results_of_model[part].items()]
        if results_of_model.get("adapt"):
            lines += [
                "",
                f"## {model}, adapt",
                "",
                "Medians of the last five steps with the first window, and of the last five of all.",
                "",
            ]
            lines += ["| from | budget MiB | N | settled after step | step s | stall ms | highest predicted MiB |"]
            lines += ["|---|--:|---|--:|--:|--:|--:|"]
            lines += [f"| {label} | {_adapt_cells(result)} |" for label, result in results_of_model["adapt"].items()]
        if "row" in results_of_model.get("search", {}):
            search_result = results_of_model["search"]
            lines += [
                "",
                f"## {model}, what `tune --budget {search_result['budget']}` picks with both stores at hand",
                "",
            ]
            lines += [
                f"offload {search_result['settings']['offload']}, recompute {search_result['settings']['recompute']}",
                "",
            ]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += ["| picked | " + " | ".join(_cells(search_result["row"])) + " |"]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], out: Path) -> None:
    """Draw N against peak and time, a picture for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model, results_of_model in results["models"].items():
        rows = {
            label: row
            for label, row in results_of_model.get("windows", {}).items()
            if label.startswith("N = ") and "," not in label
        }
        if not rows:
            continue
        windows = [int(label.removeprefix("N = ")) for label in rows]
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        axes.plot(
            windows, [row["peak_bytes"] / 2**20 for row in rows.values()], "o-", color="C0", label="peak, measured"
        )
        axes.plot(
            windows, [row["predicted_peak_bytes"] / 2**20 for row in rows.values()], "x:", color="C0", label="predicted"
        )
        axes.set(xlabel="N, layers in memory", ylabel="peak of the step, MiB", title=model)
        axes.axhline(
            results_of_model["windows"]["none"]["peak_bytes"] / 2**20, color="C0", lw=0.8, ls="--", label="no offload"
        )
        right_axes = axes.twinx()
        ratios = [row["ratio_without"] for row in rows.values()]
        low, high = zip(*(row["ratio_without_95"] for row in rows.values()), strict=True)
        errors = [
            [r - end for r, end in zip(ratios, low, strict=True)],
            [end - r for r, end in zip(ratios, high, strict=True)],
        ]
        right_axes.errorbar(windows, ratios, errors, fmt="s-", color="C1", capsize=2)
        right_axes.axhline(1.0, color="C1", lw=0.8, ls="--")
        right_axes.set(ylabel="step time to the same without offload")
        axes.legend(fontsize=7)
        figure.savefig(out / f"{model}.png", dpi=120, metadata={"Software": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    parser.add_argument("--ramdisk", type=Path, default=Path("/dev/shm"), help="a directory on a tmpfs")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=(*PLANS, *OTHERS), default=[*PLANS, *OTHERS])
    parser.add_argument("--again", action="store_true", help="measure these parts anew")
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--adapt", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.adapt:
        print(json.dumps(adapt_steps(**json.loads(options.adapt))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"models": {}, "commands": []}
    results["device"] = to_json(this_device("cpu"))
    arguments = [part if str(part) not in {str(options.ssd), str(options.ramdisk)} else "DIR" for part in sys.argv[1:]]
    command = shlex.join(["python", "-m", "experiments.benchmarks.offload", *arguments])
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def save() -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(results, indent=1) + "\n")
        draft.replace(path)

    for model in options.models:
        for part in options.parts if options.again else ():
            results["models"].get(model, {}).pop(part, None)
    if any(part not in results["models"].get(model, {}) for model in options.models for part in options.parts):
        results["commands"].append(f"`{command}` ({started}, load {os.getloadavg()[0]:.2f})")
    for model in options.models:
        measure(
            model,
            options.parts,
            options.windows,
            {"ssd": options.ssd, "ramdisk": options.ramdisk},
            results=results["models"],
            save=save,
        )
    save()
    (options.out / "summary.md").write_text(summary(results))
    plot(results, options.out)
    print(summary(results))


if __name__ == "__main__":
    main()
