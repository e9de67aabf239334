"""Allocate the step's tensors at planned offsets of one block, so the process is charged for little more than live bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class ArenaAllocator:
    """Arena with a planned layout on a CPU; the caching allocator with expandable segments on a GPU.

    On a GPU the process has to request `expandable_segments` at its start.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the arena as its allocator."""
        return replace(plan, allocator="arena")
