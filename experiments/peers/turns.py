"""Run all variants of one model in turns, in this one process: `python turns.py REQUEST.json ANSWER.json`."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blocks import checkpointed

from autotune.apply import TrainStep
from autotune.harness.procedure import trim
from autotune.plan import Plan
from autotune.records import from_json
from autotune.workload import Workload, load

SETTLING_STEPS = 3
"""Until an arena replays and malloc has found its thresholds."""


@dataclass
class Variant:
    """One way to run the step."""

    step: Callable[[], torch.Tensor]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around a block of steps, outside of what is timed."""
    planned: TrainStep | None = None


@dataclass
class Turns:
    """One model and what it starts every round with."""

    workload: Workload
    initial: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.initial = {name: tensor.detach().clone() for name, tensor in self.own().items()}

    def own(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        model = self.workload.model
        return dict(model.named_parameters()) | dict(model.named_buffers())

    def eager(self) -> torch.Tensor:
        """One plain step, as anyone writes it."""
        self.workload.optimizer.zero_grad(set_to_none=True)
        loss = self.workload.loss_fn(self.workload.model, self.workload.batch)
        loss.backward()
        self.workload.optimizer.step()
        return loss.detach()

    def restore(self) -> None:
        """Parameters, buffers and optimizer state as at the start, in the same memory; no gradients."""
        self.workload.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, tensor in self.own().items():
                tensor.copy_(self.initial[name])
            for state in self.workload.optimizer.state.values():
                for part in state.values():
                    part.zero_()

    def results(self, variant: Variant) -> dict[str, dict[str, torch.Tensor]]:
        """What one step from the start makes."""
        self.restore()
        self.workload.optimizer.state.clear()
        torch.manual_seed(0)
        gradients: dict[str, torch.Tensor] = {}
        if variant.planned is not None:
            variant.planned.on_gradient = lambda name, gradient: gradients.update({name: gradient.clone()})
        with variant.around():
            loss = variant.step()
        if variant.planned is not None:
            variant.planned.on_gradient = None
        named = dict(self.workload.model.named_parameters())
        gradients |= {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        after = {name: tensor.detach().clone() for name, tensor in self.own().items()}
        return {
            "loss": {"loss": loss.clone()},
            "gradients": gradients,
            "parameters": {name: after[name] for name in named},
            "buffers": {name: after[name] for name in after.keys() - named.keys()},
        }

    def block(self, variant: Variant, steps: int) -> list[float]:
        """Seconds of each step in a row; one more before them is not measured."""
        self.workload.model.zero_grad(set_to_none=True)
        trim()
        seconds = []
        with variant.around():
            for number in range(1 + steps):
                start = time.perf_counter()
                made = variant.step()
                if number:
                    seconds.append(time.perf_counter() - start)
                del made
        return seconds


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference; 0.0 only where all bits agree."""
    if one.keys() != other.keys():
        return float("inf")
    apart = [(one[name].double(), other[name].double()) for name in one if not torch.equal(one[name], other[name])]
    return max(((a - b).abs().max().item() for a, b in apart), default=0.0)


def variants(turns: Turns, plans: dict[str, Any], stack: ExitStack) -> dict[str, Variant]:
    """Eager, checkpoint, and a TrainStep for every plan."""
    given = turns.workload
    made = {
        "eager": Variant(turns.eager),
        "checkpoint": Variant(turns.eager, partial(checkpointed, given.model)),
    }
    for name, document in plans.items():
        plan = from_json(Plan, document, where=name)
        planned = TrainStep(given.model, given.loss_fn, given.optimizer, given.batch, plan)
        made[name] = Variant(partial(stack.enter_context(planned), given.batch), planned=planned)
    return made


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    turns = Turns(load(request["model"], request["arguments"]))
    with ExitStack() as stack:
        ways = variants(turns, request["plans"], stack)
        expected = turns.results(ways["eager"])
        errors = {}
        for name, way in ways.items():
            found = turns.results(way)
            errors[name] = {kind: distance(found[kind], expected[kind]) for kind in expected}
        del expected, found
        turns.eager()  # makes the optimizer's state, which an arena must not see being made
        for way in ways.values():
            turns.block(way, SETTLING_STEPS)
        blocks = []
        names = list(ways)
        for number in range(request["rounds"]):
            turns.restore()
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = turns.block(ways[name], request["steps"])
                blocks.append({"round": number, "variant": name, "seconds": seconds})
    answer = {"errors": errors, "blocks": blocks, "threads": torch.get_num_threads()}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
