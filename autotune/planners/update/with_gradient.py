"""Update each parameter as soon as its gradient exists, so gradients need not wait for each other."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lower
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.predict.simulate import peak_bytes, timeline

ROUNDS = 3
"""Maximum number of rounds in which updates return to their positions. Each return may raise the bytes at others."""


@dataclass(frozen=True, slots=True)
class WithGradient:
    """Planner that runs each update right after its gradient and the last reader of its parameter.

    Two kinds of updates keep their positions. The first are updates of gradients below `min_gradient_bytes`, or of none
    (BatchNorm statistics). The second are updates that would be the step's peak, such as an optimizer's temporaries
    for a large weight beside all activations. The plan is unchanged if every round raises its peak.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"min_gradient_bytes": Int(1, 1 << 26, log=True)}
    min_gradient_bytes: int = 1
    """Minimum gradient size in bytes. The forward of an updated parameter cannot be recomputed, which may cost more."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with early updates, or unchanged if its peak is lower."""
        refuse_later_decisions(graph, plan)
        updates = {op.id for op in graph.ops if _gradient_bytes(graph, op) >= self.min_gradient_bytes}
        plans: list[Plan] = []
        for _ in range(ROUNDS):
            plans.append(replace(plan, order=_place_early(graph, plan.order, updates)))
            if not (high := _updates_at_peak(graph, plans[-1], updates, costs)):
                break
            updates -= high
        return min((*plans, plan), key=lambda candidate: peak_bytes(graph, candidate, costs))


def _place_early(graph: TrainGraph, order: tuple[int, ...], updates: Set[int]) -> tuple[int, ...]:
    """Return the order with each of these updates right after the last of its predecessors."""
    waits_for = {op: set(graph.predecessors[op]) for op in updates}
    waiting: dict[int, list[int]] = {}
    for op in order:
        for earlier in waits_for.get(op, ()):
            waiting.setdefault(earlier, []).append(op)
    placed: list[int] = []
    for op in order:
        running = [] if op in updates else [op]
        while running:
            placed.append(current := running.pop(0))
            for update in waiting.get(current, ()):
                waits_for[update].discard(current)
                if not waits_for[update]:
                    running.append(update)
    return tuple(placed)


def _updates_at_peak(graph: TrainGraph, plan: Plan, updates: Set[int], costs: Costs) -> set[int]:
    """Return the updates that need more bytes while they run than any other op does."""
    moments = timeline(graph, lower(graph, plan), costs)
    during = {moment.instruction.op: moment.during_bytes for moment in moments if isinstance(moment.instruction, Run)}
    others = max((nbytes for op, nbytes in during.items() if op not in updates), default=0)
    return {op for op in updates if during[op] > others}


def _gradient_bytes(graph: TrainGraph, op: Op) -> int:
    """Return the bytes of the gradients that an update reads, at least 1; -1 for an op that reads none."""
    makers = {value: graph.producer[value] for value in op.inputs}
    gradients = [v for v, maker in makers.items() if maker is not None and graph.ops[maker].phase is Phase.BACKWARD]
    if op.phase is not Phase.UPDATE or not gradients:
        return -1
    return max(1, sum(graph.values[value].nbytes for value in gradients))
