"""Ours for a budget: the planners' fastest plan by estimate, measured until its peak keeps the budget."""

import time
from functools import partial
from typing import Any, Self

from bench import Bench
from summary import SLACK

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.measure.messages import Failed
from autotune.planners import KINDS, space
from autotune.planners.auto import Plans, leaders
from autotune.planners.candidates import Candidate
from autotune.planners.space import search_space
from autotune.records.json_codec import from_json, to_json
from autotune.units import fmt_bytes

TRIES = 3
"""Plans made for one budget: each aims lower by what the one before it peaked too high."""
SECONDS = 1800.0


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
            made = self.fastest(aim)
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
            "settings": made.settings,
            "estimate": to_json(made.estimate),
            "recomputed_ops": made.plan.recomputed,
        }

    def peak(self, plan: Plan) -> dict[str, Any]:
        """Peak of a step in the arena, after a comparison with eager to the bit."""
        request = {"do": "plan_bytes", "plan": to_json(plan), "reference": self.reference, "tolerance": float("inf")}
        found = self.ask(request)
        return {
            "step_peak_bytes": found["peak_bytes"] - found["floor_bytes"],
            "floor_bytes": found["floor_bytes"],
            "meter": found["meter"],
            "max_error": found["max_error"],
            "differs": found["detail"],
        }

    def fastest(self, aim: int) -> Candidate:
        """By estimate: where `auto` is when the time for planning ends."""
        began = time.perf_counter()
        plans = Plans(self.graph, self.costs, aim)
        choices = {kind: tuple(known) for kind, known in self.space.items()}
        for settings in leaders(plans, choices, partial(space.preset, KINDS, self.space)):  # noqa: B007 - the last one
            if time.perf_counter() - began > self.planning_seconds:
                break
        return Candidate(settings, *plans.make(settings))
