"""Combine all order heuristics and searches, cheapest first, until one is proved optimal or the effort is spent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.planners.order.beam import search_from_both_ends
from autotune.planners.order.depth_first import order_depth_first
from autotune.planners.order.exact import OrderResult, search, solve
from autotune.planners.order.list_by_bytes import order_by_bytes
from autotune.planners.order.longest_path import order_by_longest_path
from autotune.planners.order.lowest import choose_lowest
from autotune.predict.order_bounds import improve_required_bytes, required_bytes
from autotune.predict.ordering import Ordering, ordering_problem

EFFORT = 30_000
"""Default number of sets of ops that the searches may visit."""
WINDOWS = (24, 48, 96, 192)
"""Numbers of ops around the peak to reorder while all others keep their positions."""


@dataclass(frozen=True, slots=True)
class BestOrder:
    """Planner that takes the order with the lowest peak of all heuristics, all searches and its input."""

    knobs: ClassVar[Mapping[str, Knob]] = {"effort": Int(100, 10_000_000, log=True)}
    effort: int = EFFORT
    """Maximum number of sets of ops that the searches visit."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lowest order."""
        refuse_later_decisions(graph, plan)
        best = find_best_order(graph, costs, plan.order, self.effort)
        return choose_lowest(graph, plan, ordering_problem(graph, costs), lambda _: [best.order])


def find_best_order(
    graph: TrainGraph, costs: Costs, order: tuple[int, ...] | None = None, effort: int = EFFORT
) -> OrderResult:
    """Return the lowest order of all methods, never above `order`, with a proved lower bound of all orders.

    Args:
        graph: Training step.
        costs: Scratch bytes per op.
        order: Order to improve, by default the traced one.
        effort: Maximum number of sets of ops that the searches visit.
    """
    problem = ordering_problem(graph, costs)
    order = problem.traced if order is None else order
    floor = int(required_bytes(problem).max(initial=problem.base))
    best = OrderResult(order, problem.peak(order), floor)
    for candidate in _heuristic_orders(problem):
        if best.proved:
            break
        if (peak := problem.peak(candidate)) < best.peak_bytes:
            best = OrderResult(candidate, peak, floor)
    spent = 0
    for improve in (_raise_bound, _solve, _search_beams, _search_windows):
        if best.proved:
            break
        best = improve(problem, best, (effort - spent) // 2)
        spent += best.states
    return replace(best, states=spent)


def _heuristic_orders(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """Yield the orders that need no search."""
    yield from order_by_bytes(problem)
    for large in (True, False):
        yield from order_depth_first(problem, large=large)
    yield from order_by_longest_path(problem)


def _raise_bound(problem: Ordering, best: OrderResult, effort: int) -> OrderResult:
    """Return the order with a tighter lower bound, computed at its peak."""
    floor = improve_required_bytes(problem, best.order, effort)
    return replace(best, lower_bound_bytes=max(floor, best.lower_bound_bytes))


def _solve(problem: Ordering, best: OrderResult, effort: int) -> OrderResult:
    return solve(problem, best.order, effort, best.lower_bound_bytes)


def _search_beams(problem: Ordering, best: OrderResult, effort: int) -> OrderResult:
    """Return the best order of beams, each eight times as wide as the previous one."""
    width, spent = 1, 0
    while not best.proved and (spent := spent + 4 * width * len(best.order)) <= effort:
        for order in search_from_both_ends(problem, width, best.lower_bound_bytes):
            if (peak := problem.peak(order)) < best.peak_bytes:
                best = OrderResult(order, peak, best.lower_bound_bytes)
        width *= 8
    return replace(best, states=min(spent, effort))


def _search_windows(problem: Ordering, best: OrderResult, effort: int) -> OrderResult:
    """Return the order after exact searches of windows around its peak, until no window size lowers the peak."""
    order, left, size = best.order, effort, 0
    each = 1 + len(order) // 16  # finding the peak and cutting the window out visits all ops
    while size < len(WINDOWS) and left > 0:
        profile = problem.profile(order)
        peak = max(profile)
        if peak <= best.lower_bound_bytes:
            break
        first = max(0, profile.index(peak) - WINDOWS[size] // 2)
        ops = sorted(order[first : first + WINDOWS[size]])
        searched = search(problem.subproblem(set(order[:first]), ops), best.lower_bound_bytes, peak, left // 4)
        left -= searched.states + each
        if searched.order:
            improved = tuple(ops[position] for position in searched.order)
            order = (*order[:first], *improved, *order[first + len(ops) :])
            size = 0
        else:
            size += 1
    return OrderResult(order, problem.peak(order), best.lower_bound_bytes, min(effort, effort - left))
