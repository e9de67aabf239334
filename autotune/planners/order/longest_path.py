"""Order ops by the longest chain first, and other chains only when it waits for them (Caffe2's memonger)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob
from autotune.planners.order.lowest import choose_lowest
from autotune.predict.ordering import Ordering, ordering_problem, reverse_order


@dataclass(frozen=True, slots=True)
class LongestPath:
    """Planner that follows the longest chain and computes its other inputs as late as possible, whatever their bytes.

    It orders from either end of the step. The input order is unchanged if it peaks lower.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lower of the longest-path orders."""
        refuse_later_decisions(graph, plan)
        return choose_lowest(graph, plan, ordering_problem(graph, costs), order_by_longest_path)


def order_by_longest_path(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """Yield the longest-path orders from the start and from the end."""
    yield order_longest_chain_first(problem)
    yield reverse_order(order_longest_chain_first(problem.reverse()))


def order_longest_chain_first(problem: Ordering) -> tuple[int, ...]:
    """Return the order that always runs the ready op of the longest chain. Chains start at ops without predecessors."""
    chain = _chains(problem)
    waits_for = [len(before) for before in problem.before]
    ready = [(chain[op], op) for op, count in enumerate(waits_for) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, op = heappop(ready)
        order.append(op)
        for later in problem.after[op]:
            waits_for[later] -= 1
            if not waits_for[later]:
                heappush(ready, (chain[later], later))
    return tuple(order)


def _chains(problem: Ordering) -> list[int]:
    """Return the chain of every op, numbered from the longest; a chain ends at a longer one."""
    height = [0] * len(problem.before)
    longest = [-1] * len(problem.before)
    for op in reversed(problem.traced):
        for later in problem.after[op]:
            if height[later] >= height[op]:
                height[op], longest[op] = height[later] + 1, later
    chain = [-1] * len(problem.before)
    heads = [op for op, before in enumerate(problem.before) if not before]
    for number, head in enumerate(sorted(heads, key=lambda op: -height[op])):
        op = head
        while op >= 0 and chain[op] < 0:
            chain[op] = number
            op = longest[op]
    # an op outside of all chains has several predecessors: it belongs to the longest of their chains
    for op in problem.traced:
        if chain[op] < 0:
            chain[op] = min(chain[earlier] for earlier in problem.before[op])
    return chain
