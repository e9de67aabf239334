"""Search all orders for the lowest peak, and prove it where the search ends."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.planners.order.lowest import lowest
from autotune.planners.order.states import State, Steps
from autotune.predict.order_bounds import LARGEST, least_live, must_live
from autotune.predict.ordering import Ordering, ordering


@dataclass(frozen=True, slots=True)
class Exact:
    """The lowest peak of all orders, where looking at `states` sets of ops is enough to find it; else the given order,
    made lower where that was possible. For small graphs, and for large ones that are wide in few places."""

    knobs: ClassVar[Mapping[str, Knob]] = {"states": Int(100, 1_000_000, log=True)}
    states: int = 50_000

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        problem = ordering(graph, costs)
        return lowest(graph, plan, problem, lambda problem: [solve(problem, plan.order, self.states).order])


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order, and what is known about it."""

    order: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    """No order of these ops, each run once, peaks lower."""
    states: int = 0
    """Sets of ops that were looked at to find it."""

    @property
    def proved(self) -> bool:
        """Whether it is the best of all."""
        return self.peak_bytes <= self.lower_bound_bytes


def solve(problem: Ordering, order: tuple[int, ...], states: int, floor: int = 0) -> Ordered:
    """The best order where `states` are enough, else the given one, lower where it can be. `floor`: a bound
    that is known."""
    if not order:
        return Ordered(order, problem.base, problem.base)
    floor = floor or int(must_live(problem).max())
    profile = problem.profile(order)
    pieces = [(max(profile[first:last]), first, last) for first, last in pieces_of(problem)]
    found, left = list(order), states
    unproved: list[int] = []
    # the highest first: what it cannot avoid, the others need not avoid either
    for peak, first, last in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        if peak <= floor:
            break
        if last - first > LARGEST or left <= 0:
            unproved.append(floor)
            continue
        ops = sorted(order[first:last])
        piece = problem.part(set(order[:first]), ops)
        searched = search(piece, floor, peak, left)
        left -= searched.states
        if searched.order:
            found[first:last] = [ops[position] for position in searched.order]
        if searched.proved:
            floor = max(floor, searched.peak_bytes)
        else:
            unproved.append(max(floor, searched.lower_bound_bytes))
    made = tuple(found)
    peak = problem.peak(made)
    return Ordered(made, peak, max([floor, *unproved]), states - left)


def pieces_of(problem: Ordering) -> Iterator[tuple[int, int]]:
    """(first, after the last) position of each stretch that ops with one possible place leave between them."""
    count = len(problem.before)
    soonest = [min(after, default=count) for after in problem.after]
    latest = [max(before, default=-1) for before in problem.before]
    # all before an op lead to it if each leads to something that is not after it; and the other way
    reaches = [-1, *accumulate(soonest, max)]
    reached = [*accumulate(reversed(latest), min)][::-1]
    first = 0
    for op in range(count):
        if reaches[op] <= op and (op + 1 == count or reached[op + 1] >= op):
            if first < op:
                yield first, op
            yield op, op + 1
            first = op + 1
    if first < count:
        yield first, count


def search(problem: Ordering, floor: int, ceiling: int, states: int) -> Ordered:
    """An order that peaks below `ceiling`, the lowest of all, if `states` are enough; else an empty one with the bound.

    Sets of ops are looked at in the order of the peak that leads to them (Dijkstra's algorithm for bottlenecks), the
    deepest first. Where as little lives as at a set before, and nothing in between has less, all other ways are
    dropped: what lives is submodular in the set that ran, so every order can be led through there without more bytes.
    """
    steps = Steps(problem)
    root = state = steps.start(floor)
    known: dict[int, int] = {}  # the peak that leads to a set
    heap: list[tuple[int, int, int, int, int, State]] = []  # (peak, depth, bytes left, number, op to run, after what)
    level, looked, pushed = root.peak, 0, 0
    while state.ready:
        for op, (left, during) in state.ready.items():
            peak, ran = max(state.peak, state.live + during), state.ran | 1 << op
            if peak < min(ceiling, known.get(ran, ceiling)):
                known[ran] = peak
                pushed += 1
                heappush(heap, (peak, -state.count, state.live + left, pushed, op, state))
        while heap:
            peak, _, _, _, op, before = heappop(heap)
            if known[before.ran | 1 << op] == peak:
                break
        else:
            return Ordered((), ceiling, ceiling, looked)
        level = max(level, peak)
        if looked == states:
            return Ordered((), ceiling, level, looked)
        looked += 1
        state = steps.step(before, op)
        if state.live <= root.live and state.ready:
            state = root = steps.through(root, state, least_live(problem, root.ran, ~state.ran))
            heap.clear()
            known.clear()
    return Ordered(state.order, level, level, looked)
