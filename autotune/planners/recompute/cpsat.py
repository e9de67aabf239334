"""Refine recomputation with CP-SAT: solve a few neighbouring ops at a time, all others fixed (Moccasin, 2023).

A window is a range of ops, not of time: the lives of their results are decided over the whole order.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.errors import install_command
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.planners.recompute.editable_order import NEVER, Bytes, EditableOrder
from autotune.planners.recompute.search import start_search
from autotune.planners.unfold import drop_unread_runs

LENGTH = 24
"""Number of ops in a window; windows overlap by half."""
EFFORT, LONGEST = 6.0, 3.0
"""CP-SAT's deterministic time for all windows of a plan, and the maximum for one: about seconds.

Deterministic time makes the result reproducible. It is short because a search makes many plans.
"""

_log = logging.getLogger(__name__)


def refine(graph: TrainGraph, order: Sequence[int], costs: Costs, limit: int, count: int) -> tuple[int, ...]:
    """Return the order after up to `count` windows; unchanged if none gets cheaper or ortools is not installed."""
    best = tuple(order)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        _log.info("recompute: %d windows not solved, ortools is not installed; %s", count, install_command("cpsat"))
        return best
    seconds = start_search(graph, best, costs).seconds
    chosen = _most_expensive(graph, best, costs, count)
    effort = min(LONGEST, EFFORT / max(1, len(chosen)))
    for ops in chosen:
        window = OpWindow(graph, best, costs, ops)
        chains = _solve(cp_model, window, limit, effort)
        if chains is None:
            continue
        # a recomputation before the first reader of a result makes the run before it unread
        search = start_search(graph, drop_unread_runs(graph, window.order_with(chains)), costs)
        search.undo(limit)
        if search.peak <= limit and search.seconds < seconds:
            best, seconds = search.order, search.seconds
    return best


def _most_expensive(graph: TrainGraph, order: Sequence[int], costs: Costs, count: int) -> list[tuple[int, ...]]:
    """Return windows of recomputable ops, those with the most seconds of recomputation first."""
    runs = dict.fromkeys(order, 0)
    for op in order:
        runs[op] += 1
    harmless = (graph.ops[op] for op in runs)
    free = [op.id for op in harmless if op.repeatable and not op.random and not op.writes and op.outputs]
    windows = [tuple(free[start : start + LENGTH]) for start in range(0, max(1, len(free) - LENGTH // 2), LENGTH // 2)]
    worth = [sum(costs.seconds[op] * (runs[op] - 1) for op in window) for window in windows]
    ranked = sorted(range(len(windows)), key=lambda index: (-worth[index], index))
    return [windows[index] for index in ranked if worth[index] > 0][:count]


@dataclass(frozen=True)
class OpWindow:
    """Order in which some ops may be recomputed elsewhere: at slots, just before runs that touch their results."""

    graph: TrainGraph
    order: tuple[int, ...]
    costs: Costs
    ops: tuple[int, ...]

    @cached_property
    def runs(self) -> EditableOrder:
        return EditableOrder(self.graph, self.order, self.costs)

    @cached_property
    def values(self) -> list[int]:
        """Results of the ops."""
        return sorted(value for op in self.ops for value in self.graph.ops[op].outputs)

    @cached_property
    def loose(self) -> list[int]:
        """Positions of the current recomputations of the ops."""
        return sorted(run for op in self.ops for run in self.runs.runs[op][1:])

    @cached_property
    def slots(self) -> list[int]:
        """Positions of the other runs that produce or read a value of the window."""
        loose = set(self.loose)
        touched = {run for value in self.values for run in self.runs.events[value]}
        return sorted(touched - loose)

    @cached_property
    def recomputed(self) -> list[int]:
        """Current recomputations, one entry per run."""
        return [self.order[position] for position in self.loose]

    @cached_property
    def frozen(self) -> Bytes:
        """Bytes at every position without the values of the window."""
        left = self.runs.bytes.copy()
        for value in self.values:
            for first, last in self.runs._intervals(value, self.runs.events[value]):
                left[first : len(left) if last == NEVER else last + 1] -= self.graph.values[value].nbytes
        left[self.loose] = 0
        return left

    def after(self, slot: int) -> int:
        """Return the maximum of the frozen bytes between a slot and the next one."""
        end = self.slots[slot + 1] if slot + 1 < len(self.slots) else len(self.order)
        return int(self.frozen[self.slots[slot] + 1 : end].max(initial=0))

    def before(self, slot: int) -> int:
        """Return the frozen bytes just before the run of a slot."""
        op = self.graph.ops[self.order[self.slots[slot]]]
        outputs = sum(self.graph.values[value].nbytes for value in op.outputs if value not in self.values)
        return int(self.frozen[self.slots[slot]]) - outputs - self.costs.scratch_bytes[op.id]

    def may_run_again(self, op: int, slot: int) -> bool:
        """Return true if an op may run before a slot, with all its inputs from outside of the window live."""
        position, runs = self.slots[slot], self.runs
        outside = (value for value in runs.reads[op] if value not in self.values)
        first = runs.runs[op][0] < position
        return first and runs.may_run_before(op, position) and all(runs.is_live(value, position) for value in outside)

    def order_with(self, chains: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the order with these recomputations, one chain per slot."""
        ahead = dict(zip(self.slots, chains, strict=True))
        loose = set(self.loose)
        kept = (position for position in range(len(self.order)) if position not in loose)
        return tuple(op for position in kept for op in (*ahead.get(position, ()), self.order[position]))


def _solve(cp: Any, window: OpWindow, limit: int, effort: float) -> list[list[int]] | None:
    """Return the cheapest chain for each slot; None if the solver finds nothing cheaper.

    A chain is charged for all its inputs and outputs at once, which slightly overestimates chains of several ops.
    """
    graph, costs, values = window.graph, window.costs, window.values
    model = cp.CpModel()
    slots = range(len(window.slots))
    size = {value: graph.values[value].nbytes for value in values}
    ahead, during, across = ([{value: model.new_bool_var("") for value in values} for _ in slots] for _ in range(3))
    rerun = [{op: model.new_bool_var("") for op in window.ops if window.may_run_again(op, slot)} for slot in slots]

    def fits(resident: dict[int, Any], beside: int) -> Any:
        return model.add(sum(size[value] * resident[value] for value in values) <= limit - beside)

    for slot, position in enumerate(window.slots):
        op = graph.ops[window.order[position]]
        for value in values:
            maker = graph.producer[value]
            assert maker is not None
            model.add(ahead[slot][value] <= (across[slot - 1][value] if slot else 0) + rerun[slot].get(maker, 0))
            if value not in op.outputs:
                model.add(during[slot][value] <= ahead[slot][value])
            if value in op.outputs or value in op.inputs:
                model.add(during[slot][value] == 1)
            model.add(across[slot][value] <= during[slot][value])
        fits(during[slot], int(window.frozen[position]))
        fits(across[slot], window.after(slot))
        for other, runs in rerun[slot].items():
            touched = {*graph.ops[other].inputs, *graph.ops[other].outputs}.intersection(values)
            model.add_bool_and(ahead[slot][value] for value in touched).only_enforce_if(runs)
            fits(ahead[slot], window.before(slot) + costs.scratch_bytes[other]).only_enforce_if(runs)
    for value in graph.outputs:
        if value in size:
            model.add(across[-1][value] == 1)
    price = {op: 1 + round(costs.seconds[op] * 1e9) for op in window.ops}
    cost = sum(price[op] * runs for chain in rerun for op, runs in chain.items())
    model.add(cost < sum(price[op] for op in window.recomputed))
    model.minimize(cost)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return [[op for op in sorted(chain) if solver.boolean_value(chain[op])] for chain in rerun]
