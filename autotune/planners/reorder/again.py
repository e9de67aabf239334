"""Reorder the runs after recompute is decided, and undo each recomputation that the new order makes needless."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.order import ORDERS
from autotune.planners.recompute.editable_order import refuse_inplace_and_offload
from autotune.planners.recompute.search import Search, start_search, usual_work
from autotune.planners.unfold import fold, unfold

GREED = 1.5
"""Exponent of the bytes in an eviction's score: the default of the greedy recompute planner."""


@dataclass(frozen=True, slots=True)
class ReorderRuns:
    """Planner that tries every order planner on all runs, repeated ones included, then adjusts the recomputation.

    Candidates are ranked by their excess over the budget, then by seconds. A plan without recomputation that fits the
    budget is unchanged.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"rounds": Int(1, 8)}
    rounds: int = 2
    """Maximum number of rounds; a round without gain is the last."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with its runs in the best order of all rounds."""
        refuse_inplace_and_offload(plan)
        best = start_search(graph, plan.order, costs)
        if best.peak <= budget_bytes and not plan.recomputed:
            return plan
        for _ in range(self.rounds):
            reordered = _reorder(graph, costs, best, budget_bytes)
            improved = min((best, *reordered), key=lambda search: _rank(search, budget_bytes))
            if improved is best:
                break
            best = improved
        if best.order != plan.order and best.peak <= budget_bytes:
            best.improve(budget_bytes, GREED, usual_work(len(plan.order)) // 2)
        return replace(plan, order=best.order)


def _rank(search: Search, budget_bytes: int) -> tuple[int, float]:
    return max(0, search.peak - budget_bytes), search.seconds


def _reorder(graph: TrainGraph, costs: Costs, start: Search, budget_bytes: int) -> Iterator[Search]:
    """Yield one search per distinct order of the order planners, evicted and without needless recomputation."""
    unfolded, unfolded_costs = unfold(graph, start.order, costs)
    traced = Plan.traced(unfolded)
    orders = {start.order}
    for planner in ORDERS.values():
        try:
            reordered = planner().plan(unfolded, traced, budget_bytes, unfolded_costs)
        except PlanError:
            continue
        order = fold(graph, start.order, reordered.order)
        if order in orders:
            continue
        orders.add(order)
        search = start_search(graph, order, costs)
        limit = max(budget_bytes, min(search.peak, start.peak))
        search.fit(limit, GREED)
        search.undo(limit)
        yield search
