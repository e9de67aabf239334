"""Leave the step's tensors to the system's allocator."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class SystemAllocator:
    """Allocator of the system: malloc on a CPU, which may hold twice the live bytes; the caching allocator on a GPU."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the system's allocator."""
        return replace(plan, allocator="system")
