"""Order the runs anew now that some repeat, and take back every recomputation that the new order makes needless."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Int, Knob
from autotune.planners.order import ORDERS
from autotune.planners.recompute.editable_order import refuse_offload
from autotune.planners.recompute.search import Search, begin, usual_work
from autotune.planners.unfold import fold, unfold

GREED = 1.5
"""Of evictions made here, as of the greedy planner's by default."""


@dataclass(frozen=True, slots=True)
class Again:
    """Let every order planner place the runs as if each were an op; evict and take back; at most `rounds` times.

    What fits the budget comes before what does not, the fast before the slow. A plan that repeats nothing and fits stays.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"rounds": Int(1, 8)}
    rounds: int = 2

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_offload(plan)
        best = begin(graph, plan.order, costs)
        if best.peak <= budget_bytes and not plan.recomputed:
            return plan
        for _ in range(self.rounds):
            moved = _moved(graph, costs, best, budget_bytes)
            found = min((best, *moved), key=lambda search: _rank(search, budget_bytes))
            if found is best:
                break
            best = found
        if best.order != plan.order and best.peak <= budget_bytes:
            best.improve(budget_bytes, GREED, usual_work(len(plan.order)) // 2)
        return replace(plan, order=best.order)


def _rank(search: Search, budget_bytes: int) -> tuple[int, float]:
    return max(0, search.peak - budget_bytes), search.seconds


def _moved(graph: TrainGraph, costs: Costs, start: Search, budget_bytes: int) -> Iterator[Search]:
    """The runs as each order planner places them, with what then is needless taken back."""
    given = start.order
    unfolded, own = unfold(graph, given, costs)
    traced = Plan.traced(unfolded)
    seen = {given}
    for planner in ORDERS.values():
        try:
            moved = planner().plan(unfolded, traced, budget_bytes, own)
        except PlanError:
            continue
        order = fold(graph, given, moved.order)
        if order in seen:
            continue
        seen.add(order)
        made = begin(graph, order, costs)
        limit = max(budget_bytes, min(made.peak, start.peak))
        made.fit(limit, GREED)
        made.undo(limit)
        yield made
