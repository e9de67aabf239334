"""Plans of this project for a budget: the fastest by estimate, measured until the peak fits the budget."""

import time
from typing import Any, Self

from autotune.ir.plan import Plan
from autotune.measure.messages import Expects, PlanCheckRequest, ReplyT, SurveyRequest
from autotune.planners import KINDS
from autotune.planners.auto import best_plan
from autotune.planners.candidates import Candidate
from autotune.planners.space import build_space
from autotune.records.json_codec import to_json
from autotune.units import fmt_bytes
from experiments.benchmarks.frontier.bench import ModelBench
from experiments.benchmarks.frontier.summary import SLACK

TRIES = 3
"""Number of plans for one budget; each aims lower by the excess of the one before."""
SECONDS = 1800.0


class PlanBench:
    """Plans of one model, and the child process that measures their bytes and compares their results."""

    def __init__(self, bench: ModelBench, planning_seconds: float) -> None:
        self.bench, self.planning_seconds = bench, planning_seconds
        surveyed = bench.ask("eager", SurveyRequest(), return_memory=False, seconds=SECONDS)
        self.graph, self.costs = surveyed.graph, surveyed.costs
        # without stores, which no peer has either; in the arena and in place, as a plan on a CPU is by default
        settled = {"allocator": "arena", "inplace": "greedy"}
        self.space = build_space({**KINDS, **{kind: {name: KINDS[kind][name]} for kind, name in settled.items()}}, ())
        self.reference = bench.eager_results(SECONDS)

    def __enter__(self) -> Self:
        self.child = self.bench.child("eager", self.bench.scratch, return_memory=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end()

    def ask(self, request: Expects[ReplyT]) -> ReplyT:
        """Send one request to the child process, which is replaced if it has died."""
        if not self.child.alive:
            self.child = self.bench.child("eager", self.bench.scratch, return_memory=True)
        return self.child.ask(request, SECONDS)

    def graph_summary(self) -> dict[str, Any]:
        return {
            "digest": self.graph.digest,
            "ops": len(self.graph.ops),
            "values": len(self.graph.values),
            "static_bytes": self.graph.static_bytes,
        }

    def fit(self, name: str, budget: int) -> tuple[Plan, dict[str, Any]]:
        """Return the plan for a budget (0: the lowest peak), with its measurements."""
        aim, tries = budget, []
        for _ in range(TRIES):
            start = time.perf_counter()
            candidate = self.fastest(aim)
            seconds = time.perf_counter() - start
            measured = self.peak(candidate.plan)
            tries.append({"aim_bytes": aim, "step_peak_bytes": measured["step_peak_bytes"]})
            self.bench.log(f"{name}: peaks at {fmt_bytes(measured['step_peak_bytes'])}, {candidate.settings}")
            if not budget or measured["step_peak_bytes"] <= SLACK * budget:
                break
            aim = int(aim * budget / measured["step_peak_bytes"])
        return candidate.plan, measured | {
            "budget_bytes": budget,
            "tries": tries,
            "planning_seconds": seconds,
            "settings": candidate.settings,
            "estimate": to_json(candidate.estimate),
            "recomputed_ops": candidate.plan.recomputed,
        }

    def peak(self, plan: Plan) -> dict[str, Any]:
        """Measure the step's peak in the arena, after a bit-exact comparison with eager."""
        check = self.ask(PlanCheckRequest(plan, self.reference, tolerance=float("inf")))
        assert check.comparison is not None
        assert check.memory is not None
        return {
            "step_peak_bytes": check.memory.peak_bytes - check.memory.floor_bytes,
            "floor_bytes": check.memory.floor_bytes,
            "meter": check.memory.meter,
            "max_error": check.comparison.max_error,
            "differs": check.comparison.detail,
        }

    def fastest(self, aim: int) -> Candidate:
        """Return the fastest plan by estimate that the planners reach in the planning time."""
        return best_plan(self.graph, self.costs, aim, self.space, seconds=self.planning_seconds)
