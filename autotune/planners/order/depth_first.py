"""Make what each op needs just before it, the largest branch first: depth-first, as XLA and Inductor do it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Choice, Knob
from autotune.planners.order.lowest import lowest
from autotune.predict.ordering import Ordering, backwards, ordering


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """Of several things that an op waits for, the `first` is made before the others: the one that takes most bytes, or
    fewest. From either end of the step; the given order if that peaks lower."""

    knobs: ClassVar[Mapping[str, Knob]] = {"first": Choice(("large", "small"))}
    first: str = "large"

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        return lowest(
            graph, plan, ordering(graph, costs), lambda problem: depth_first(problem, large=self.first == "large")
        )


def depth_first(problem: Ordering, *, large: bool) -> Iterator[tuple[int, ...]]:
    """From the start, and from the end."""
    yield _dive(problem, large=large)
    yield backwards(_dive(problem.backwards(), large=large))


def _dive(problem: Ordering, *, large: bool) -> tuple[int, ...]:
    """Ops that nothing waits for are reached in turn, those with the shortest way from the start first."""
    depth = [0] * len(problem.before)
    for op, before in enumerate(problem.before):
        depth[op] = 1 + max((depth[earlier] for earlier in before), default=-1)
    size = [sum(problem.nbytes[value] for value in touched) for touched in problem.touches]
    sign = 1 if large else -1
    ends = sorted((op for op, after in enumerate(problem.after) if not after), key=lambda op: (depth[op], op))
    seen = [False] * len(problem.before)
    order: list[int] = []
    for end in ends:
        stack = [(end, False)]
        while stack:
            op, expanded = stack.pop()
            if expanded:
                order.append(op)
            elif not seen[op]:
                seen[op] = True
                stack.append((op, True))
                waiting = [earlier for earlier in problem.before[op] if not seen[earlier]]
                # the last put on the stack is the first to be made
                waiting.sort(key=lambda earlier: (sign * size[earlier], -earlier))
                stack.extend((earlier, False) for earlier in waiting)
    return tuple(order)
