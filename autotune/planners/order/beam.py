"""Search orders with a beam: extend the few best partial orders at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.planners.order.lowest import choose_lowest
from autotune.planners.order.states import SearchState, StateSpace
from autotune.predict.order_bounds import LARGEST, required_bytes
from autotune.predict.ordering import Ordering, ordering_problem, reverse_order


@dataclass(frozen=True, slots=True)
class Beam:
    """Planner that keeps the `width` partial orders with the lowest peak, then the fewest live bytes.

    It searches from either end of the step. The input order is unchanged if it peaks lower, or if the graph has too
    many ops for sets of them. An op that leaves no more bytes live and stays under the peak runs at once: postponing
    it never helps.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"width": Int(1, 256, log=True)}
    width: int = 8
    """Number of partial orders kept."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lowest order of both beams."""
        refuse_later_decisions(graph, plan)
        if len(graph.ops) > LARGEST:
            return plan
        problem = ordering_problem(graph, costs)
        floor = int(required_bytes(problem).max(initial=0))
        return choose_lowest(graph, plan, problem, lambda problem: search_from_both_ends(problem, self.width, floor))


def search_from_both_ends(problem: Ordering, width: int, floor: int) -> list[tuple[int, ...]]:
    """Return the beam's orders from the start and from the end. `floor` is a lower bound of the peak in bytes."""
    return [search_beam(problem, width, floor), reverse_order(search_beam(problem.reverse(), width, floor))]


def search_beam(problem: Ordering, width: int, floor: int) -> tuple[int, ...]:
    """Return the lowest of the complete orders that the beam reaches."""
    space = StateSpace(problem)
    states = [space.start(floor)]
    done: SearchState | None = None
    while states:
        for state in states:
            if not state.ready and (done is None or state.peak < done.peak):
                done = state
        states = [state for state in states if state.ready and (done is None or state.peak < done.peak)]
        visited: set[int] = set()
        chosen: list[SearchState] = []
        for _, _, _, index, op in nsmallest(2 * width, _successors(states)):
            state = states[index]
            ran = state.ran | 1 << op
            if ran not in visited:
                visited.add(ran)
                following = space.step(state, op)
                if following.ran == ran or following.ran not in visited:
                    visited.add(following.ran)
                    chosen.append(following)
            if len(chosen) == width:
                break
        states = chosen
    assert done is not None
    return done.order


def _successors(states: list[SearchState]) -> list[tuple[int, int, int, int, int]]:
    """Return (peak, live bytes after, negated bytes during, index of the state, op) of every possible step."""
    return [
        (max(state.peak, state.live + during), state.live + left, -during, index, op)
        for index, state in enumerate(states)
        for op, (left, during) in state.ready.items()
    ]
