"""What no plan of a graph can do better than: the certificate beside every plan.

Every bound looks at one moment, the first run of an op `j`. What must have run before it (`before[j]`) ran; what needs
its results did not (`after[j]`). A value that an op of `before[j]` makes and an op of `after[j]` reads *crosses* `j`:
it stands in memory then, or its maker runs once more later. This holds for any order and any recomputation.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph
from autotune.ir.plan import MAY_LEAVE
from autotune.predict.reachability import bit, blocks, closure, reach, sums, turned

MOMENTS, DEAREST = 32, 6
"""Ops whose first run is looked at by the bounds that take longer, at most."""
STEPS, WIDEST = 4, 12
"""Runs that are looked back from an op, and values that stand together at most for that."""
PRICES = 2.0 ** np.arange(-1.0, 4.0, 0.25)
"""Of a byte, over its price where nothing that is made again needs anything else made again."""


def peak_lower_bound(graph: TrainGraph, costs: Costs) -> tuple[int, int]:
    """(bytes, op): no plan peaks lower, whatever it recomputes, and this op forbids it.

    An op needs its inputs, its outputs and its scratch at once, and its inputs together a history (`_history`). Beside an
    op stands what crosses it and can never be made again: results of ops that run once, or whose inputs are changed in
    place by then. What crosses and can be made again stands too, or else whatever cuts it off from such results
    (`_least_bytes`). Where a store is at hand anything may be away, weights and optimizer state too, and only an op's own
    needs hold; the user's own stands together before the step and after it.
    """
    return _peak(graph, costs.scratch_bytes, bool(costs.stores))


@lru_cache(maxsize=64)
def _peak(graph: TrainGraph, scratch_bytes: tuple[int, ...], stores: bool) -> tuple[int, int]:
    if not graph.ops:
        return graph.static_bytes, -1
    own = _own_bytes(graph, scratch_bytes)
    if stores:
        own += _standing_bytes(graph)
        worst = int(np.argmax(own))
        return max(graph.static_bytes, int(own[worst])), worst
    crossing = _crossing(graph)
    found = own + crossing.fixed_bytes
    worst = int(np.argmax(found))
    best = int(found[worst])
    most = np.where(crossing.kept, own + crossing.all_bytes, 0)
    for op in np.argsort(-most, kind="stable")[:DEAREST].tolist():
        if most[op] <= best:
            break
        needed = int(own[op]) + _least_bytes(graph, op)
        if needed > best:
            best, worst = needed, op
    for op in np.argsort(-own, kind="stable")[:MOMENTS].tolist():
        held = frozenset(graph.ops[op].inputs) - graph.static
        needed = _history(graph, scratch_bytes, held, STEPS, best)
        if needed > best:
            best, worst = needed, op
    return graph.static_bytes + best, worst


def _history(graph: TrainGraph, scratch_bytes: tuple[int, ...], held: frozenset[int], steps: int, floor: int) -> int:
    """Least bytes that any history of `steps` runs takes at its worst to have all of `held` at once; at most `floor` where
    that is as low as matters. A maker may run in place in what nobody needs after it.

    One of these values was made last. When its maker ran, the others stood already, beside all that the maker reads and
    makes; and just before, they stood together with what it reads: so on, one run back. The worst run of the best choices
    is a lower bound for every plan, since every plan makes some such choices.
    """
    if not steps or len(held) > WIDEST:
        return 0
    found = 0
    for maker in sorted({maker for value in held if (maker := graph.producer[value]) is not None}):
        op = graph.ops[maker]
        before = (held | frozenset(op.inputs)) - frozenset(op.outputs) - graph.static
        beside = sum(graph.values[value].nbytes for value in before) + scratch_bytes[maker]
        shared = shared_bytes(graph, op, before - held, scratch_bytes)
        takes = beside + sum(graph.values[value].nbytes for value in op.outputs) - shared
        if not found or takes < found:
            takes = max(takes, _history(graph, scratch_bytes, before, steps - 1, floor))
            found = min(found or takes, takes)
        if found <= floor:
            break
    return found


def seconds_lower_bound(graph: TrainGraph, costs: Costs, budget_bytes: int | None = None) -> float:
    """No plan under the budget is faster: every op once, and what must be computed again. Without a budget, or where a
    store is at hand, or where nothing fits at all: every op once."""
    once = sum(costs.seconds)
    if budget_bytes is None or costs.stores or not graph.ops:
        return once
    return once + _extra_seconds(graph, costs.seconds, costs.scratch_bytes, budget_bytes)


@lru_cache(maxsize=64)
def _extra_seconds(
    graph: TrainGraph, seconds: tuple[float, ...], scratch_bytes: tuple[int, ...], budget_bytes: int
) -> float:
    crossing = _crossing(graph)
    room = budget_bytes - graph.static_bytes - _own_bytes(graph, scratch_bytes)
    if (crossing.fixed_bytes > room).any():
        return 0.0
    tight = np.argsort(room - crossing.all_bytes, kind="stable")[:MOMENTS].tolist()
    tight = [op for op in tight if crossing.all_bytes[op] > room[op]]
    found = sorted(((*_knapsack(graph, seconds, op, int(room[op])), op) for op in tight), reverse=True)
    extra = max((paid for paid, _, _ in found), default=0.0)
    for _, price, op in found[:2]:
        prices = price * PRICES
        paid = _paid(graph, op, prices, seconds) - prices * int(room[op])
        extra = max(extra, float(paid.max()))
    return extra


def _own_bytes(graph: TrainGraph, scratch_bytes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Per op what it needs itself, beside the static bytes; one buffer for both where it may run in place."""
    static = graph.static

    def needs(op: Op) -> int:
        shared = shared_bytes(graph, op, frozenset(op.inputs) - static, scratch_bytes)
        return sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs) if value not in static) - shared

    made = [needs(op) for op in graph.ops]
    return np.array(made, dtype=np.int64) + np.array(scratch_bytes, dtype=np.int64)


def _standing_bytes(graph: TrainGraph) -> npt.NDArray[np.int64]:
    """Per op what stands of the user's own while it runs, whatever may be away."""
    leaves = {value for value in graph.static if graph.values[value].role in MAY_LEAVE}
    stays = sum(graph.values[value].nbytes for value in graph.static - leaves)
    touched = ({*op.inputs, *op.writes} & leaves for op in graph.ops)
    return np.array([stays + sum(graph.values[value].nbytes for value in values) for values in touched], dtype=np.int64)


def shared_bytes(graph: TrainGraph, op: Op, free: frozenset[int], scratch_bytes: tuple[int, ...]) -> int:
    """Most bytes of its outputs that an op may make in one of the free values; a scratch below 0 has them already."""
    if scratch_bytes[op.id] < 0:
        return 0
    return max((graph.values[value].nbytes for value in op.inplace if value in free), default=0)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What crosses each op: made by an op that must have run before it, read by one that needs its results, not by itself."""

    all_bytes: npt.NDArray[np.int64]
    fixed_bytes: npt.NDArray[np.int64]
    """Of these what cannot be made again."""
    kept: npt.NDArray[np.bool_]
    """Whether some op can no longer run again at its first run."""


@lru_cache(maxsize=32)
def _crossing(graph: TrainGraph) -> _Crossing:
    parts = [_crossing_part(graph, first, end) for first, end in blocks(len(graph.ops))]
    return _Crossing(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _crossing_part(
    graph: TrainGraph, first: int, end: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The three of `_Crossing` for the ops from `first` on before `end`."""
    ops, width = range(len(graph.ops)), end - first
    before, after = graph.predecessors, _successors(graph)
    earlier, later = reach(before, ops, first, end), reach(after, reversed(ops), first, end)
    outputs, changes, every = frozenset(graph.outputs), _changes(graph), (1 << width) - 1
    kept = 0
    crossed: list[tuple[int, int]] = []
    fixed: list[tuple[int, int]] = []
    for maker in graph.ops:
        then = later[maker.id] & ~bit(maker.id, first, end)
        gone = then if _once(maker) else 0
        for change in changes[maker.id]:
            gone |= later[change]
        kept |= gone
        for value in maker.outputs:
            nbytes = graph.values[value].nbytes
            ahead = every if value in outputs else 0
            read = 0
            for reader in graph.consumers[value]:
                ahead |= earlier[reader]
                read |= bit(reader, first, end)
            ops_crossed = then & ahead & ~read
            if nbytes and ops_crossed:
                crossed.append((ops_crossed, nbytes))
                if ops_crossed & gone:
                    fixed.append((ops_crossed & gone, nbytes))

    def summed(found: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
        return sums([ops for ops, _ in found], [nbytes for _, nbytes in found], width)

    return summed(crossed), summed(fixed), sums([kept], [1], width).astype(np.bool_)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The first run of an op."""

    before: tuple[int, ...]
    """Ops that must have run, the last first."""
    crossing: frozenset[int]
    """Values that cross it."""
    gone: frozenset[int]
    """Of the ops before it those that cannot run again from here on."""


@lru_cache(maxsize=64)
def _moment(graph: TrainGraph, op: int) -> _Moment:
    before, after = closure(graph.predecessors, op), closure(_successors(graph), op)
    outputs, changes = frozenset(graph.outputs), _changes(graph)
    ran = before | {op}
    crossing = set()
    for maker in before:
        for value in graph.ops[maker].outputs:
            readers = graph.consumers[value]
            needed = value in outputs or not after.isdisjoint(readers)
            if needed and op not in readers and graph.values[value].nbytes:
                crossing.add(value)
    gone = {one for one in before if _once(graph.ops[one]) or not ran.isdisjoint(changes[one])}
    return _Moment(tuple(sorted(before, reverse=True)), frozenset(crossing), frozenset(gone))


def _once(op: Op) -> bool:
    return not op.repeatable or op.random or bool(op.writes)


@lru_cache(maxsize=32)
def _successors(graph: TrainGraph) -> list[list[int]]:
    return turned(graph.predecessors)


@lru_cache(maxsize=32)
def _changes(graph: TrainGraph) -> list[list[int]]:
    """Per op the writers, traced later, of what it reads: after them it would read something else."""
    writers: dict[int, list[int]] = {}
    for writer in graph.ops:
        for value in writer.writes:
            writers.setdefault(value, []).append(writer.id)
    return [[writer for value in op.inputs for writer in writers.get(value, ()) if writer > op.id] for op in graph.ops]


def _knapsack(graph: TrainGraph, seconds: tuple[float, ...], op: int, room: int) -> tuple[float, float]:
    """(seconds, seconds of the last byte) that any plan pays for having no more than `room` cross an op.

    Each crossing value is in memory at the op's first run, or its maker, which ran before, runs again after it. So the
    cheapest choice of makers, each paid once, whose values leave the rest in the room is a lower bound; and so is the
    choice by price per byte with a fraction of the last maker (Dantzig).
    """
    bytes_of: dict[int, int] = {}
    moment = _moment(graph, op)
    for value in moment.crossing:
        nbytes = graph.values[value].nbytes
        maker = graph.producer[value]
        assert maker is not None
        if maker in moment.gone:
            room -= nbytes
        else:
            bytes_of[maker] = bytes_of.get(maker, 0) + nbytes
    excess = sum(bytes_of.values()) - room
    paid = price = 0.0
    for maker in sorted(bytes_of, key=lambda one: seconds[one] / bytes_of[one]):
        if excess <= 0:
            break
        price = seconds[maker] / bytes_of[maker]
        taken = min(bytes_of[maker], excess)
        paid += price * taken
        excess -= taken
    return paid, price


def _least_bytes(graph: TrainGraph, op: int) -> int:
    """Fewest bytes that must stand beside an op so that everything that crosses it stands or can be made again.

    `_paid` at one unit per byte where running again is free.
    """
    return round(float(_paid(graph, op, np.ones(1), (0.0,) * len(graph.ops))[0]))


def _paid(
    graph: TrainGraph, op: int, prices: npt.NDArray[np.float64], seconds: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    """Per price of a byte the least that any plan pays at an op's first run, in bytes kept and seconds run again.

    What crosses is kept, at its price, or its maker runs again after the op, at its seconds; the maker's inputs are then
    kept, or made again in turn; what the op reads is there for nothing, and what cannot be made again is kept. The least
    payment is a minimum cut, and any flow is at most that: each value that crosses sends its price to its maker, which
    takes what it costs and passes the rest to inputs that do not cross, up to their own price. With `room` bytes at most,
    the seconds alone are at least the payment less the room's price (Lagrange).
    """
    moment = _moment(graph, op)
    free = frozenset(graph.ops[op].inputs) | graph.static
    passed: dict[int, npt.NDArray[np.float64]] = {}
    total = np.zeros(len(prices))
    for maker in moment.before:
        inflow: npt.NDArray[np.float64] | None = None
        own = 0
        for value in graph.ops[maker].outputs:
            if value in moment.crossing:
                own += graph.values[value].nbytes
            elif value in passed:
                inflow = passed[value] if inflow is None else inflow + passed[value]
        if own:
            inflow = prices * own if inflow is None else inflow + prices * own
        if inflow is None:
            continue
        if maker in moment.gone:
            total += inflow
            continue
        taken = np.minimum(inflow, seconds[maker])
        total += taken
        rest = inflow - taken
        for value in graph.ops[maker].inputs:
            if not rest.any():
                break
            if value not in free and value not in moment.crossing:
                before = passed.get(value)
                price = prices * graph.values[value].nbytes
                given = np.minimum(rest, price if before is None else price - before)
                passed[value] = given if before is None else before + given
                rest = rest - given
    return total
