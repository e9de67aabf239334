"""Run ops in traced order."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class TracedOrder:
    """Planner that restores the order of the user's program, which may raise the peak."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with its ops in traced order."""
        refuse_later_decisions(graph, plan)
        return replace(plan, order=tuple(range(len(graph.ops))))
