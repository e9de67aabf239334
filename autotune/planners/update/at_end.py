"""Update every parameter at the end of the step, as a plain training loop does."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class AtEnd:
    """Planner that undoes early updates, as clipping and gradient scaling require.

    All gradients stay live until the end, so the peak may rise.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with all updates, and the ops that follow them, at the end."""
        refuse_later_decisions(graph, plan)
        late: set[int] = set()
        for op in graph.ops:
            if op.phase is Phase.UPDATE or not late.isdisjoint(graph.predecessors[op.id]):
                late.add(op.id)
        early = [op for op in plan.order if op not in late]
        return replace(plan, order=(*early, *(op for op in plan.order if op in late)))
