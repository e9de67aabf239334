"""Give the step's tensors planned places in one block: the process is charged for what lives, and for little more."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class Arena:
    """On a CPU; on a GPU the caching allocator with segments that grow (`expandable_segments`), which is asked for at the start."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with the arena."""
        return replace(plan, allocator="arena")
