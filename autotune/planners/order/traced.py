"""Run ops as they were traced."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class Traced:
    """The order of the user's own program, whatever order came in: its peak may be higher."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        return replace(plan, order=tuple(range(len(graph.ops))))
