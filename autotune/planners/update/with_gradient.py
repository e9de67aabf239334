"""Update each parameter as soon as its gradient is made, so that the gradient need not wait for the others."""

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
"""In which updates are held back: what waits then makes others higher."""


@dataclass(frozen=True, slots=True)
class WithGradient:
    """Each update right after its gradient and the last reader of its parameter; the given order if that peaks lower.

    Updates of smaller gradients than `min_gradient_bytes`, or of none (a BatchNorm's statistics), stay where they are; so
    do those that would be the step's peak there, as what an optimizer computes for a large weight beside all activations.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"min_gradient_bytes": Int(1, 1 << 26, log=True)}
    min_gradient_bytes: int = 1
    """An updated parameter's forward cannot be computed again: a small gradient may not be worth that."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        updates = {op.id for op in graph.ops if _gradient_bytes(graph, op) >= self.min_gradient_bytes}
        plans: list[Plan] = []
        for _ in range(ROUNDS):
            plans.append(replace(plan, order=_placed(graph, plan.order, updates)))
            if not (high := _above_others(graph, plans[-1], updates, costs)):
                break
            updates -= high
        return min((*plans, plan), key=lambda made: peak_bytes(graph, made, costs))


def _placed(graph: TrainGraph, order: tuple[int, ...], updates: Set[int]) -> tuple[int, ...]:
    """The order with these updates as soon as what they wait for has run."""
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


def _above_others(graph: TrainGraph, plan: Plan, updates: Set[int], costs: Costs) -> set[int]:
    """Of the updates those that need more bytes where they run than any other op does."""
    moments = [(made.instruction, made.during_bytes) for made in timeline(graph, lower(graph, plan), costs)]
    during = {made.op: nbytes for made, nbytes in moments if isinstance(made, Run)}
    others = max((nbytes for op, nbytes in during.items() if op not in updates), default=0)
    return {op for op in updates if during[op] > others}


def _gradient_bytes(graph: TrainGraph, op: Op) -> int:
    """Bytes that live until an update has read them, or -1 for an op that is none."""
    makers = {value: graph.producer[value] for value in op.inputs}
    gradients = [v for v, made in makers.items() if made is not None and graph.ops[made].phase is Phase.BACKWARD]
    if op.phase is not Phase.UPDATE or not gradients:
        return -1
    return max(1, sum(graph.values[value].nbytes for value in gradients))
