"""Run every op in place that may: this never raises the bytes at any position."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import InPlace, Plan, events
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class GreedyInPlace:
    """Planner that runs all allowed ops in place.

    If several inputs die at one run, an output overwrites the largest of them, or the first of equally large ones.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with every run in place that its order allows."""
        dying = last_reads(graph, plan.order)
        inplace = []
        for position, op in enumerate(plan.order):
            values = [value for value in graph.ops[op].inplace if (position, value) in dying]
            if values:
                inplace.append(InPlace(position, max(values, key=lambda value: graph.values[value].nbytes)))
        return replace(plan, inplace=tuple(inplace))


def last_reads(graph: TrainGraph, order: tuple[int, ...]) -> set[tuple[int, int]]:
    """Return (position, value) of every read that is a value's last, or its last before a recomputation."""
    reads: set[tuple[int, int]] = set()
    for value, value_events in enumerate(events(graph, order)):
        if value in graph.static:
            continue
        for (position, is_run), (_, recomputed) in pairwise(value_events):
            if recomputed and not is_run:
                reads.add((position, value))
        if value_events and not value_events[-1][1] and value not in graph.outputs:
            reads.add((value_events[-1][0], value))
    return reads
