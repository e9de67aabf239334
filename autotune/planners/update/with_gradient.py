"""Update each parameter as soon as its gradient is made, so that the gradient need not wait for the others."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.costs import Costs
from autotune.graph import Op, Phase, TrainGraph
from autotune.knobs import Knob
from autotune.plan import Plan
from autotune.planners.contract import refuse_later_decisions
from autotune.simulate import peak_bytes


@dataclass(frozen=True, slots=True)
class WithGradient:
    """Each update right after its gradient and the last reader of its parameter; the given order if that peaks lower.

    Updates that read no gradient (a BatchNorm's statistics) stay where they are.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        updates = {op.id for op in graph.ops if _reads_gradient(graph, op)}
        waits_for = {op: set(graph.predecessors[op]) for op in updates}
        waiting: dict[int, list[int]] = {}
        for op in plan.order:
            for earlier in waits_for.get(op, ()):
                waiting.setdefault(earlier, []).append(op)
        order: list[int] = []
        for op in plan.order:
            running = [] if op in updates else [op]
            while running:
                order.append(current := running.pop(0))
                for update in waiting.get(current, ()):
                    waits_for[update].discard(current)
                    if not waits_for[update]:
                        running.append(update)
        moved = replace(plan, order=tuple(order))
        return min(moved, plan, key=lambda made: peak_bytes(graph, made, costs))


def _reads_gradient(graph: TrainGraph, op: Op) -> bool:
    makers = (graph.producer[value] for value in op.inputs)
    return op.phase is Phase.UPDATE and any(
        maker is not None and graph.ops[maker].phase is Phase.BACKWARD for maker in makers
    )
