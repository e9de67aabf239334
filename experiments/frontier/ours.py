"""Ours for a budget: the planners' fastest plan by estimate, measured until its peak keeps the budget."""

import time
from collections.abc import Iterator
from typing import Any, Self

from bench import Bench
from summary import SLACK

from autotune import space
from autotune.candidates import Candidate, candidate
from autotune.costs import Costs
from autotune.errors import AutotuneError
from autotune.graph import TrainGraph
from autotune.harness.messages import Failed
from autotune.measurement import Outcome
from autotune.plan import Plan
from autotune.planners import KINDS
from autotune.records import from_json, to_json
from autotune.space import search_space
from autotune.units import fmt_bytes

TRIES = 3
"""Plans made for one budget: each aims lower by what the one before it peaked too high."""
SECONDS = 1800.0
FIRST = ("update", "recompute", "order")
"""Kinds whose other planners are tried first."""


class Ours:
    """Plans of one model, and the process that measures their bytes and compares their results, plan after plan."""

    def __init__(self, bench: Bench, planning_seconds: float) -> None:
        self.bench, self.planning_seconds = bench, planning_seconds
        found = bench.ask("eager", {"do": "prepare"}, return_memory=False, seconds=SECONDS)
        self.graph = from_json(TrainGraph, found["graph"], where="graph")
        self.costs = from_json(Costs, found["costs"], where="costs")
        # without stores, which no peer has either; in the arena and in place, as a plan on a CPU is by default
        settled = {"allocator": "arena", "inplace": "greedy"}
        self.space = search_space({**KINDS, **{kind: {name: KINDS[kind][name]} for kind, name in settled.items()}}, ())
        self.names = {kind: next(iter(planners)) for kind, planners in self.space.items()}
        self.reference = bench.eager_results(SECONDS)

    def __enter__(self) -> Self:
        self.child = self.bench.child("eager", self.bench.scratch, return_memory=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One question to the process; in place of one that died there is a new one."""
        if not self.child.alive:
            self.child = self.bench.child("eager", self.bench.scratch, return_memory=True)
        reply = self.child.ask(request, SECONDS)
        if "outcome" in reply:
            raise Failed(reply["outcome"], reply.get("detail", ""))
        return reply

    def graph_summary(self) -> dict[str, Any]:
        return {
            "digest": self.graph.digest,
            "ops": len(self.graph.ops),
            "values": len(self.graph.values),
            "static_bytes": self.graph.static_bytes,
        }

    def fit(self, name: str, budget: int) -> tuple[Plan, dict[str, Any]]:
        """The plan for a budget (0: the lowest peak), and everything that was seen of it."""
        aim, tries = budget, []
        for _ in range(TRIES):
            began = time.perf_counter()
            made, passed_over = self.fastest(aim)
            seconds = time.perf_counter() - began
            seen = self.peak(made.plan)
            tries.append({"aim_bytes": aim, "step_peak_bytes": seen["step_peak_bytes"]})
            self.bench.say(f"{name}: peaks at {fmt_bytes(seen['step_peak_bytes'])}, {made.settings}")
            if not budget or seen["step_peak_bytes"] <= SLACK * budget:
                break
            aim = int(aim * budget / seen["step_peak_bytes"])
        return made.plan, seen | {
            "budget_bytes": budget,
            "tries": tries,
            "planning_seconds": seconds,
            "passed_over": passed_over,
            "settings": made.settings,
            "estimate": to_json(made.estimate),
            "recomputed_ops": made.plan.recomputed,
        }

    def peak(self, plan: Plan) -> dict[str, Any]:
        """Peak while malloc returns memory at once, after a comparison with eager to the bit."""
        request = {"do": "plan_bytes", "plan": to_json(plan), "reference": self.reference, "tolerance": float("inf")}
        found = self.ask(request)
        return {
            "step_peak_bytes": found["peak_bytes"] - found["floor_bytes"],
            "floor_bytes": found["floor_bytes"],
            "meter": found["meter"],
            "max_error": found["max_error"],
            "differs": found["detail"],
        }

    def fastest(self, aim: int) -> tuple[Candidate, dict[str, str]]:
        """By estimate, choosing one kind of planner after the other from where the last budget ended.

        Also what was not tried or broke a rule, with the reason.
        """
        best, passed_over = None, {}
        began = time.perf_counter()
        tried: list[dict[str, str]] = []
        for names in self.choices():
            if names in tried:
                continue
            tried.append(names)
            label = " ".join(f"{kind}={name}" for kind, name in names.items())
            if best is not None and time.perf_counter() - began > self.planning_seconds:
                passed_over[label] = "no time left"
                continue
            try:
                made = candidate(self.graph, self.costs, space.preset(KINDS, self.space, names), aim)
            except AutotuneError as error:
                passed_over[label] = str(error)
                continue
            if best is None or worth(made, aim) < worth(best, aim):
                best, self.names = made, names
        if best is None:
            raise Failed(Outcome.CRASHED, f"no planner made a plan: {passed_over}")
        return best, passed_over

    def choices(self) -> Iterator[dict[str, str]]:
        """Names of planners: the last winner's, then with each other planner of one kind after the other, twice."""
        yield dict(self.names)
        for kind in 2 * sorted(self.space, key=lambda kind: FIRST.index(kind) if kind in FIRST else len(FIRST)):
            # the default first is the cheapest: what was added last is the ablest
            for name in reversed(self.space[kind]):
                if name != self.names[kind]:
                    yield {**self.names, kind: name}


def worth(made: Candidate, aim: int) -> tuple[float, float, int]:
    """Bytes over the aim, then seconds, then bytes."""
    return max(0, made.estimate.peak_bytes - aim), made.estimate.seconds, made.estimate.peak_bytes
