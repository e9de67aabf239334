"""Follow the few best beginnings of an order at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Int, Knob
from autotune.planners.order.lowest import lowest
from autotune.planners.order.states import State, Steps
from autotune.predict.order_bounds import LARGEST, must_live
from autotune.predict.ordering import Ordering, backwards, ordering


@dataclass(frozen=True, slots=True)
class Beam:
    """The `width` beginnings with the lowest peak, then the fewest bytes, go on. From either end of the step; the given
    order if that peaks lower, or if there are more ops than sets of them can be looked at.

    An op that leaves no more than it finds and stays under the peak runs at once: put off, it only does worse.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"width": Int(1, 256, log=True)}
    width: int = 8

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        if len(graph.ops) > LARGEST:
            return plan
        problem = ordering(graph, costs)
        floor = int(must_live(problem).max(initial=0))
        return lowest(graph, plan, problem, lambda problem: beams(problem, self.width, floor))


def beams(problem: Ordering, width: int, floor: int) -> list[tuple[int, ...]]:
    """From the start, and from the end. `floor`: a peak that no order can avoid."""
    return [beam(problem, width, floor), backwards(beam(problem.backwards(), width, floor))]


def beam(problem: Ordering, width: int, floor: int) -> tuple[int, ...]:
    """The lowest of the orders that the beam ends with."""
    steps = Steps(problem)
    states = [steps.start(floor)]
    done: State | None = None
    while states:
        for state in states:
            if not state.ready and (done is None or state.peak < done.peak):
                done = state
        states = [state for state in states if state.ready and (done is None or state.peak < done.peak)]
        seen: set[int] = set()
        chosen: list[State] = []
        for _, _, _, place, op in nsmallest(2 * width, _choices(states)):
            state = states[place]
            ran = state.ran | 1 << op
            if ran not in seen:
                seen.add(ran)
                following = steps.step(state, op)
                if following.ran == ran or following.ran not in seen:
                    seen.add(following.ran)
                    chosen.append(following)
            if len(chosen) == width:
                break
        states = chosen
    assert done is not None
    return done.order


def _choices(states: list[State]) -> list[tuple[int, int, int, int, int]]:
    """(peak, bytes left, bytes while it runs, state, op) of every next step."""
    return [
        (max(state.peak, state.live + during), state.live + left, -during, place, op)
        for place, state in enumerate(states)
        for op, (left, during) in state.ready.items()
    ]
