"""Decide anew with CP-SAT what a few neighbouring ops keep and run again, everything else as it stands (Moccasin, 2023).

A window is a stretch of ops, not of time: what they make is followed through the whole order, over the peak and back.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners.recompute.editable_order import NEVER, Bytes, Runs
from autotune.planners.recompute.search import begin

LENGTH = 24
"""Ops in a window; windows overlap by half."""
EFFORT, LONGEST = 6.0, 3.0
"""CP-SAT's deterministic time for all windows of a plan and for one of them, about seconds: a search asks for many plans. The
same windows give the same answer."""

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
    chosen = _dearest(graph, best, costs, count)
    effort = min(LONGEST, EFFORT / max(1, len(chosen)))
    for ops in chosen:
        window = Window(graph, best, costs, ops)
        chains = _solve(cp_model, window, limit, effort)
        if chains is None:
            continue
        made = begin(graph, window.order_with(chains), costs)
        made.undo(limit)
        if made.peak <= limit and made.seconds < seconds:
            best, seconds = made.order, made.seconds
    return best


def _dearest(graph: TrainGraph, order: Sequence[int], costs: Costs, count: int) -> list[tuple[int, ...]]:
    """Windows of ops that may run again, those first that spend the most seconds on it now."""
    runs = dict.fromkeys(order, 0)
    for op in order:
        runs[op] += 1
    harmless = (graph.ops[op] for op in runs)
    free = [op.id for op in harmless if op.repeatable and not op.random and not op.writes and op.outputs]
    windows = [tuple(free[at : at + LENGTH]) for at in range(0, max(1, len(free) - LENGTH // 2), LENGTH // 2)]
    worth = [sum(costs.seconds[op] * (runs[op] - 1) for op in window) for window in windows]
    return [windows[at] for at in sorted(range(len(windows)), key=lambda at: (-worth[at], at)) if worth[at] > 0][:count]


@dataclass(frozen=True)
class Window:
    """An order of which some ops may run again elsewhere: just before runs that touch what they make, its slots."""

    graph: TrainGraph
    order: tuple[int, ...]
    costs: Costs
    ops: tuple[int, ...]

    @cached_property
    def runs(self) -> Runs:
        return Runs(self.graph, self.order, self.costs)

    @cached_property
    def values(self) -> list[int]:
        """All that the ops make."""
        return sorted(value for op in self.ops for value in self.graph.ops[op].outputs)

    @cached_property
    def loose(self) -> list[int]:
        """Positions at which an op of the window runs again now."""
        return sorted(run for op in self.ops for run in self.runs.runs[op][1:])

    @cached_property
    def slots(self) -> list[int]:
        """Positions that stay and make or read a value of the window."""
        loose = set(self.loose)
        touched = {run for value in self.values for run in self.runs.events[value]}
        return sorted(touched - loose)

    @cached_property
    def again(self) -> list[int]:
        """Ops that run again now, one for each time."""
        return [self.order[at] for at in self.loose]

    @cached_property
    def frozen(self) -> Bytes:
        """Bytes at every position without what the window makes."""
        left = self.runs.bytes.copy()
        for value in self.values:
            for first, last in self.runs._intervals(value, self.runs.events[value]):
                left[first : len(left) if last == NEVER else last + 1] -= self.graph.values[value].nbytes
        left[self.loose] = 0
        return left

    def after(self, slot: int) -> int:
        """Highest frozen bytes between a slot and the next."""
        end = self.slots[slot + 1] if slot + 1 < len(self.slots) else len(self.order)
        return int(self.frozen[self.slots[slot] + 1 : end].max(initial=0))

    def before(self, slot: int) -> int:
        """Frozen bytes just before a slot's own run."""
        op = self.graph.ops[self.order[self.slots[slot]]]
        made = sum(self.graph.values[value].nbytes for value in op.outputs if value not in self.values)
        return int(self.frozen[self.slots[slot]]) - made - self.costs.scratch_bytes[op.id]

    def may_run_again(self, op: int, slot: int) -> bool:
        """Whether an op may run before a slot, with all that it reads from outside of the window at hand."""
        position, runs = self.slots[slot], self.runs
        outside = (value for value in runs.reads[op] if value not in self.values)
        first = runs.runs[op][0] < position
        return first and runs.may_run_before(op, position) and all(runs.live(value, position) for value in outside)

    def order_with(self, chains: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The order with other ops run again before each slot."""
        ahead = dict(zip(self.slots, chains, strict=True))
        loose = set(self.loose)
        kept = (at for at in range(len(self.order)) if at not in loose)
        return tuple(op for at in kept for op in (*ahead.get(at, ()), self.order[at]))


def _solve(cp: Any, window: Window, limit: int, effort: float) -> list[list[int]] | None:
    """What to run again before each slot, cheapest; None if nothing cheaper is found.

    A chain is charged for all that it reads and makes at once: a little too much where it is longer than one op.
    """
    graph, costs, values = window.graph, window.costs, window.values
    model = cp.CpModel()
    slots = range(len(window.slots))
    size = {value: graph.values[value].nbytes for value in values}
    ahead, during, across = ([{value: model.new_bool_var("") for value in values} for _ in slots] for _ in range(3))
    rerun = [{op: model.new_bool_var("") for op in window.ops if window.may_run_again(op, slot)} for slot in slots]

    def fits(stands: dict[int, Any], beside: int) -> Any:
        return model.add(sum(size[value] * stands[value] for value in values) <= limit - beside)

    for slot, at in enumerate(window.slots):
        op = graph.ops[window.order[at]]
        for value in values:
            maker = graph.producer[value]
            assert maker is not None
            model.add(ahead[slot][value] <= (across[slot - 1][value] if slot else 0) + rerun[slot].get(maker, 0))
            if value not in op.outputs:
                model.add(during[slot][value] <= ahead[slot][value])
            if value in op.outputs or value in op.inputs:
                model.add(during[slot][value] == 1)
            model.add(across[slot][value] <= during[slot][value])
        fits(during[slot], int(window.frozen[at]))
        fits(across[slot], window.after(slot))
        for other, runs in rerun[slot].items():
            touched = {*graph.ops[other].inputs, *graph.ops[other].outputs}.intersection(values)
            model.add_bool_and(ahead[slot][value] for value in touched).only_enforce_if(runs)
            fits(ahead[slot], window.before(slot) + costs.scratch_bytes[other]).only_enforce_if(runs)
    for value in graph.outputs:
        if value in size:
            model.add(across[-1][value] == 1)
    price = {op: 1 + round(costs.seconds[op] * 1e9) for op in window.ops}
    cost = sum(price[op] * runs for again in rerun for op, runs in again.items())
    model.add(cost < sum(price[op] for op in window.again))
    model.minimize(cost)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return [[op for op in sorted(again) if solver.boolean_value(again[op])] for again in rerun]
