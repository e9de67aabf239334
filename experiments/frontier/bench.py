"""Questions about one model to processes of their own: bytes and results to fresh ones, seconds to one each in turns."""

import itertools
import math
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from peers import ROUNDED

from autotune.harness.child import Child
from autotune.harness.messages import Failed, Spec
from autotune.harness.reference import Reference

HERE = Path(__file__).parent
NEGLIGIBLE = 1e-4
"""Of the norm of all gradients: a gradient below it (a key's bias has none, but for rounding) is compared with that."""
BESIDE = 2
"""Blocks of other variants between two of eager: each has one for a neighbour."""
ROOM = 3
"""Times what the largest process so far took, that must be free for another to get ready."""
KINDS = {"loss": "step ", "gradients": "gradient.", "parameters": "parameter.", "buffers": "buffer."}
"""What a result's name begins with."""


class Bench:
    """One model's workload, eager or as a peer runs it."""

    def __init__(self, name: str, model: str, arguments: dict[str, Any], scratch: Path) -> None:
        self.name, self.model, self.arguments, self.scratch = name, model, arguments, scratch

    def workload(self, peer: str, *, still: bool = False) -> dict[str, Any]:
        if peer == "eager" and not still:
            return {"reference": self.model, "arguments": self.arguments}
        arguments = {"peer": peer, "model": self.model, "still": still, **self.arguments}
        return {"reference": f"{HERE / 'peers.py'}:workload", "arguments": arguments}

    def child(self, peer: str, scratch: Path, *, return_memory: bool, still: bool = False) -> Child:
        """A process of its own, which keeps malloc as it comes or has it return memory at once.

        The latter is asked for bytes alone: it need not wait by spinning, and may run beside others.
        """
        spec = Spec(**self.workload(peer, still=still), scratch=str(scratch), return_memory=return_memory)
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} if return_memory else None
        return Child.start(spec, scratch / f"{peer}-{return_memory}.log", environment)

    def peer(self, name: str, seconds: float) -> dict[str, Any]:
        """Peak while malloc returns memory at once, above the floor, and how far the results lie from eager's."""
        found = self.eager(seconds) if name == "eager" else self.results(name, seconds, still=True)
        seen = {
            "step_peak_bytes": found["peak_bytes"] - found["floor_bytes"],
            "floor_bytes": found["floor_bytes"],
            "meter": found["meter"],
        }
        return seen if name == "eager" else seen | {"errors": self.errors(name, seconds)}

    def rounding(self, seconds: float) -> dict[str, dict[str, Any]]:
        """How far results lie from eager's where every parameter is off by one ulp at most."""
        self.results(ROUNDED, seconds, still=True)
        return self.errors(ROUNDED, seconds)

    def eager(self, seconds: float) -> dict[str, Any]:
        """Its bytes; its results, after updates, to the bit, are what plans are compared with."""
        return self.results("eager", seconds, still=False)

    def eager_results(self, seconds: float) -> str:
        """Where eager's results lie, after updates, to the bit."""
        if not self.kept("eager", still=False).exists():
            self.eager(seconds)
        return str(self.kept("eager", still=False))

    def errors(self, name: str, seconds: float) -> dict[str, dict[str, Any]]:
        """How far a peer's kept results lie from those of eager that does not update either; they are dropped."""
        if not self.kept("eager", still=True).exists():
            self.results("eager", seconds, still=True)
        mine = self.kept(name, still=True)
        found = compared(Reference(mine), Reference(self.kept("eager", still=True)))
        shutil.rmtree(mine)
        return found

    def kept(self, name: str, *, still: bool) -> Path:
        """Where results are kept."""
        return self.scratch / f"results-{name}-{'still' if still else 'updated'}"

    def results(self, name: str, seconds: float, *, still: bool) -> dict[str, Any]:
        """Run the compared steps in a process of their own, keep their results, and tell bytes."""
        request = {"do": "baseline_bytes", "reference": str(self.kept(name, still=still))}
        return self.ask(name, request, return_memory=True, seconds=seconds, still=still)

    def ask(
        self, peer: str, request: dict[str, Any], *, return_memory: bool, seconds: float, still: bool = False
    ) -> dict[str, Any]:
        """One question to a process of its own."""
        self.say(f"{request['do']} of {peer}")
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            child = self.child(peer, Path(own), return_memory=return_memory, still=still)
            try:
                return child.ask(request, seconds)
            finally:
                child.end()

    def in_turns(self, variants: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
        """Seconds and charge of variants, peers (None) and plans, each in a process of its own with malloc as it comes.

        In each round every variant runs a block, in another order, with a block of eager before and after every two; the
        processes of the others rest. A variant that fails, or whose turn to get ready comes when memory for the largest of
        them is short or, where it compiles, half of the time is gone, is named and left out.
        """
        began = time.monotonic()
        largest = 0
        found: dict[str, Any] = {"blocks": [], "failed": {}, "left_out": [], "charged": {}}
        with ExitStack() as stack, tempfile.TemporaryDirectory(dir=self.scratch) as own:
            children: dict[str, Child] = {}
            for name, plan in variants.items():
                late = plan is None and time.monotonic() - began > how["seconds"] / 2
                if name != "eager" and (late or psutil.virtual_memory().available < ROOM * largest):
                    found["left_out"].append(name)
                    continue
                self.say(f"{name} gets ready")
                child = self.child(name if plan is None else "eager", Path(own), return_memory=False)
                stack.callback(child.end)
                try:
                    child.ask({"do": "begin", "plan": plan}, how["limit"])
                    # compiles: its charge, which holds the compiler's, is not the step's
                    largest = max(largest, child.ask({"do": "block"}, how["limit"])["charged_bytes"])
                except Failed as failure:
                    found["failed"][name] = reason(failure)
                    child.end()
                else:
                    children[name] = child
            for number in range(how["rounds"]):
                if number >= how["least_rounds"] and time.monotonic() - began > how["seconds"]:
                    break
                self.say(f"round {number + 1} of {how['rounds']}")
                for name in _turns([name for name in children if name != "eager"], number):
                    if name not in children:
                        continue
                    try:
                        block = children[name].ask({"do": "block"}, how["limit"])
                    except Failed as failure:
                        found["failed"][name] = reason(failure)
                        children.pop(name).end()
                        found["charged"].pop(name, None)  # of the whole process: its floor is not told any more
                        continue
                    found["blocks"].append({"round": number, "variant": name, "seconds": block["seconds"]})
                    found["charged"][name] = max(found["charged"].get(name, 0), block["charged_bytes"])
            for name, child in children.items():
                found["charged"][name] -= child.ask({"do": "finish"}, how["limit"])["floor_bytes"]
        return found

    def say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


def _turns(names: list[str], number: int) -> list[str]:
    """In an order of this round's own, eager before, between and after them."""
    shuffled = random.Random(number).sample(names, len(names))
    parts = [["eager", *shuffled[at : at + BESIDE]] for at in range(0, len(shuffled), BESIDE)]
    return [*itertools.chain(*parts), "eager"]


def compared(found: Reference, expected: Reference) -> dict[str, dict[str, Any]]:
    """Per kind of result the largest relative error of any tensor by norm, whose it is, and whether all bits agree."""
    made = {}
    for kind, begins in KINDS.items():
        names = {name for name in expected.names if name.startswith(begins)}
        others = {name for name in found.names if name.startswith(begins)}
        if names != others:
            made[kind] = {"error": math.inf, "worst": min(names ^ others), "equal": False}
            continue
        whole = math.hypot(*(float(expected.load(name).double().norm()) for name in names))
        worst, error = "", 0.0
        for name in sorted(names):
            mine, theirs = found.load(name).double(), expected.load(name).double()
            if found.error(name, expected.load(name)) == 0.0:
                continue
            size = max(float(theirs.norm()), NEGLIGIBLE * whole)
            off = float((mine - theirs).norm()) / size if size else math.inf
            if not off <= error:
                worst, error = name, math.inf if math.isnan(off) else off
        made[kind] = {"error": error, "worst": worst, "equal": not worst}
    return made


def exact(seen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same for a plan, which was compared with eager's results to the bit, all of them at once."""
    one = {"error": seen["max_error"], "worst": seen["differs"], "equal": seen["max_error"] == 0.0}
    return dict.fromkeys(KINDS, one)


def reason(failure: Failed) -> str:
    """In one line, without this machine's paths."""
    said = failure.detail if failure.ours() else f"{failure.outcome}: {failure.detail}"
    return said.splitlines()[0].replace(f"{HERE}/", "")
