"""Leave the step's tensors to the system's own allocator."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class System:
    """malloc on a CPU, the caching allocator on a GPU. glibc may keep up to twice what lives."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with the system's allocator."""
        return replace(plan, allocator="system")
