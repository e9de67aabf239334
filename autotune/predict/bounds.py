"""Lower bounds of peak bytes and of seconds over all plans of a graph: the certificate beside every plan.

Every bound considers one moment, the first run of an op `j`. All its ancestors (`before[j]`) ran by then; none of its
descendants (`after[j]`) did. A value that an op of `before[j]` creates and an op of `after[j]` reads *crosses* `j`: it is
in memory at that moment, or its producer is recomputed later. This holds for any order and any recomputation.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph
from autotune.ir.plan import OFFLOADABLE_ROLES
from autotune.predict.reachability import bit_of, blocks, descendants, reachable_sets, reverse_edges, sum_sets

MOMENTS, DEAREST = 32, 6
"""Maximum numbers of ops whose first run the two slower bounds examine."""
STEPS, WIDEST = 4, 12
"""Length of the histories that are examined, in runs, and the maximum number of values live together in one."""
PRICES = 2.0 ** np.arange(-1.0, 4.0, 0.25)
"""Prices of a byte, relative to its price where no recomputation needs another recomputation."""


def peak_lower_bound(graph: TrainGraph, costs: Costs) -> tuple[int, int]:
    """Return (bytes, op): no plan peaks lower, whatever it recomputes, and this op requires the bytes.

    An op needs its inputs, its outputs and its scratch at once, and its inputs need a history (`_history`). Values that
    cross the op and cannot be recomputed are live beside it: results of ops that run once, or whose inputs are changed in
    place by then. For the other values that cross it, either they are live or values are that they can be recomputed
    from (`_least_bytes`).

    With a store, any value may be offloaded, weights and optimizer state too. Then only each op's own needs count, and
    the static bytes, which are all resident before and after the step.

    >>> from autotune.testing.graphs import chain
    >>> peak_lower_bound(chain(3, nbytes=10), Costs.unit(chain(3)))
    (20, 1)
    """
    return _peak(graph, costs.scratch_bytes, bool(costs.stores))


@lru_cache(maxsize=64)
def _peak(graph: TrainGraph, scratch_bytes: tuple[int, ...], stores: bool) -> tuple[int, int]:
    if not graph.ops:
        return graph.static_bytes, -1
    op_bytes = _op_bytes(graph, scratch_bytes)
    if stores:
        op_bytes += _resident_bytes(graph)
        worst = int(np.argmax(op_bytes))
        return max(graph.static_bytes, int(op_bytes[worst])), worst
    crossing = _crossing(graph)
    bounds = op_bytes + crossing.fixed_bytes
    worst = int(np.argmax(bounds))
    best = int(bounds[worst])
    most = np.where(crossing.blocked, op_bytes + crossing.all_bytes, 0)
    for op in np.argsort(-most, kind="stable")[:DEAREST].tolist():
        if most[op] <= best:
            break
        needed = int(op_bytes[op]) + _least_bytes(graph, op)
        if needed > best:
            best, worst = needed, op
    for op in np.argsort(-op_bytes, kind="stable")[:MOMENTS].tolist():
        live = frozenset(graph.ops[op].inputs) - graph.static
        needed = _history(graph, scratch_bytes, live, STEPS, best)
        if needed > best:
            best, worst = needed, op
    return graph.static_bytes + best, worst


def _history(graph: TrainGraph, scratch_bytes: tuple[int, ...], live: frozenset[int], steps: int, floor: int) -> int:
    """Return the lowest peak of any history of `steps` runs after which all of `live` are in memory at once.

    One of these values was created last. While its producer ran, the others were live beside all that the producer reads
    and creates. Just before, they were live together with the producer's inputs; so the argument repeats one run back.
    The worst run of the best choices is a lower bound for every plan, since every plan makes some such choices. A producer
    may run in place on an input that nothing needs afterwards. A result of at most `floor` may be any such number.
    """
    if not steps or len(live) > WIDEST:
        return 0
    lowest = 0
    for producer in sorted({producer for value in live if (producer := graph.producer[value]) is not None}):
        op = graph.ops[producer]
        before = (live | frozenset(op.inputs)) - frozenset(op.outputs) - graph.static
        beside = sum(graph.values[value].nbytes for value in before) + scratch_bytes[producer]
        shared = shared_bytes(graph, op, before - live, scratch_bytes)
        peak = beside + sum(graph.values[value].nbytes for value in op.outputs) - shared
        if not lowest or peak < lowest:
            peak = max(peak, _history(graph, scratch_bytes, before, steps - 1, floor))
            lowest = min(lowest or peak, peak)
        if lowest <= floor:
            break
    return lowest


def seconds_lower_bound(graph: TrainGraph, costs: Costs, budget_bytes: int | None = None) -> float:
    """Return seconds that no plan within the budget undercuts: every op once, and the recomputation that it needs.

    Without a budget, with a store, or where no plan fits at all, the bound is every op once.
    """
    once = sum(costs.seconds)
    if budget_bytes is None or costs.stores or not graph.ops:
        return once
    return once + _extra_seconds(graph, costs.seconds, costs.scratch_bytes, budget_bytes)


@lru_cache(maxsize=64)
def _extra_seconds(
    graph: TrainGraph, seconds: tuple[float, ...], scratch_bytes: tuple[int, ...], budget_bytes: int
) -> float:
    crossing = _crossing(graph)
    room = budget_bytes - graph.static_bytes - _op_bytes(graph, scratch_bytes)
    if (crossing.fixed_bytes > room).any():
        return 0.0
    tight = np.argsort(room - crossing.all_bytes, kind="stable")[:MOMENTS].tolist()
    tight = [op for op in tight if crossing.all_bytes[op] > room[op]]
    bounds = sorted(((*_knapsack(graph, seconds, op, int(room[op])), op) for op in tight), reverse=True)
    extra = max((paid for paid, _, _ in bounds), default=0.0)
    for _, price, op in bounds[:2]:
        prices = price * PRICES
        paid = _least_payment(graph, op, prices, seconds) - prices * int(room[op])
        extra = max(extra, float(paid.max()))
    return extra


def _op_bytes(graph: TrainGraph, scratch_bytes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return per op the bytes of its inputs, outputs and scratch beside the static bytes; less where it may run in place."""
    static = graph.static

    def needs(op: Op) -> int:
        shared = shared_bytes(graph, op, frozenset(op.inputs) - static, scratch_bytes)
        return sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs) if value not in static) - shared

    needed = [needs(op) for op in graph.ops]
    return np.array(needed, dtype=np.int64) + np.array(scratch_bytes, dtype=np.int64)


def _resident_bytes(graph: TrainGraph) -> npt.NDArray[np.int64]:
    """Return per op the static bytes that are resident while it runs, whatever may be offloaded."""
    offloadable = {value for value in graph.static if graph.values[value].role in OFFLOADABLE_ROLES}
    fixed = sum(graph.values[value].nbytes for value in graph.static - offloadable)
    touched = ({*op.inputs, *op.writes} & offloadable for op in graph.ops)
    return np.array([fixed + sum(graph.values[value].nbytes for value in values) for values in touched], dtype=np.int64)


def shared_bytes(graph: TrainGraph, op: Op, free: frozenset[int], scratch_bytes: tuple[int, ...]) -> int:
    """Return the most output bytes that an op may write to one of the free values; negative scratch counts them already."""
    if scratch_bytes[op.id] < 0:
        return 0
    return max((graph.values[value].nbytes for value in op.inplace if value in free), default=0)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Per op the values that cross it.

    An ancestor of the op creates such a value, a descendant reads it, and the op itself does not.
    """

    all_bytes: npt.NDArray[np.int64]
    """Bytes of all values that cross the op."""
    fixed_bytes: npt.NDArray[np.int64]
    """Bytes of the crossing values that cannot be recomputed."""
    blocked: npt.NDArray[np.bool_]
    """True if some ancestor can no longer be recomputed at the op's first run."""


@lru_cache(maxsize=32)
def _crossing(graph: TrainGraph) -> _Crossing:
    parts = [_crossing_part(graph, first, end) for first, end in blocks(len(graph.ops))]
    return _Crossing(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _crossing_part(
    graph: TrainGraph, first: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the three arrays of `_Crossing` for the block of ops from `first` to before `end`."""
    ops, width = range(len(graph.ops)), end - first
    before, after = graph.predecessors, _successors(graph)
    earlier, later = reachable_sets(before, ops, first, end), reachable_sets(after, reversed(ops), first, end)
    outputs, changes, every = frozenset(graph.outputs), _changes(graph), (1 << width) - 1
    blocked = 0
    crossed: list[tuple[int, int]] = []
    fixed: list[tuple[int, int]] = []
    for producer in graph.ops:
        then = later[producer.id] & ~bit_of(producer.id, first, end)
        gone = then if _runs_once(producer) else 0
        for change in changes[producer.id]:
            gone |= later[change]
        blocked |= gone
        for value in producer.outputs:
            nbytes = graph.values[value].nbytes
            ahead = every if value in outputs else 0
            read = 0
            for reader in graph.consumers[value]:
                ahead |= earlier[reader]
                read |= bit_of(reader, first, end)
            ops_crossed = then & ahead & ~read
            if nbytes and ops_crossed:
                crossed.append((ops_crossed, nbytes))
                if ops_crossed & gone:
                    fixed.append((ops_crossed & gone, nbytes))

    def add_up(sets: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
        return sum_sets([ops for ops, _ in sets], [nbytes for _, nbytes in sets], width)

    return add_up(crossed), add_up(fixed), sum_sets([blocked], [1], width).astype(np.bool_)


@dataclass(frozen=True, slots=True)
class _Moment:
    """State of a step at the first run of an op."""

    before: tuple[int, ...]
    """Ancestors of the op, the last first."""
    crossing: frozenset[int]
    """Values that cross the op."""
    gone: frozenset[int]
    """Ancestors that can no longer be recomputed."""


@lru_cache(maxsize=64)
def _moment(graph: TrainGraph, op: int) -> _Moment:
    before, after = descendants(graph.predecessors, op), descendants(_successors(graph), op)
    outputs, changes = frozenset(graph.outputs), _changes(graph)
    ran = before | {op}
    crossing = set()
    for producer in before:
        for value in graph.ops[producer].outputs:
            readers = graph.consumers[value]
            needed = value in outputs or not after.isdisjoint(readers)
            if needed and op not in readers and graph.values[value].nbytes:
                crossing.add(value)
    gone = {other for other in before if _runs_once(graph.ops[other]) or not ran.isdisjoint(changes[other])}
    return _Moment(tuple(sorted(before, reverse=True)), frozenset(crossing), frozenset(gone))


def _runs_once(op: Op) -> bool:
    return not op.repeatable or op.random or bool(op.writes)


@lru_cache(maxsize=32)
def _successors(graph: TrainGraph) -> list[list[int]]:
    return reverse_edges(graph.predecessors)


@lru_cache(maxsize=32)
def _changes(graph: TrainGraph) -> list[list[int]]:
    """Return per op the later writers of its inputs: after them it would read other data."""
    writers: dict[int, list[int]] = {}
    for writer in graph.ops:
        for value in writer.writes:
            writers.setdefault(value, []).append(writer.id)
    return [[writer for value in op.inputs for writer in writers.get(value, ()) if writer > op.id] for op in graph.ops]


def _knapsack(graph: TrainGraph, seconds: tuple[float, ...], op: int, room: int) -> tuple[float, float]:
    """Return (seconds, seconds of the last byte) that any plan pays so that at most `room` bytes cross an op.

    Each crossing value is in memory at the op's first run, or its producer runs again after it. So the cheapest choice of
    producers, each paid once, whose values leave the rest within the room is a lower bound. The greedy choice by price
    per byte, with a fraction of the last producer, is a lower bound too (Dantzig).
    """
    bytes_of: dict[int, int] = {}
    moment = _moment(graph, op)
    for value in moment.crossing:
        nbytes = graph.values[value].nbytes
        producer = graph.producer[value]
        assert producer is not None
        if producer in moment.gone:
            room -= nbytes
        else:
            bytes_of[producer] = bytes_of.get(producer, 0) + nbytes
    excess = sum(bytes_of.values()) - room
    paid = price = 0.0
    for producer in sorted(bytes_of, key=lambda op: seconds[op] / bytes_of[op]):
        if excess <= 0:
            break
        price = seconds[producer] / bytes_of[producer]
        removed = min(bytes_of[producer], excess)
        paid += price * removed
        excess -= removed
    return paid, price


def _least_bytes(graph: TrainGraph, op: int) -> int:
    """Return the fewest bytes live beside an op such that every crossing value is live or can be recomputed.

    This is `_least_payment` at one unit per byte, with free recomputation.
    """
    return round(float(_least_payment(graph, op, np.ones(1), (0.0,) * len(graph.ops))[0]))


def _least_payment(
    graph: TrainGraph, op: int, prices: npt.NDArray[np.float64], seconds: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    """Return per price of a byte the least that any plan pays at an op's first run, in live bytes and recomputed seconds.

    A crossing value is live, at the price of its bytes, or its producer runs again after the op, at its seconds. Then the
    producer's inputs are live or recomputed in turn. The op's inputs are free, and results that cannot be recomputed are
    live. The least payment is a minimum cut, and any flow is at most that. Here each crossing value sends its price to its
    producer, which absorbs its seconds and passes the rest to inputs that do not cross, up to their own price. With at
    most `room` bytes, the seconds alone are at least the payment less the room's price (Lagrange).
    """
    moment = _moment(graph, op)
    free = frozenset(graph.ops[op].inputs) | graph.static
    passed: dict[int, npt.NDArray[np.float64]] = {}
    total = np.zeros(len(prices))
    for producer in moment.before:
        inflow: npt.NDArray[np.float64] | None = None
        crossing_bytes = 0
        for value in graph.ops[producer].outputs:
            if value in moment.crossing:
                crossing_bytes += graph.values[value].nbytes
            elif value in passed:
                inflow = passed[value] if inflow is None else inflow + passed[value]
        if crossing_bytes:
            inflow = prices * crossing_bytes if inflow is None else inflow + prices * crossing_bytes
        if inflow is None:
            continue
        if producer in moment.gone:
            total += inflow
            continue
        absorbed = np.minimum(inflow, seconds[producer])
        total += absorbed
        rest = inflow - absorbed
        for value in graph.ops[producer].inputs:
            if not rest.any():
                break
            if value not in free and value not in moment.crossing:
                before = passed.get(value)
                price = prices * graph.values[value].nbytes
                sent = np.minimum(rest, price if before is None else price - before)
                passed[value] = sent if before is None else before + sent
                rest = rest - sent
    return total
