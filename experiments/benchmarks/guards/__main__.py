"""Step time that the checks of Python values add, for every workload of the zoo.

`python -m experiments.benchmarks.guards` needs about 6 quiet minutes and writes `results/`.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from autotune.capture.python.guards import Guards
from autotune.capture.python.step_module import flatten_for_step
from autotune.capture.signature import ModelState, read_model_state
from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.runtime import train_step as apply
from autotune.runtime.train_step import TrainStep
from autotune.study.verdicts.statistics import median_interval
from autotune.workloads.factory import load_workload
from autotune.workloads.workload import Workload
from experiments.common.commands import refuse_busy_machine
from experiments.common.facts import collect_facts, format_interval, format_origin
from experiments.common.result_file import capture_digests, write_result

HERE = Path(__file__).parent

TARGET = 0.01
"""Largest accepted share of the step time that the checks take."""
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 4}, "resnet50": {"batch": 2}, "resnet152": {"batch": 1}, "mobilenet_v2": {"batch": 4},
    "segformer": {"batch": 1}, "vit": {"batch": 4}, "gpt2": {"batch": 1}, "bert": {"batch": 1}, "lstm": {"batch": 8},
    "lstm_fused": {"batch": 8},
}  # fmt: skip
"""Small batches: the shorter the step, the larger the share of its checks."""
PAIRS, TINY_PAIRS = 40, 6
CALLS = 200
"""Number of calls of the checks alone; the median counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--tiny", action="store_true", help="does the script work at all?")
    parser.add_argument("--anyway", action="store_true", help="time on a busy machine, too")
    options = parser.parse_args()
    if options.tiny:
        from tests.workloads.zoo.tiny import TINY as models
    else:
        models = MODELS
    pairs = TINY_PAIRS if options.tiny else options.pairs
    refuse_busy_machine(anyway=options.anyway or options.tiny)
    document: dict[str, Any] = collect_facts() | {"models": {}}
    for name in options.models:
        document["models"][name] = measure(name, models[name], pairs)
        print(row(name, document["models"][name]), flush=True)
    out = HERE / "results" / ("tiny-guards" if options.tiny else "")
    out.mkdir(parents=True, exist_ok=True)
    graphs = capture_digests({name: (name, models[name]) for name in options.models})
    write_result(out / "results.json", document, graphs)
    (out / "summary.md").write_text(summary(document), encoding="utf-8")


def measure(name: str, arguments: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Time steps with and without the checks, interleaved, and the checks alone."""
    torch.manual_seed(0)
    workload = load_workload(name, arguments)
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, _plan(workload)) as step:
        for _ in range(4):  # an arena records two steps
            step(workload.batch)
        checked, unchecked = [], []
        for number in range(pairs):
            for with_checks in (True, False) if number % 2 else (False, True):
                with nullcontext() if with_checks else _unchecked():
                    begin = time.perf_counter()
                    step(workload.batch)
                    (checked if with_checks else unchecked).append(time.perf_counter() - begin)
        return {
            "arguments": arguments,
            "graph": step.graph.digest,
            "parameters": sum(1 for _ in workload.model.parameters()),
            "check_seconds": _check_seconds(step, workload.batch),
            "checked_seconds": checked,
            "unchecked_seconds": unchecked,
        }


def _plan(workload: Workload) -> Plan:
    """Return the traced plan in an arena, without profile or planner."""
    return Plan(Plan.traced(capture(workload).graph).order, allocator="arena")


@contextmanager
def _unchecked() -> Iterator[None]:
    """Run steps without the checks inside: the model's state is read once, and the guards always hold."""
    states: dict[int, ModelState] = {}

    def read_once(model: torch.nn.Module, trained: set[int]) -> ModelState:
        if id(model) not in states:
            states[id(model)] = read_model_state(model, trained)
        return states[id(model)]

    with mock.patch.object(apply, "read_model_state", read_once), mock.patch.object(Guards, "hold", _always_hold):
        yield


def _always_hold(*_: object) -> bool:
    return True


def _check_seconds(step: TrainStep, batch: Any) -> float:
    """Return the median time of the checks alone: the guards, and the walk over modules, parameters and hooks."""
    guards = step._selector.last.program.guards
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        parts = flatten_for_step(batch, step._loss_fn)
        step._signature(parts)
        assert guards.hold(parts.tensors, parts.constants)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def check_share(result: dict[str, Any]) -> float:
    """Return the time of the checks over that of a step without them."""
    return float(result["check_seconds"] / np.median(result["unchecked_seconds"]))


def step_ratios(result: dict[str, Any]) -> list[float]:
    """Return the time of steps with checks over that of their neighbours without."""
    return [a / b for a, b in zip(result["checked_seconds"], result["unchecked_seconds"], strict=True)]


def row(name: str, result: dict[str, Any]) -> str:
    shown = format_interval(median_interval(step_ratios(result)))
    step = np.median(result["unchecked_seconds"]) * 1e3
    return f"| {name} | {result['parameters']} | {step:.1f} | {result['check_seconds'] * 1e6:.0f} | {check_share(result):.2%} | {shown} |"


def summary(document: dict[str, Any]) -> str:
    """Format a table of all models."""
    worst = max(map(check_share, document["models"].values()))
    kept = "kept" if worst <= TARGET else "missed"
    lines = [
        "| workload | parameters | step, ms | checks, us | share of the step | step with checks over without |",
        "|---|--:|--:|--:|--:|--:|",
        *(row(name, found) for name, found in document["models"].items()),
        "",
        f"Largest share {worst:.2%}; at most {TARGET:.0%} was asked: {kept}. {format_origin(document)}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
