"""Follow the longest chain of ops first, and others where it waits for them (Caffe2's memonger)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob
from autotune.planners.order.lowest import lowest
from autotune.predict.ordering import Ordering, backwards, ordering


@dataclass(frozen=True, slots=True)
class LongestPath:
    """What a chain waits for is made only when it must be. From either end of the step; the given order if that peaks
    lower. Sizes play no part."""

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        return lowest(graph, plan, ordering(graph, costs), longest_paths)


def longest_paths(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """From the start, and from the end."""
    yield longest_first(problem)
    yield backwards(longest_first(problem.backwards()))


def longest_first(problem: Ordering) -> tuple[int, ...]:
    """Of the ready ops always one of the longest chain: chains begin at ops that wait for nothing."""
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
    """Per op its chain, numbered from the longest; a chain ends where it meets a longer one."""
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
    # an op that no chain ran through waits for several: it belongs to the longest of them
    for op in problem.traced:
        if chain[op] < 0:
            chain[op] = min(chain[earlier] for earlier in problem.before[op])
    return chain
