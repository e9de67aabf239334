"""Planners: each decides one part of a plan, as a pure function of graph, budget and costs.

To add one: a file in its kind's folder with a frozen dataclass whose fields are its knobs, and a line in that folder's
dict. The search space, the command line, the report and the contract tests take it from there.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Knob
from autotune.plan import Plan


class Planner(Protocol):
    """Decides one part of a plan. A frozen dataclass; its fields are its knobs."""

    knobs: ClassVar[Mapping[str, Knob]]

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with this part decided anew. `budget_bytes`: what the step itself may take, static bytes included."""
        ...
