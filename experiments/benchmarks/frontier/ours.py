"""Plans of this project on one capture of a model: eager's kernels or compiled regions, in one memory format."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.measure.children import Children, ChildRole
from autotune.measure.messages import EagerPeakRequest, PlanCheckRequest, SurveyRequest, WiringRequest
from autotune.measure.numerics import find_expected_results
from autotune.measure.spec import Spec
from autotune.planners import KINDS
from autotune.planners.auto import best_plan
from autotune.planners.candidates import Candidate
from autotune.planners.space import Space, build_space
from autotune.predict.bounds import peak_lower_bound
from autotune.records.json_codec import to_json
from autotune.workloads.reference import WorkloadRef
from experiments.benchmarks.frontier.records import SLACK

SECONDS = 1800.0
"""Time limit of one request to a child process, in seconds."""
TRIES = 3
"""Number of plans for one budget; each aims lower by the excess of the one before."""
AT_ONCE = 2
"""Number of budgets that are planned at the same time, each in a process of its own."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Kernels, memory format, rebuild price and threads of a capture."""

    kernels: str = ""
    memory_format: str = ""
    rebuild_price: float = REBUILD_PRICE
    threads: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the capture that a plan is for."""
        return cls(plan.kernels, plan.memory_format, plan.rebuild_price, plan.threads)

    @property
    def name(self) -> str:
        return f"ours {self.mark(Plan(())).capture_name.replace(',', '')}"

    def mark(self, plan: Plan) -> Plan:
        """Return a plan with this capture's kernels, memory format, rebuild price and threads."""
        return plan.captured_as(self)

    def spec(self, workload: WorkloadRef, scratch: Path, profile_cache: Path | None = None) -> Spec:
        """Return the specification of a child process that runs plans on this capture."""
        return Spec(
            workload, scratch, scratch=scratch, kernels=self.kernels, memory_format=self.memory_format,
            rebuild_price=self.rebuild_price, threads=self.threads, profile_cache=profile_cache,
        )  # fmt: skip


class PlanBench:
    """Plans on one capture, each compared bit for bit with the capture's traced step, and that with eager by the gate."""

    def __init__(
        self, capture: Capture, workload: WorkloadRef, scratch: Path, planning_seconds: float, profile_cache: Path
    ) -> None:
        self.capture, self.planning_seconds = capture, planning_seconds
        self.spec = capture.spec(workload, scratch, profile_cache)
        self.children = Children(self.spec)

    def __enter__(self) -> Self:
        ask = self.children.ask
        if self.capture.kernels:
            ask(ChildRole.KERNELS, WiringRequest(), seconds=SECONDS)
            self.children.end(ChildRole.KERNELS)
        surveyed = ask(ChildRole.SURVEY, SurveyRequest(), seconds=SECONDS)
        self.children.end(ChildRole.SURVEY)
        self.graph, self.costs = surveyed.graph, surveyed.costs
        # without stores, which no peer has either; in the arena and in place, as a plan on a CPU is by default
        settled = {"allocator": "arena", "inplace": "greedy"}
        self.space = build_space({**KINDS, **{kind: {name: KINDS[kind][name]} for kind, name in settled.items()}}, ())
        results = self.children.scratch / "eager"
        ask(ChildRole.EAGER, EagerPeakRequest(results), seconds=SECONDS)
        self.children.end(ChildRole.EAGER)
        traced = Plan.traced(self.graph)
        expected, _ = find_expected_results(self.children, self.spec, traced, results)
        assert expected is not None
        self.expected = expected
        return self

    def __exit__(self, *_: object) -> None:
        self.children.close()

    def summary(self) -> dict[str, Any]:
        """Describe the graph, the proved lower bound of any plan's peak, and the comparison with eager."""
        return {
            "digest": self.graph.digest,
            "ops": len(self.graph.ops),
            "bound_bytes": peak_lower_bound(self.graph, self.costs)[0],
            "gate": self.expected.method,
            "share_of_bound": self.expected.capture_error,
        }

    def fastest(self, aim: int) -> Candidate:
        """Return the fastest plan by estimate that the planners reach in the planning time."""
        return best_plan(self.graph, self.costs, aim, self.space, seconds=self.planning_seconds)

    def fit_all(self, budgets: Sequence[int]) -> Iterator[tuple[Plan, dict[str, Any]]]:
        """Yield what `fit` returns for each budget; the next ones are planned while a plan is measured."""
        candidates = plan_at_once(self.graph, self.costs, budgets, self.space, self.planning_seconds)
        for budget, candidate in zip(budgets, candidates, strict=True):
            yield self.fit(budget, candidate)

    def fit(self, budget: int, candidate: Candidate | None = None) -> tuple[Plan, dict[str, Any]]:
        """Return the fastest plan by estimate for a budget (0: the lowest peak), with its measured peak.

        `candidate` is a first plan for the budget, where there is one.
        """
        aim = budget
        for _ in range(TRIES):
            candidate = candidate or self.fastest(aim)
            plan, settings, estimate = self.capture.mark(candidate.plan), candidate.settings, candidate.estimate
            measured = self.measure_peak(plan)
            if not budget or measured["step_peak_bytes"] <= SLACK * budget:
                break
            aim, candidate = int(aim * budget / measured["step_peak_bytes"]), None
        return plan, measured | {
            "budget_bytes": budget,
            "settings": settings,
            "estimate": to_json(estimate),
            "recomputed_ops": plan.recomputed,
        }

    def traced(self) -> tuple[Plan, dict[str, Any]]:
        """Return the traced order in the arena, which no planner changed, with its measured peak."""
        plan = self.capture.mark(Plan(Plan.traced(self.graph).order, allocator="arena"))
        return plan, self.measure_peak(plan)

    def measure_peak(self, plan: Plan) -> dict[str, Any]:
        """Measure the step's peak above the floor, after a comparison with the traced step."""
        request = PlanCheckRequest(plan, self.expected.directory, tolerance=float("inf"))
        check = self.children.ask(ChildRole.PLAN_BYTES, request, seconds=SECONDS)
        assert check.comparison is not None
        assert check.memory is not None
        return {
            "step_peak_bytes": check.memory.peak_bytes - check.memory.floor_bytes,
            "equal_to_traced": check.comparison.max_error == 0.0,
            "max_error": check.comparison.max_error,
            "differs": check.comparison.detail,
        }


def plan_at_once(
    graph: TrainGraph, costs: Costs, budgets: Sequence[int], space: Space, seconds: float
) -> Iterator[Candidate]:
    """Yield the fastest plan by estimate for each budget in order, planned `AT_ONCE` at a time for `seconds` each."""
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool:
        planned = [pool.submit(best_plan, graph, costs, budget, space, seconds=seconds) for budget in budgets]
        for future in planned:
            yield future.result()
