"""Try everything that knows an order, cheapest first, until one is proved best or the effort is spent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.planners.order.beam import beams
from autotune.planners.order.depth_first import depth_first
from autotune.planners.order.exact import Ordered, search, solve
from autotune.planners.order.list_by_bytes import lists
from autotune.planners.order.longest_path import longest_paths
from autotune.planners.order.lowest import lowest
from autotune.predict.order_bounds import must_live, must_live_near
from autotune.predict.ordering import Ordering, ordering

EFFORT = 30_000
WINDOWS = (24, 48, 96, 192)
"""Ops around the peak whose order is searched while all others stay."""


@dataclass(frozen=True, slots=True)
class Best:
    """The lowest order of all planners, the given one included. `effort`: sets of ops that searches may look at."""

    knobs: ClassVar[Mapping[str, Knob]] = {"effort": Int(100, 10_000_000, log=True)}
    effort: int = EFFORT

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        found = best_order(graph, costs, plan.order, self.effort)
        return lowest(graph, plan, ordering(graph, costs), lambda _: [found.order])


def best_order(graph: TrainGraph, costs: Costs, order: tuple[int, ...] | None = None, effort: int = EFFORT) -> Ordered:
    """The lowest order found, not above the given one (the traced one), with a proved bound of all orders."""
    problem = ordering(graph, costs)
    order = problem.traced if order is None else order
    floor = int(must_live(problem).max(initial=problem.base))
    best = Ordered(order, problem.peak(order), floor)
    for found in _quick(problem):
        if best.proved:
            break
        if (peak := problem.peak(found)) < best.peak_bytes:
            best = Ordered(found, peak, floor)
    spent = 0
    for improve in (_tighten, _solve, _beam, _windows):
        if best.proved:
            break
        best = improve(problem, best, (effort - spent) // 2)
        spent += best.states
    return replace(best, states=spent)


def _quick(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """What needs no search."""
    yield from lists(problem)
    for large in (True, False):
        yield from depth_first(problem, large=large)
    yield from longest_paths(problem)


def _tighten(problem: Ordering, best: Ordered, effort: int) -> Ordered:
    """The bound looked at more closely where the order peaks."""
    floor = must_live_near(problem, best.order, effort)
    return replace(best, lower_bound_bytes=max(floor, best.lower_bound_bytes))


def _solve(problem: Ordering, best: Ordered, effort: int) -> Ordered:
    return solve(problem, best.order, effort, best.lower_bound_bytes)


def _beam(problem: Ordering, best: Ordered, effort: int) -> Ordered:
    """Beams eight times as wide as the one before."""
    width, spent = 1, 0
    while not best.proved and (spent := spent + 4 * width * len(best.order)) <= effort:
        for found in beams(problem, width, best.lower_bound_bytes):
            if (peak := problem.peak(found)) < best.peak_bytes:
                best = Ordered(found, peak, best.lower_bound_bytes)
        width *= 8
    return replace(best, states=min(spent, effort))


def _windows(problem: Ordering, best: Ordered, effort: int) -> Ordered:
    """Stretches of the order around its peak, searched for a lower one until no size of stretch finds any."""
    order, left, size = best.order, effort, 0
    each = 1 + len(order) // 16  # to find the peak, and to cut the stretch out, all ops are walked
    while size < len(WINDOWS) and left > 0:
        profile = problem.profile(order)
        peak = max(profile)
        if peak <= best.lower_bound_bytes:
            break
        at = profile.index(peak)
        first = max(0, at - WINDOWS[size] // 2)
        ops = sorted(order[first : first + WINDOWS[size]])
        searched = search(problem.part(set(order[:first]), ops), best.lower_bound_bytes, peak, left // 4)
        left -= searched.states + each
        if searched.order:
            found = tuple(ops[position] for position in searched.order)
            order = (*order[:first], *found, *order[first + len(ops) :])
            size = 0
        else:
            size += 1
    return Ordered(order, problem.peak(order), best.lower_bound_bytes, min(effort, effort - left))
