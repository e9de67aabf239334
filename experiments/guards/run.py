"""Time that the checks of Python values add to a step, for every workload of the zoo.

`python experiments/guards/run.py` needs about 6 quiet minutes and writes `results/`.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from autotune.capture.python.guards import Guards
from autotune.capture.signature import ModelState, model_state
from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.runtime import train_step as apply
from autotune.runtime.train_step import TrainStep
from autotune.workloads import workload
from autotune.workloads.factory import load

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from facts import facts, median_interval, origin  # noqa: E402 - of experiments, which is no package

TARGET = 0.01
"""Largest share of a step that the checks may take."""
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch": 4}, "resnet50": {"batch": 2}, "resnet152": {"batch": 1}, "mobilenet_v2": {"batch": 4},
    "segformer": {"batch": 1}, "vit": {"batch": 4}, "gpt2": {"batch": 1}, "bert": {"batch": 1}, "lstm": {"batch": 8},
    "lstm_fused": {"batch": 8},
}  # fmt: skip
"""Small batches: the shorter the step, the larger the share of its checks."""
PAIRS, TINY_PAIRS = 40, 6
CALLS = 200
"""Calls of the checks alone, of which the median is taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--tiny", action="store_true", help="does the script work at all?")
    options = parser.parse_args()
    if options.tiny:
        sys.path.insert(0, str(HERE.parent.parent))
        from tests.zoo.tiny import TINY as models
    else:
        models = MODELS
    pairs = TINY_PAIRS if options.tiny else options.pairs
    document: dict[str, Any] = facts() | {"models": {}}
    for name in options.models:
        document["models"][name] = measure(name, models[name], pairs)
        print(row(name, document["models"][name]), flush=True)
    out = HERE / "results" / ("tiny-guards" if options.tiny else "")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "summary.md").write_text(summary(document))


def measure(name: str, arguments: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Time steps with and without the checks in turns, and the checks alone."""
    torch.manual_seed(0)
    made = load(name, arguments)
    with TrainStep(made.model, made.loss_fn, made.optimizer, made.batch, _plan(made)) as step:
        for _ in range(4):  # an arena records two steps
            step(made.batch)
        checked, unchecked = [], []
        for number in range(pairs):
            for with_checks in (True, False) if number % 2 else (False, True):
                with nullcontext() if with_checks else _unchecked():
                    begin = time.perf_counter()
                    step(made.batch)
                    (checked if with_checks else unchecked).append(time.perf_counter() - begin)
        return {
            "arguments": arguments,
            "graph": step.graph.digest,
            "parameters": sum(1 for _ in made.model.parameters()),
            "check_seconds": _check_seconds(step, made.batch),
            "checked_seconds": checked,
            "unchecked_seconds": unchecked,
        }


def _plan(made: workload.Workload) -> Plan:
    """The traced plan in an arena, without profile or planner."""
    return Plan(Plan.traced(capture(made).graph).order, allocator="arena")


@contextmanager
def _unchecked() -> Iterator[None]:
    """Run steps without the checks for a while: the model's state is read once, and the guards are not asked."""
    states: dict[int, ModelState] = {}

    def read_once(model: torch.nn.Module, trained: set[int]) -> ModelState:
        if id(model) not in states:
            states[id(model)] = model_state(model, trained)
        return states[id(model)]

    with mock.patch.object(apply, "model_state", read_once), mock.patch.object(Guards, "hold", _yes):
        yield


def _yes(*_: object) -> bool:
    return True


def _check_seconds(step: TrainStep, batch: Any) -> float:
    """Median time of the checks alone: the guards, and the walk over modules, parameters and their hooks."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    guards = step._last.program.guards
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        step._signature(batch)
        assert guards.hold(tensors)
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


def share(found: dict[str, Any]) -> float:
    """Time of the checks over that of a step without them."""
    return float(found["check_seconds"] / np.median(found["unchecked_seconds"]))


def ratios(found: dict[str, Any]) -> list[float]:
    """Of neighbouring steps, with checks over without."""
    return [a / b for a, b in zip(found["checked_seconds"], found["unchecked_seconds"], strict=True)]


def row(name: str, found: dict[str, Any]) -> str:
    beside = ratios(found)
    bounds = median_interval(beside)
    shown = f"{np.median(beside):.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")
    step = np.median(found["unchecked_seconds"]) * 1e3
    return f"| {name} | {found['parameters']} | {step:.1f} | {found['check_seconds'] * 1e6:.0f} | {share(found):.2%} | {shown} |"


def summary(document: dict[str, Any]) -> str:
    """A table of all models."""
    worst = max(map(share, document["models"].values()))
    kept = "kept" if worst <= TARGET else "missed"
    lines = [
        "| workload | parameters | step, ms | checks, us | share of the step | step with checks over without (95 %) |",
        "|---|--:|--:|--:|--:|--:|",
        *(row(name, found) for name, found in document["models"].items()),
        "",
        f"Largest share {worst:.2%}; at most {TARGET:.0%} was asked: {kept}. {origin(document)}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
