"""The steps of a first hour on a GPU, in order of value."""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.cli.progress_panel import show_progress
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.measure.device.directories import inspect_store
from autotune.planners import KINDS, make_plan
from autotune.planners.auto import best_plan
from autotune.planners.space import build_space, preset_settings
from autotune.predict.simulate import simulate
from autotune.records.config import load_config
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.study.session import tune
from autotune.workloads.reference import WorkloadRef
from experiments.gpu.machine import ROOT, Machine, Runner, opened

Data = dict[str, Any]
HERE = Path(__file__).parent
ZOO: dict[str, Data] = {
    "gpt2": {"batch": 16},
    "resnet50": {"batch": 64},
    "bert": {"batch": 16},
    "vit": {"batch": 32},
    "mobilenet_v2": {"batch": 64},
    "lstm_fused": {"batch": 32},
    "resnet18": {"batch": 64},
    "resnet152": {"batch": 32},
    "segformer": {"batch": 8},
    "lstm": {"batch": 32},
}
"""Arguments of each zoo workload, the most valuable first."""
DTYPES = ("bfloat16", "float32")
BUDGET = "65%"
"""Budget of a tuned plan, as a share of eager's step bytes."""
GPT2 = {"batch": 4, "tokens": 1024, "depth": 12, "width": 768, "vocabulary": 50304}
RESNET50 = {"batch": 64, "size": 224}
FRONTIERS: dict[str, tuple[str, Data, Data]] = {
    "gpt2": ("gpt2", GPT2, {}),
    "resnet50": ("resnet50", RESNET50, {}),
    "gpt2 sdpa": ("gpt2", GPT2 | {"attention": "sdpa"}, {"attention": "eager"}),
    "resnet50 channels_last": (
        "resnet50",
        RESNET50 | {"memory_format": "channels_last"},
        {"memory_format": "contiguous"},
    ),
    "gpt2 sdpa bfloat16": ("gpt2", GPT2 | {"attention": "sdpa", "dtype": "bfloat16"}, {}),
}
"""Name of a frontier: model, arguments, and those of the peers that are measured with others, too. Sizes are those of the
papers: smaller models wait for their launches on a large GPU."""
TUNED: dict[str, Data] = {"gpt2": GPT2 | {"attention": "sdpa"}, "resnet50": RESNET50}
"""Tuned workloads and their arguments."""
WINDOWS = (1, 2, 4, 8, 3, 6, 5, 7)
"""Offload windows N, the most different first."""
STORES = ("host", "ssd")
"""Stores of a GPU's values."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the script."""

    name: str
    seconds: float
    """Time that it may take: it starts only where that much is left."""
    run: Callable[[Machine, float], Data]
    """Runs it within the given seconds and returns its data; `exit` is the exit code of its command, if it runs one."""


def all_steps() -> list[Step]:
    """Return every step, the most valuable first."""
    return [
        Step("doctor", 60, run_doctor),
        Step("tests", 240, run_tests),
        *(Step(f"check {model}", 240, partial(check_workload, model, {})) for model in TUNED),
        *(
            Step(f"check {model} bfloat16", 240, partial(check_workload, model, {"dtype": "bfloat16"}))
            for model in TUNED
        ),
        *(Step(f"check {model}", 240, partial(check_workload, model, {})) for model in ZOO if model not in TUNED),
        *(
            Step(f"tune {model} {dtype}", 400, partial(tune_workload, model, dtype))
            for model in TUNED
            for dtype in DTYPES
        ),
        *(Step(f"frontier {name}", 330, partial(measure_frontier, name)) for name in FRONTIERS),
        *(Step(f"graphs {model}", 100, partial(measure_graphs, model)) for model in TUNED),
        *(
            Step(f"offload {store} {window}", 100, partial(measure_window, "gpt2", store, window))
            for store in STORES
            for window in WINDOWS
        ),
        Step("fleet", 240, run_fleet),
    ]


def run_doctor(machine: Machine, seconds: float) -> Data:
    """Check what this machine can measure."""
    code, output = machine.execute(("autotune", "doctor", "--json"), seconds)
    return {"exit": code, "output": output[-8000:]}


def run_fleet(machine: Machine, seconds: float) -> Data:
    """Tune a small GPT-2 on a fleet of one: this GPU, at the far end of a command."""
    fleet = machine.scratch / "fleet.yaml"
    command = json.dumps([sys.executable, "-m", "autotune", "serve"])
    fleet.write_text(f"classes:\n  gpu: {{engine: command, command: {command}, device: cuda}}\n", encoding="utf-8")
    options = ("--set", "batch=4", "--device", "cuda", "--time", "90s", "--trials", "4", "--name", "gpu-fleet")
    code, output = machine.execute(
        ("autotune", "tune", "gpt2", *options, "--fleet", str(fleet), "--on", "gpu"), seconds
    )
    return {"exit": code, "output": output[-8000:]}


def run_tests(machine: Machine, seconds: float) -> Data:
    """Run the tests that need a GPU; modules without one may import packages that a bare machine lacks."""
    modules = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu\n" in path.read_text(encoding="utf-8")
    ]
    names = [str(path.relative_to(ROOT)) for path in modules]
    code, output = machine.execute(("pytest", "-m", "gpu", "-q", *names), seconds)
    return {"exit": code, "output": output[-8000:]}


def check_workload(model: str, arguments: Data, machine: Machine, seconds: float) -> Data:
    """Compare the captured step with eager, predicted with measured peaks, and profiled ops with a step."""
    del seconds
    with opened(machine.runner(WorkloadRef(model, ZOO[model] | arguments))) as runner:
        prepared = runner.prepare()
        traced = Plan.traced(prepared.graph)
        peak = simulate(prepared.graph, lower(prepared.graph, traced), prepared.costs).peak_bytes
        planned = best_plan(prepared.graph, prepared.costs, int(0.7 * peak), accept_first=True).plan
        eager = runner.baseline()
        return {
            "verified": prepared.verified,
            "capture_error": prepared.capture_error,
            "ops": len(prepared.graph.ops),
            "profiled_seconds": sum(prepared.costs.seconds),
            "eager": summary(eager),
            "traced": compare_plan(runner, traced),
            "planned": compare_plan(runner, planned),
        }


def compare_plan(runner: Runner, plan: Plan) -> Data:
    """Return a plan's predicted and measured bytes and seconds."""
    prepared = runner.prepare()
    estimate = simulate(prepared.graph, lower(prepared.graph, plan), prepared.costs)
    predicted = {"predicted_peak_bytes": estimate.peak_bytes, "predicted_seconds": estimate.seconds}
    return predicted | summary(runner.measure(plan, budget_bytes=2**62))


def summary(measurement: Measurement) -> Data:
    """Return the figures of a measurement; bytes are above the floor of the idle process."""
    figures: Data = {"outcome": str(measurement.outcome), "detail": measurement.detail}
    if measurement.outcome is not Outcome.OK:
        return figures
    floor = measurement.floor_bytes or 0
    return figures | {
        "floor_bytes": floor,
        "peak_bytes": (measurement.peak_bytes or floor) - floor,
        "charged_bytes": (measurement.charged_bytes or floor) - floor,
        "step_seconds": statistics.median(measurement.step_seconds),
        "time_ratio": measurement.time_ratio,
        "stall_seconds": measurement.stall_seconds,
        "transfer_bytes": measurement.transfer_bytes,
        "max_error": measurement.max_error,
        "verified": measurement.verified,
        "meter": measurement.meter,
    }


def tune_workload(model: str, dtype: str, machine: Machine, seconds: float) -> Data:
    """Tune a workload; the run's directory stays beside the results, and a later slice resumes it."""
    overrides: dict[str, object] = {"device": "cuda", "budget": BUDGET, "time": f"{int(seconds * 0.8)}s"}
    overrides |= {"plans": str(machine.scratch), "trials": machine.trials}
    arguments = {**TUNED[model], "dtype": dtype}
    config = load_config(model, overrides=overrides, arguments={key: str(value) for key, value in arguments.items()})
    run_dir = machine.scratch / f"tune-{model}-{dtype}"
    with (
        opened(machine.runner(WorkloadRef(model, arguments))) as runner,
        show_progress(config) as show,
    ):
        result = tune(config, runner, run_dir, progress=show, lasting=False)
    return {
        "budget": BUDGET,
        "eager": summary(result.baseline.measurement),
        "best": summary(result.best.measurement) if result.best is not None else None,
        "plans": [
            {"trial": trial.label, "started": trial.started} | summary(trial.measurement)
            for trial in result.trials
            if trial.measurement is not None
        ],
    }


def measure_frontier(name: str, machine: Machine, seconds: float) -> Data:
    """Measure our plans beside eager and PyTorch's own ways to save memory, in one process."""
    out = machine.scratch / f"frontier-{name.replace(' ', '-')}.json"
    model, arguments, also = FRONTIERS[name]
    command = ("experiments.gpu.frontier", model, "--arguments", json.dumps(arguments), "--out", str(out))
    command += ("--also", json.dumps(also)) if also else ()
    out.unlink(missing_ok=True)  # a command that crashes before its first round leaves no figures of an earlier one
    code, output = machine.execute((*command, "--seconds", str(int(seconds / 1.5))), seconds)
    figures: Data = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return {"exit": code, "output": output[-8000:], **figures}


def measure_window(model: str, store: str, window: int, machine: Machine, seconds: float) -> Data:
    """Measure a plan that offloads all that leaves the window of N layers."""
    del seconds
    with opened(machine.runner(WorkloadRef(model, ZOO[model]), store=store)) as runner:
        prepared = runner.prepare()
        graph, costs = prepared.graph, prepared.costs
        peak = simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes
        settings = preset_settings(KINDS, build_space(KINDS, costs.stores), {"offload": "window"})
        ((name, cost),) = costs.stores.items()
        settings["offload"] |= {"window": window, "store": name}
        plan = make_plan(graph, settings, peak // 2, costs)
        figures = {"swaps": len(plan.offload), "budget_bytes": peak // 2}
        figures |= {"store": to_json(cost)}
        if store == "ssd":
            facts = inspect_store(store, machine.scratch)
            figures |= {"is_direct": facts.is_direct, "is_in_memory": facts.holds_memory}
        return figures | compare_plan(runner, plan)


def measure_graphs(model: str, machine: Machine, seconds: float) -> Data:
    """Time the traced step without and with CUDA graphs; a figure of its own, as studies measure steps without."""
    code, output = machine.execute(("experiments.gpu.graphs", model, json.dumps(ZOO[model])), seconds)
    return {"exit": code, "output": output[-8000:]}
