"""Leave the runs where recompute has put them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Knob
from autotune.plan import Plan


@dataclass(frozen=True, slots=True)
class Keep:
    """Move nothing."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan as it came."""
        return plan
