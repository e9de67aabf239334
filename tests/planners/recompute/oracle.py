"""Exact answers for small graphs, by looking at every order with any number of repetitions."""

import heapq

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph


def least_seconds(
    graph: TrainGraph,
    budget_bytes: int,
    costs: Costs,
    order: tuple[int, ...] | None = None,
    *,
    inplace: bool = False,
) -> float | None:
    """Fewest seconds of any plan under a budget; None if none fits. With an order, of plans whose first runs follow it.

    A state is which ops ran and which values stand in memory; any value may be dropped at any time. With `inplace` an op
    may make its output in the buffer of an input that is dropped.
    """
    size = [value.nbytes for value in graph.values]
    room = budget_bytes - graph.static_bytes
    reads = [frozenset(op.inputs) - graph.static for op in graph.ops]
    start: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    seen = {start: 0.0}
    heap = [(0.0, 0, *start)]
    while heap:
        now, _, ran, live = heapq.heappop(heap)
        if seen[ran, live] < now:
            continue
        if len(ran) == len(graph.ops) and live.issuperset(graph.outputs):
            return now
        moves, tight = [], False
        for op in graph.ops:
            made = frozenset(op.outputs)
            if op.id in ran:
                may = _may_repeat(graph, op.id, ran, live)
            else:
                may = ran >= graph.predecessors[op.id] if order is None else order[len(ran)] == op.id
            if not may or not reads[op.id] <= live:
                continue
            if sum(size[value] for value in live | made) + costs.scratch_bytes[op.id] <= room:
                moves.append((now + costs.seconds[op.id], ran | {op.id}, live | made))
            else:
                tight = True
            for value in live.intersection(op.inplace if inplace else ()):
                rest = live - {value}
                if sum(size[one] for one in rest | made) + costs.scratch_bytes[op.id] <= room:
                    moves.append((now + costs.seconds[op.id], ran | {op.id}, rest | made))
        if tight:
            moves += [(now, ran, live - {value}) for value in live if size[value]]
        for seconds, ahead, standing in moves:
            if seconds < seen.get((ahead, standing), float("inf")):
                seen[ahead, standing] = seconds
                heapq.heappush(heap, (seconds, len(seen), ahead, standing))
    return None


def _may_repeat(graph: TrainGraph, op_id: int, ran: frozenset[int], live: frozenset[int]) -> bool:
    """No side effect, nothing it reads was changed since, and something of its results is gone."""
    op = graph.ops[op_id]
    changed = {value for writer in ran if writer > op_id for value in graph.ops[writer].writes}
    harmless = op.repeatable and not op.random and not op.writes and bool(op.outputs)
    return harmless and changed.isdisjoint(op.inputs) and not live.issuperset(op.outputs)


def lowest_peak(graph: TrainGraph, costs: Costs, order: tuple[int, ...] | None = None, *, inplace: bool = False) -> int:
    """Lowest peak of any plan; with an order, of plans whose first runs follow it."""
    low, high = graph.static_bytes - 1, graph.static_bytes + sum(value.nbytes for value in graph.values)
    high += max(costs.scratch_bytes, default=0)
    while high - low > 1:
        middle = (low + high) // 2
        if least_seconds(graph, middle, costs, order, inplace=inplace) is None:
            low = middle
        else:
            high = middle
    return high
