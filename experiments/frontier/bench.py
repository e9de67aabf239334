"""Questions about one model to processes of their own: bytes and results to fresh ones, seconds to one each in turns."""

import math
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from peers import PEERS, ROUNDED, Compiled

from autotune.measure.child import Child
from autotune.measure.messages import Spec
from autotune.measure.worker.reference import Reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from turns import How, Variant, in_turns

HERE = Path(__file__).parent
NEGLIGIBLE = 1e-4
"""Of the norm of all gradients: a gradient below it (a key's bias has none, but for rounding) is compared with that."""
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

    def in_turns(self, variants: dict[str, Any], how: How) -> dict[str, Any]:
        """Seconds and charge of peers (None, and eager) and of plans."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as own:
            ready = {
                name: Variant(
                    partial(self.child, name if plan is None else "eager", Path(own), return_memory=False),
                    plan,
                    compiles=isinstance(PEERS.get(name), Compiled),
                )
                for name, plan in variants.items()
            }
            return in_turns(ready, how, self.say)

    def say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


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
            if found.equals(name, expected.load(name)):
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
