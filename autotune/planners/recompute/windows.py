"""Solve stretches of an order anew with CP-SAT: what runs again in them, and what lives on instead (Bartan et al. 2023).

Outside of the stretch nothing changes: what stands in memory at its end stands there after it too.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.plan import events
from autotune.planners.recompute.runs import spoilers
from autotune.planners.recompute.search import begin

LENGTH = 40
"""First runs in a window."""
EFFORT = 4.0
"""CP-SAT's deterministic time for one window, about seconds: the same window gives the same answer."""

_log = logging.getLogger(__name__)


def refine(graph: TrainGraph, order: Sequence[int], costs: Costs, limit: int, count: int) -> tuple[int, ...]:
    """The order after up to `count` windows; as it was where nothing got cheaper, or where ortools is not installed."""
    best = tuple(order)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        _log.info("recompute: %d windows not solved, ortools is not installed; pip install autotune[cpsat]", count)
        return best
    seconds = begin(graph, best, costs).seconds
    for first in _dearest(best, costs, count):
        window = Window(graph, best, costs, first, first + LENGTH)
        chains = _solve(cp_model, window, limit)
        if chains is None:
            continue
        made = begin(graph, window.order_with(chains), costs)
        made.undo(limit)
        if made.peak <= limit and made.seconds < seconds:
            best, seconds = made.order, made.seconds
    return best


def _dearest(order: Sequence[int], costs: Costs, count: int) -> list[int]:
    """Where windows begin, in first runs, the one with the most seconds of recomputation first; they overlap by half."""
    again = [0.0]
    ran: set[int] = set()
    for op in order:
        if op in ran:
            again[-1] += costs.seconds[op]
        else:
            ran.add(op)
            again.append(0.0)
    starts = range(0, max(1, len(ran) - LENGTH // 2), LENGTH // 2)
    worth = {start: sum(again[start : start + LENGTH]) for start in starts}
    return sorted((start for start in starts if worth[start] > 0), key=lambda start: (-worth[start], start))[:count]


@dataclass(frozen=True)
class Window:
    """First runs `first` to `last` of an order, each with what runs again just before it: its slot."""

    graph: TrainGraph
    order: tuple[int, ...]
    costs: Costs
    first: int
    last: int

    @cached_property
    def _places(self) -> list[int]:
        """Positions of all first runs."""
        first: dict[int, int] = {}
        for at, op in enumerate(self.order):
            first.setdefault(op, at)
        return list(first.values())

    @cached_property
    def own(self) -> list[int]:
        """Positions of the window's first runs."""
        return self._places[self.first : self.last]

    @cached_property
    def begin(self) -> int:
        """Position of the first thing in the window."""
        return self._places[self.first - 1] + 1 if self.first else 0

    @property
    def end(self) -> int:
        """Position after the window."""
        return self.own[-1] + 1

    @cached_property
    def again(self) -> list[tuple[int, int]]:
        """(slot, op) of all that the order runs again in the window."""
        own = set(self.own)
        inside = range(self.begin, self.end)
        return [(bisect_left(self.own, at), self.order[at]) for at in inside if at not in own]

    @cached_property
    def _events(self) -> list[list[tuple[int, bool]]]:
        return events(self.graph, self.order)

    def live(self, value: int, position: int) -> bool:
        """Whether a value stands in memory just before a position."""
        happened = self._events[value]
        index = bisect_left(happened, (position, False))
        if not index:
            return False
        return not happened[index][1] if index < len(happened) else value in self.graph.outputs

    @cached_property
    def candidates(self) -> list[int]:
        """Ops that may run again in the window: what it runs again now, what makes its inputs, and the inputs of those."""
        makers = self.graph.producer
        found = {op for _, op in self.again}
        for at in self.own:
            near = [makers[value] for value in self.graph.ops[self.order[at]].inputs]
            far = [makers[value] for op in near if op is not None for value in self.graph.ops[op].inputs]
            found.update(op for op in (*near, *far) if op is not None)
        return sorted(op.id for op in map(self.graph.ops.__getitem__, found) if op.repeatable and not op.random)

    @cached_property
    def active(self) -> list[int]:
        """Values that the window reads or makes, or could make again."""
        ops = {*self.order[self.begin : self.end], *self.candidates}
        touched = {value for op in ops for value in (*self.graph.ops[op].inputs, *self.graph.ops[op].outputs)}
        return sorted(touched - self.graph.static)

    @cached_property
    def standing_bytes(self) -> int:
        """Of everything that the window cannot change."""
        active = {*self.active, *self.graph.static}
        idle = (value for value in self.graph.values if value.id not in active and self.live(value.id, self.begin))
        return self.graph.static_bytes + sum(value.nbytes for value in idle)

    def may_run_again(self, op: int, slot: int) -> bool:
        """Whether an op ran before a slot, and nothing that it reads was changed since."""
        first, position = self._first, self.own[slot]
        return first[op] < position and all(position <= first[writer] for writer in spoilers(self.graph)[op])

    @cached_property
    def _first(self) -> dict[int, int]:
        return {self.order[at]: at for at in self._places}

    def order_with(self, chains: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The order with other ops run again in each slot."""
        inside = (op for at, chain in zip(self.own, chains, strict=True) for op in (*chain, self.order[at]))
        return (*self.order[: self.begin], *inside, *self.order[self.end :])


def _solve(cp: Any, window: Window, limit: int) -> list[list[int]] | None:
    """What to run again in each slot, cheapest; None if nothing cheaper is found.

    A slot's chain is charged for all that it reads and makes at once: a little too much where it is longer than one op.
    """
    graph, costs = window.graph, window.costs
    model = cp.CpModel()
    slots = range(len(window.own))
    size = {value: graph.values[value].nbytes for value in window.active}
    kept = [{value: model.new_bool_var("") for value in window.active} for _ in slots]
    chained = [{value: model.new_bool_var("") for value in window.active} for _ in slots]
    rerun = [{op: model.new_bool_var("") for op in window.candidates if window.may_run_again(op, s)} for s in slots]
    room = limit - window.standing_bytes
    for slot, at in enumerate(window.own):
        op = graph.ops[window.order[at]]
        during, before, again = kept[slot], chained[slot], rerun[slot]
        for value in window.active:
            maker = graph.producer[value]
            assert maker is not None
            earlier = kept[slot - 1][value] if slot else int(window.live(value, window.begin))
            model.add(before[value] <= earlier + again.get(maker, 0))
            if value in op.outputs or value in op.inputs:
                model.add(during[value] == 1)
            if value not in op.outputs:
                model.add(during[value] <= before[value])
        model.add(sum(size[v] * during[v] for v in window.active) <= room - costs.scratch_bytes[op.id])
        for other, runs in again.items():
            touched = {*graph.ops[other].inputs, *graph.ops[other].outputs} - graph.static
            model.add_bool_and(before[value] for value in touched).only_enforce_if(runs)
            need = sum(size[v] * before[v] for v in window.active) + costs.scratch_bytes[other]
            model.add(need <= room).only_enforce_if(runs)
    for value in window.active:
        if window.live(value, window.end):
            model.add(kept[-1][value] == 1)
    price = {op: 1 + round(costs.seconds[op] * 1e9) for op in window.candidates}
    cost = sum(price[op] * runs for again in rerun for op, runs in again.items())
    model.add(cost < sum(price.get(op, 0) for _, op in window.again))
    model.minimize(cost)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = EFFORT
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return [[op for op, runs in again.items() if solver.boolean_value(runs)] for again in rerun]
