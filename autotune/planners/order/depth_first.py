"""Order ops depth-first: each op's inputs just before it, largest branch first, as in XLA and Inductor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Choice, Knob
from autotune.planners.order.lowest import choose_lowest
from autotune.predict.ordering import Ordering, ordering_problem, reverse_order


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """Planner that computes an op's inputs just before it, the inputs with the most or the fewest bytes `first`.

    It orders from either end of the step. The input order is unchanged if it peaks lower.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"first": Choice(("large", "small"))}
    first: str = "large"
    """Branch to order first: `large` or `small`."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lower of the depth-first orders."""
        refuse_later_decisions(graph, plan)
        return choose_lowest(
            graph,
            plan,
            ordering_problem(graph, costs),
            lambda problem: order_depth_first(problem, large=self.first == "large"),
        )


def order_depth_first(problem: Ordering, *, large: bool) -> Iterator[tuple[int, ...]]:
    """Yield the depth-first orders from the start and from the end."""
    yield _dive(problem, large=large)
    yield reverse_order(_dive(problem.reverse(), large=large))


def _dive(problem: Ordering, *, large: bool) -> tuple[int, ...]:
    """Return the order that reaches each final op in turn, those at the smallest depth first."""
    depth = [0] * len(problem.before)
    for op, before in enumerate(problem.before):
        depth[op] = 1 + max((depth[earlier] for earlier in before), default=-1)
    size = [sum(problem.nbytes[value] for value in touched) for touched in problem.touches]
    sign = 1 if large else -1
    ends = sorted((op for op, after in enumerate(problem.after) if not after), key=lambda op: (depth[op], op))
    visited = [False] * len(problem.before)
    order: list[int] = []
    for end in ends:
        stack = [(end, False)]
        while stack:
            op, expanded = stack.pop()
            if expanded:
                order.append(op)
            elif not visited[op]:
                visited[op] = True
                stack.append((op, True))
                waiting = [earlier for earlier in problem.before[op] if not visited[earlier]]
                # the op pushed last is popped first
                waiting.sort(key=lambda earlier: (sign * size[earlier], -earlier))
                stack.extend((earlier, False) for earlier in waiting)
    return tuple(order)
