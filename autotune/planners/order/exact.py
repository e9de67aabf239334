"""Search all orders for the lowest peak; a search that ends proves its result optimal."""

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
from autotune.planners.order.lowest import choose_lowest
from autotune.planners.order.states import SearchState, StateSpace
from autotune.predict.order_bounds import LARGEST, improve_required_bytes, least_live_set, required_bytes
from autotune.predict.ordering import Ordering, ordering_problem

STORED_BYTES = 2**31
"""Approximate memory in bytes that the stored sets of one search may use."""
SET_BYTES, READY_BYTES = 350, 50
"""Approximate bytes of a stored set without its bits, and of each op that may run next in a visited one."""


@dataclass(frozen=True, slots=True)
class ExactOrder:
    """Planner that finds the lowest peak of all orders if visiting `states` sets of ops suffices.

    Otherwise it returns the input order with the improvements of the pieces that were solved. It suits small graphs,
    and large graphs that are wide in few places. A search of a piece also ends where its sets need `STORED_BYTES`.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"states": Int(100, 1_000_000, log=True)}
    states: int = 50_000
    """Maximum number of sets of ops to visit."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lowest order that the search reaches."""
        refuse_later_decisions(graph, plan)
        problem = ordering_problem(graph, costs)
        # a tight bound proves many orders optimal before any search
        floor = max(
            int(required_bytes(problem).max(initial=problem.base)),
            improve_required_bytes(problem, plan.order, self.states),
        )
        return choose_lowest(
            graph, plan, problem, lambda problem: [solve(problem, plan.order, self.states, floor).order]
        )


@dataclass(frozen=True, slots=True)
class OrderResult:
    """Order with its peak and a proved lower bound."""

    order: tuple[int, ...]
    """Ops by position; empty if no order below the ceiling was reached."""
    peak_bytes: int
    lower_bound_bytes: int
    """Proved lower bound of the peak over all orders that run each op once."""
    states: int = 0
    """Number of sets of ops visited."""

    @property
    def proved(self) -> bool:
        """True if the order is proved optimal."""
        return self.peak_bytes <= self.lower_bound_bytes


def solve(problem: Ordering, order: tuple[int, ...], states: int, floor: int = 0) -> OrderResult:
    """Return the optimal order if visiting `states` sets of ops suffices, else `order` with its solved pieces.

    Args:
        problem: Ordering problem.
        order: Order to improve.
        states: Maximum number of sets of ops to visit.
        floor: Lower bound of the peak in bytes, or 0 to compute one.
    """
    if not order:
        return OrderResult(order, problem.base, problem.base)
    floor = floor or int(required_bytes(problem).max())
    profile = problem.profile(order)
    pieces = [(max(profile[first:last]), first, last) for first, last in independent_pieces(problem)]
    improved, left = list(order), states
    unproved: list[int] = []
    # the highest piece first: its optimum is a floor for all others
    for peak, first, last in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        if peak <= floor:
            break
        if last - first > LARGEST or left <= 0:
            unproved.append(floor)
            continue
        ops = sorted(order[first:last])
        piece = problem.subproblem(set(order[:first]), ops)
        searched = search(piece, floor, peak, left)
        left -= searched.states
        if searched.order:
            improved[first:last] = [ops[position] for position in searched.order]
        if searched.proved:
            floor = max(floor, searched.peak_bytes)
        else:
            unproved.append(max(floor, searched.lower_bound_bytes))
    peak = problem.peak(improved)
    return OrderResult(tuple(improved), peak, max([floor, *unproved]), states - left)


def independent_pieces(problem: Ordering) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each piece of the traced order; ops with only one possible position separate the pieces."""
    count = len(problem.before)
    soonest = [min(after, default=count) for after in problem.after]
    latest = [max(before, default=-1) for before in problem.before]
    # an op has one position if all earlier ops precede it and all later ops follow it
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


def search(problem: Ordering, floor: int, ceiling: int, states: int) -> OrderResult:
    """Return the optimal order if its peak is below `ceiling` and `states` suffice; else an empty one with the bound.

    A search whose sets would use more than `STORED_BYTES` ends as one whose states do not suffice.

    The search visits sets of ops by the peak on the way to them (Dijkstra's algorithm for bottlenecks), deepest first.
    If a set has as few live bytes as an earlier one, and no set in between has fewer, all other paths are dropped. Live
    bytes are submodular in the set of finished ops, so every order can pass through that set without a higher peak.
    """
    space = StateSpace(problem)
    root = state = space.start(floor)
    lowest_peaks: dict[int, int] = {}  # per set of ops the lowest peak on the way to it
    # (peak, negated depth, live bytes after, sequence number, op to run, state before)
    heap: list[tuple[int, int, int, int, int, SearchState]] = []
    level, visited, pushed, stored_bytes = root.peak, 0, 0, 0
    set_bytes = SET_BYTES + len(problem.before) // 8
    while state.ready:
        stored_bytes += READY_BYTES * len(state.ready)
        for op, (left, during) in state.ready.items():
            peak, ran = max(state.peak, state.live + during), state.ran | 1 << op
            if peak < min(ceiling, lowest_peaks.get(ran, ceiling)):
                lowest_peaks[ran] = peak
                pushed += 1
                stored_bytes += set_bytes
                heappush(heap, (peak, -state.count, state.live + left, pushed, op, state))
        while heap:
            peak, _, _, _, op, before = heappop(heap)
            if lowest_peaks[before.ran | 1 << op] == peak:
                break
        else:
            return OrderResult((), ceiling, ceiling, visited)
        level = max(level, peak)
        if visited == states or stored_bytes > STORED_BYTES:
            return OrderResult((), ceiling, level, visited)
        visited += 1
        state = space.step(before, op)
        if state.live <= root.live and state.ready:
            state = root = space.replay_to(root, state, least_live_set(problem, root.ran, ~state.ran))
            heap.clear()
            lowest_peaks.clear()
            stored_bytes = 0
    return OrderResult(state.order, level, level, visited)
