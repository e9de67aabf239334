"""Give every output a buffer of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class NeverInPlace:
    """Planner that runs nothing in place and undoes earlier choices, which may raise the peak."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan without runs in place."""
        return replace(plan, inplace=())
