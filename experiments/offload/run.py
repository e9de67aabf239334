"""Offload on this machine: the window N against peak and time, what a store saves, and offload with recompute.

`python experiments/offload/run.py --ssd DIR [--ramdisk DIR] [--parts windows media joint adapt search] [--models resnet18 ...]`

A run does only what the results do not hold yet, a part of a model at a time: run it again to go on.
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

from alternate import ROUNDS, alternate, told

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.this_device import this_device
from autotune.measure.harness import Harness
from autotune.planners import make_plan
from autotune.planners.auto import auto
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate, peak_bytes, simulate
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.plan_file import PlanFile
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import measured
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load
from autotune.workloads.reference import WorkloadRef

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
"""Of the traced step's bytes beside its static ones."""
PLANS, OTHERS = ("windows", "media", "joint"), ("adapt", "search")
SAMPLES = 4
"""Steps of each plan in turns with eager's; all plans' together tell how the one without offload lies beside eager."""
ADAPTED = ((1, 1.1), (8, 1.1), (8, 1.0))
"""Of `adapt`: the window to begin with, and the budget over the lowest peak that it reaches."""
STEPS = 40
KEPT: Settings = {
    "order": {"planner": "traced"}, "update": {"planner": "at_end"}, "recompute": {"planner": "keep"},
    "reorder": {"planner": "keep"}, "inplace": {"planner": "never"}, "offload": {"planner": "keep"},
    "allocator": {"planner": "arena"},
}  # fmt: skip


def offloading(store: str, window: int, **knobs: Any) -> Settings:
    """Nothing but offload."""
    return {**KEPT, "offload": {"planner": "window", "store": store, "window": window, "share": 1.0, **knobs}}


def questions(
    part: str, graph: TrainGraph, costs: Costs, widths: Sequence[int] = WINDOWS
) -> Iterator[tuple[str, Plan, int]]:
    """(name, plan, budget) of everything to measure."""
    traced = make_plan(graph, KEPT, 0, costs)
    whole = peak_bytes(graph, traced, costs)
    match part:
        case "windows":
            yield "none", traced, 0
            for window in widths:
                yield f"N = {window}", make_plan(graph, offloading("ssd", window), 0, costs), 0
            yield "none, again", traced, 0  # how far two runs of one plan lie apart
            yield "N = 1, weights too", make_plan(graph, offloading("ssd", 1, what="all"), 0, costs), 0
        case "media":
            disk = make_plan(graph, offloading("ssd", 1), 0, costs)
            yield "none", traced, 0
            yield "ssd", disk, 0
            # the planner refuses a RAM-disk, which frees nothing here: the same values are sent there all the same
            yield "ramdisk", replace(disk, store="ramdisk"), 0
        case "joint":
            yield "none", traced, 0
            for share in JOINT:
                budget = int(graph.static_bytes + share * (whole - graph.static_bytes))
                alone = replace(costs, stores={})
                best = auto(graph, alone, budget)[1]
                yield f"recompute alone at {share:.0%}", replace(best, allocator="arena"), budget
                yield f"offload alone at {share:.0%}", _offload_alone(graph, costs, budget), budget
                yield f"both at {share:.0%}", replace(auto(graph, costs, budget)[1], allocator="arena"), budget


def _offload_alone(graph: TrainGraph, costs: Costs, budget: int) -> Plan:
    """The fastest that fits of all windows, with the updates, orders and buffers that serve it best; else the smallest."""
    made = []
    for window in WINDOWS:
        for order, what, update in product(("traced", "best"), ("activations", "all"), ("at_end", "with_gradient")):
            settings = offloading("ssd", window, what=what) | {
                "order": {"planner": order}, "update": {"planner": update}, "inplace": {"planner": "greedy"},
            }  # fmt: skip
            plan = make_plan(graph, settings, budget, costs)
            seen = simulate(graph, lower(graph, plan), costs)
            made.append((max(budget, seen.peak_bytes), seen.seconds, len(made), plan))
    return min(made)[-1]


def row(plan: Plan, expected: Estimate, seen: Measurement, timed: dict[str, Any], budget: int) -> dict[str, Any]:
    """What was predicted and seen; `timed`: seconds, and what the store did in them."""
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": expected.peak_bytes,
        "peak_bytes": seen.step_peak_bytes,
        "charged_bytes": seen.step_charged_bytes,
        "predicted_stall_seconds": expected.stall_seconds,
        "predicted_seconds": expected.seconds,
        "recomputed": plan.recomputed,
        "offloaded": len(plan.offload),
        "window": plan.window if plan.offload else None,
        "store": plan.store if plan.offload else "",
        "outcome": seen.outcome.value,
        "detail": seen.detail,
        "meter": seen.meter,
    } | timed


def measure(
    model: str, parts: list[str], widths: list[int], stores: dict[str, Path], *, results: dict[str, Any], save: Any
) -> None:
    """Every part that has no answer yet."""
    name, arguments = MODELS[model]
    known = results.setdefault(model, {})
    todo = [part for part in parts if part not in known]
    if "adapt" in todo:
        known["adapt"] = adapting(model, stores["ssd"])
        save()
    if "search" in todo:
        known["search"] = search(name, arguments, stores)
        save()
    if not {*todo} & {*PLANS}:
        return
    with (
        tempfile.TemporaryDirectory() as logs,
        Harness(WorkloadRef(name, arguments), log_dir=Path(logs), stores=stores, samples=SAMPLES) as harness,
    ):
        prepared = harness.prepare()
        graph, costs = prepared.graph, prepared.costs
        known["stores"] = {key: to_json(cost) for key, cost in costs.stores.items()}
        known["static_bytes"] = graph.static_bytes
        known["eager_peak_bytes"] = harness.baseline().step_peak_bytes
        for part in [part for part in PLANS if part in todo]:
            asked = list(questions(part, graph, costs, widths))
            seen = {}
            for what, plan, _ in asked:
                print(f"{model}, {part}, {what}: bytes", file=sys.stderr, flush=True)
                seen[what] = harness.measure(plan)  # compared with eager bit for bit, too
                if seen[what].outcome is not Outcome.OK:
                    raise SystemExit(f"{model}, {part}, {what}: {seen[what].outcome}: {seen[what].detail}")
            now = measured(costs, stores)
            print(f"{model}, {part}: seconds", file=sys.stderr, flush=True)
            steps = alternate(name, arguments, {what: plan for what, plan, _ in asked}, stores)
            found = {what: told(steps, what) for what, _, _ in asked}
            paced = at_pace(now, found["none"]["seconds"])
            eager = statistics.median(
                ratio / found[what]["ratio_without"] for what, one in seen.items() if (ratio := one.time_ratio)
            )
            known[part] = {
                what: row(plan, simulate(graph, lower(graph, plan), paced), seen[what], found[what], budget)
                | {"time_ratio": eager * found[what]["ratio_without"]}
                for what, plan, budget in asked
            }
            save()


def at_pace(costs: Costs, traced: float) -> Costs:
    """The costs as they were in this run, in which the traced step took so many seconds."""
    pace = traced / sum(costs.seconds)
    return replace(costs, seconds=tuple(pace * seconds for seconds in costs.seconds))


def adapting(model: str, ssd: Path) -> dict[str, Any]:
    """What `TrainStep(adapt=True)` makes of windows that are wrong, each in a process of its own."""
    found = {}
    for window, room in ADAPTED:
        asked = json.dumps({"model": model, "ssd": str(ssd), "window": window, "room": room})
        done = subprocess.run([sys.executable, __file__, "--adapt", asked], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found[f"N = {window}, budget {room:.0%}"] = json.loads(done.stdout.splitlines()[-1])
    return found


def adapt(*, model: str, ssd: str, window: int, room: float) -> dict[str, Any]:
    """Forty steps from one window, and what changed after which."""
    workload = load(*MODELS[model])
    program = capture(workload)
    graph = program.graph
    costs = measured(profile(program), {"ssd": Path(ssd)})
    plan = make_plan(graph, offloading("ssd", window), 0, costs)
    expected = simulate(graph, lower(graph, plan), costs)
    budget = int(room * expected.peak_bytes)
    file = PlanFile(WorkloadRef(*MODELS[model]), graph.digest, f"{budget}B", budget, 0, {}, plan, expected)
    steps = []
    with TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, file, stores={"ssd": ssd}, adapt=True
    ) as step:
        for _ in range(STEPS):
            ran = step.plan
            began = time.perf_counter()
            step(workload.batch)
            steps.append(
                {
                    "seconds": time.perf_counter() - began,
                    "stall_seconds": step.stall_seconds,
                    "window": ran.window,
                    "offloaded": len(ran.offload),
                    "predicted_peak_bytes": peak_bytes(graph, ran, costs),
                }
            )
    return {"budget_bytes": budget, "steps": steps}


def search(name: str, arguments: dict[str, Any], stores: dict[str, Path]) -> dict[str, Any]:
    """What `autotune tune` picks with every store at hand, at a budget that it cannot keep for nothing."""
    command = [
        *(sys.executable, "-m", "autotune", "tune", name, "--budget", SEARCHED, "--time", "4m", "--json"),
        *(part for key, value in arguments.items() for part in ("--set", f"{key}={value}")),
        *(part for store, directory in stores.items() for part in ("--store", f"{store}={directory}")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"budget": SEARCHED, "failed": done.stderr.strip().splitlines()[-1]}
    document = json.loads(done.stdout)
    picked = document["best"]
    plan = from_json(Plan, picked["plan"], where="plan")
    expected = from_json(Estimate, picked["estimate"], where="estimate")
    seen = from_json(Measurement, picked["measurement"], where="measurement")
    lanes = seen.lanes
    times = {
        "time_ratio": seen.time_ratio,
        "stall_seconds": seen.stall_seconds,
        "seconds": seen.median_seconds,
        "transfer_bytes": seen.transfer_bytes,
        "hidden": lanes.hidden if lanes else None,
    }
    return {"budget": SEARCHED, "settings": picked["settings"], "row": row(plan, expected, seen, times, 0)}


def _cells(row: dict[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return "" if row[key] is None else f"{row[key] / 2**20:.1f}"

    error = f"{row['predicted_peak_bytes'] / row['peak_bytes'] - 1:+.2%}" if row["peak_bytes"] else row["outcome"]
    between = " ({:.3f} to {:.3f})".format(*row["ratio_without_95"]) if "ratio_without" in row else ""
    return [
        mib("predicted_peak_bytes"), mib("peak_bytes"), error, mib("charged_bytes"),
        f"{row['time_ratio']:.3f}" if row["time_ratio"] else "",
        f"{row['ratio_without']:.3f}{between}" if between else "",
        f"{row['transfer_bytes'] / 2**20:.0f}",
        f"{1e3 * row['predicted_stall_seconds']:.1f}", f"{1e3 * row['stall_seconds']:.1f}",
        "" if row["hidden"] is None else f"{row['hidden']:.1%}", str(row["recomputed"]), str(row["offloaded"]),
    ]  # fmt: skip


def _adapted(one: dict[str, Any]) -> str:
    steps = one["steps"]
    runs = [(step["window"], step["offloaded"]) for step in steps]
    changes = [at for at in range(1, len(runs)) if runs[at] != runs[at - 1]]
    first = steps[: changes[0]] if changes else steps
    both = [
        [statistics.median(step[key] for step in part[-5:]) for part in (first, steps)]
        for key in ("seconds", "stall_seconds")
    ]
    windows = " -> ".join(str(runs[at][0]) for at in (0, *changes))
    highest = max(step["predicted_peak_bytes"] for step in steps)
    return " | ".join(
        [
            f"{one['budget_bytes'] / 2**20:.1f}", windows, str(changes[-1] if changes else 0),
            f"{both[0][0]:.3f} -> {both[0][1]:.3f}", f"{1e3 * both[1][0]:.1f} -> {1e3 * both[1][1]:.1f}",
            f"{highest / 2**20:.1f}",
        ]
    )  # fmt: skip


HEAD = (
    "plan", "predicted MiB", "peak MiB", "error", "charged MiB", "time to eager", "to none (95 %)", "moved MiB",
    "stall predicted ms", "stall ms", "hidden", "recomputed", "offloaded",
)  # fmt: skip


def summary(results: dict[str, Any]) -> str:
    """A table for each model and part."""
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
    for model, known in results["models"].items():
        rates = "; ".join(
            f"{name} {cost['write_bytes_per_second'] / 1e9:.2f} GB/s write, {cost['read_bytes_per_second'] / 1e9:.2f} read,"
            f" ops beside it {cost['contention']:.2f} times as long"
            for name, cost in known["stores"].items()
        )
        lines += ["", f"Stores of {model}, as probed last: {rates}."]
        for part in PLANS:
            if not known.get(part):
                continue
            lines += ["", f"## {model}, {part}", ""]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += [f"| {what} | " + " | ".join(_cells(row)) + " |" for what, row in known[part].items()]
        if known.get("adapt"):
            lines += [
                "",
                f"## {model}, adapt",
                "",
                "Medians of the last five steps with the first window, and of the last five of all.",
                "",
            ]
            lines += ["| from | budget MiB | N | settled after step | step s | stall ms | highest predicted MiB |"]
            lines += ["|---|--:|---|--:|--:|--:|--:|"]
            lines += [f"| {what} | {_adapted(one)} |" for what, one in known["adapt"].items()]
        if "row" in known.get("search", {}):
            found = known["search"]
            lines += ["", f"## {model}, what `tune --budget {found['budget']}` picks with both stores at hand", ""]
            lines += [f"offload {found['settings']['offload']}, recompute {found['settings']['recompute']}", ""]
            lines += ["| " + " | ".join(HEAD) + " |", "|---" + "|--:" * (len(HEAD) - 1) + "|"]
            lines += ["| picked | " + " | ".join(_cells(found["row"])) + " |"]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], out: Path) -> None:
    """N against peak and time, a picture for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for model, known in results["models"].items():
        rows = {
            what: row for what, row in known.get("windows", {}).items() if what.startswith("N = ") and "," not in what
        }
        if not rows:
            continue
        windows = [int(what.removeprefix("N = ")) for what in rows]
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        axes.plot(
            windows, [row["peak_bytes"] / 2**20 for row in rows.values()], "o-", color="C0", label="peak, measured"
        )
        axes.plot(
            windows, [row["predicted_peak_bytes"] / 2**20 for row in rows.values()], "x:", color="C0", label="predicted"
        )
        axes.set(xlabel="N, layers in memory", ylabel="peak of the step, MiB", title=model)
        axes.axhline(known["windows"]["none"]["peak_bytes"] / 2**20, color="C0", lw=0.8, ls="--", label="no offload")
        other = axes.twinx()
        ratios = [row["ratio_without"] for row in rows.values()]
        low, high = zip(*(row["ratio_without_95"] for row in rows.values()), strict=True)
        errors = [
            [r - at for r, at in zip(ratios, low, strict=True)],
            [at - r for r, at in zip(ratios, high, strict=True)],
        ]
        other.errorbar(windows, ratios, errors, fmt="s-", color="C1", capsize=2)
        other.axhline(1.0, color="C1", lw=0.8, ls="--")
        other.set(ylabel="step time to the same without offload")
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
        print(json.dumps(adapt(**json.loads(options.adapt))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {"models": {}, "commands": []}
    results["device"] = to_json(this_device("cpu"))
    told = [part if str(part) not in {str(options.ssd), str(options.ramdisk)} else "DIR" for part in sys.argv[1:]]
    command = shlex.join(["python", "experiments/offload/run.py", *told])
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
