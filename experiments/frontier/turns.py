"""Run variants of one model in turns, in this one process: `python turns.py REQUEST.json ANSWER.json`.

The answer is written anew after every stage, so that a variant that takes the process down is known by name.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peers import PEERS

from autotune.apply import TrainStep
from autotune.capture import capture
from autotune.harness.procedure import trim
from autotune.plan import Plan
from autotune.records import from_json
from autotune.workload import LossFn, Workload, load

SETTLING_STEPS = 3
"""Until an arena replays and malloc has found its thresholds."""
NEGLIGIBLE = 1e-4
"""Of the norm of all gradients: a gradient below it (a key's bias has none, but for rounding) is compared with that."""


@dataclass
class Variant:
    """One way to run the step."""

    step: Callable[[], torch.Tensor]
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around a block of steps, outside of what is timed."""
    planned: TrainStep | None = None
    compiled: list[int] = field(default_factory=list)

    def rest(self) -> None:
        """Give an arena's block back until the next step: all variants' together would not fit."""
        for ready in self.planned._ready.values() if self.planned is not None else ():
            if ready.arena is not None:
                ready.arena.rest()


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

    def step(self, loss_fn: LossFn) -> torch.Tensor:
        """One plain step, as anyone writes it."""
        self.workload.optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(self.workload.model, self.workload.batch)
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
                    if isinstance(part, torch.Tensor):
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
        variant.rest()
        return seconds


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The largest relative error of any tensor by norm, whose it is, and whether all bits agree."""
    if found.keys() != expected.keys():
        return {"error": float("inf"), "worst": next(iter(found.keys() ^ expected.keys())), "equal": False}
    whole = sum(float(tensor.double().norm()) ** 2 for tensor in expected.values()) ** 0.5
    worst, error = "", 0.0
    for name, tensor in expected.items():
        if torch.equal(found[name], tensor):
            continue
        size = max(float(tensor.double().norm()), NEGLIGIBLE * whole)
        away = float((found[name].double() - tensor.double()).norm())
        off = away / size if size else float("inf")
        if not off <= error:
            worst, error = name, float("inf") if math.isnan(off) else off
    return {"error": error, "worst": worst, "equal": not worst}


@dataclass
class Session:
    """What is asked, what is known so far, and where it is written."""

    request: dict[str, Any]
    path: Path
    began: float = field(default_factory=time.monotonic)
    answer: dict[str, Any] = field(
        default_factory=lambda: {"now": "", "errors": {}, "failed": {}, "left_out": [], "compiled": {}, "blocks": []}
    )

    def write(self, now: str = "") -> None:
        self.answer["now"] = now
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.answer))
        draft.replace(self.path)

    @property
    def spent(self) -> float:
        """Part of the time that this session may take."""
        return (time.monotonic() - self.began) / self.request["seconds"]

    def run(self) -> None:
        """Prepare and compare every variant, then time all in turns."""
        self.answer["threads"] = torch.get_num_threads()
        self.write("the model")
        turns = Turns(load(self.request["model"], self.request["arguments"]))
        plain = Variant(partial(turns.step, turns.workload.loss_fn))
        expected = turns.results(plain)
        ways = {"eager": plain}
        with ExitStack() as stack:
            for name, make in self.makers(turns, stack).items():
                # compiling takes longer than anything else here: what comes late is left to the next session
                if self.spent > 0.5 and name in self.request["peers"]:
                    self.answer["left_out"].append(name)
                    continue
                self.write(name)
                try:
                    way = make()
                    found = turns.results(way)
                except Exception as error:  # noqa: BLE001 - a peer that does not run is a row with its reason
                    self.answer["failed"][name] = first_line(error)
                    continue
                self.answer["errors"][name] = {kind: difference(found[kind], expected[kind]) for kind in expected}
                ways[name] = way
                del found
            del expected
            self.write("settling")
            plain.step()  # makes the optimizer's state, which an arena must not see being made
            for way in ways.values():
                turns.block(way, SETTLING_STEPS if way.planned is not None else 1)
            self.rounds(turns, ways)
        self.answer["compiled"] = {name: len(way.compiled) for name, way in ways.items() if way.compiled}
        self.write()

    def makers(self, turns: Turns, stack: ExitStack) -> dict[str, Callable[[], Variant]]:
        """Plans first: nothing is compiled for them."""
        given = turns.workload
        program = capture(given) if self.request["plans"] else None

        def planned(name: str) -> Variant:
            plan = from_json(Plan, self.request["plans"][name], where=name)
            # one capture serves all plans: it takes longer than a step
            with mock.patch("autotune.apply.capture", return_value=program):
                step = TrainStep(given.model, given.loss_fn, given.optimizer, given.batch, plan)
            return Variant(partial(stack.enter_context(step), given.batch), planned=step)

        def peer(name: str) -> Variant:
            way = PEERS[name].way(given)
            return Variant(partial(turns.step, way.loss_fn), way.active, compiled=way.compiled)

        return {name: partial(planned, name) for name in self.request["plans"]} | {
            name: partial(peer, name) for name in self.request["peers"]
        }

    def rounds(self, turns: Turns, ways: dict[str, Variant]) -> None:
        """A block of every variant, in another order in every round, until rounds or time are at an end."""
        names = list(ways)
        for number in range(self.request["rounds"]):
            if number >= self.request["least_rounds"] and self.spent > 1:
                break
            turns.restore()
            for name in random.Random(number).sample(names, len(names)):
                seconds = turns.block(ways[name], self.request["steps"])
                self.answer["blocks"].append({"round": number, "variant": name, "seconds": seconds})
            self.write("a round")


def first_line(error: Exception) -> str:
    """Its kind and what it says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


if __name__ == "__main__":
    Session(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])).run()
