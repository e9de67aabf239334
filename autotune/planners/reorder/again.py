"""Order the runs anew now that some repeat, and take back every recomputation that the new order makes needless."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.costs import Costs
from autotune.errors import PlanError
from autotune.graph import TrainGraph
from autotune.knobs import Int, Knob
from autotune.plan import Plan
from autotune.planners.order import ORDERS
from autotune.planners.recompute.evict import Eviction, undo
from autotune.planners.recompute.improve import improve
from autotune.planners.recompute.runs import Runs, refuse_offload
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
        best = Runs(graph, plan.order, costs)
        if best.peak <= budget_bytes and not plan.recomputed:
            return plan
        for _ in range(self.rounds):
            found = min((best, *_moved(best, budget_bytes)), key=lambda runs: _rank(runs, budget_bytes))
            if found is best:
                break
            best = found
        if best.order != plan.order and best.peak <= budget_bytes:
            best = improve(best, budget_bytes, GREED)
        return replace(plan, order=best.order)


def _rank(runs: Runs, budget_bytes: int) -> tuple[int, float]:
    return max(0, runs.peak - budget_bytes), runs.seconds


def _moved(start: Runs, budget_bytes: int) -> Iterator[Runs]:
    """The runs as each order planner places them, with what then is needless taken back."""
    graph, costs = start.graph, start.costs
    unfolded, own = unfold(graph, start.order, costs)
    traced = Plan.traced(unfolded)
    seen = {start.order}
    for planner in ORDERS.values():
        try:
            moved = planner().plan(unfolded, traced, budget_bytes, own)
        except PlanError:
            continue
        order = fold(graph, start.order, moved.order)
        if order in seen:
            continue
        seen.add(order)
        made = Runs(graph, order, costs)
        limit = max(budget_bytes, min(made.peak, start.peak))
        if made.peak > limit:
            Eviction(made, GREED).fit(limit)
        undo(made, limit)
        yield made
