"""What every planner is, and what the first two of them may expect."""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.knobs import Knob


class Planner(Protocol):
    """Decides one part of a plan. A frozen dataclass; its fields are its knobs."""

    knobs: ClassVar[Mapping[str, Knob]]

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with this part decided anew. `budget_bytes`: what the step itself may take, static bytes included."""
        ...


def refuse_later_decisions(graph: TrainGraph, plan: Plan) -> None:
    """Raise PlanError if the plan already repeats, runs in place or offloads: all hang on positions, and moving shifts."""
    if plan.recomputed:
        twice = next(op for op in graph.ops if plan.order.count(op.id) > 1)
        raise PlanError(f"the plan already runs {twice.name} again: place ops before recompute is decided")
    if plan.inplace:
        name = graph.ops[plan.order[plan.inplace[0].position]].name
        raise PlanError(f"the plan already runs {name} in place: place ops before that is decided")
    if plan.offload:
        name = graph.values[plan.offload[0].value].name
        raise PlanError(f"the plan already offloads {name}: place ops before offload is decided")
