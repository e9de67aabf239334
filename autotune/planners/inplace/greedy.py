"""Make every output in place that may be: bytes fall wherever that happens and rise nowhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import InPlace, Plan, events
from autotune.planners.knobs import Knob


@dataclass(frozen=True, slots=True)
class Greedy:
    """Where several inputs die at once, the first takes the output: buffers that may be taken are equally large."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with every run in place that its order allows."""
        dying = _dying(graph, plan.order)
        made = []
        for position, op in enumerate(plan.order):
            value = next((value for value in graph.ops[op].inplace if (position, value) in dying), None)
            if value is not None:
                made.append(InPlace(position, value))
        return replace(plan, inplace=tuple(made))


def _dying(graph: TrainGraph, order: tuple[int, ...]) -> set[tuple[int, int]]:
    """(position, value) of every read that is a value's last, or its last before it is made again."""
    found: set[tuple[int, int]] = set()
    for value, happened in enumerate(events(graph, order)):
        if value in graph.static:
            continue
        for (position, run), (_, again) in pairwise(happened):
            if again and not run:
                found.add((position, value))
        if happened and not happened[-1][1] and value not in graph.outputs:
            found.add((happened[-1][0], value))
    return found
