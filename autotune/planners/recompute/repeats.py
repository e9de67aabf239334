"""Repeated blocks: the step as a chain of forward pieces, each with its backward piece, and which of them are alike.

Repeats are tandem repeats of the forward's ops: the same operators wired in the same way, one period apart (a
transformer's layers, the bottlenecks of one stage). Names and layers are not looked at.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median_low
from typing import Self

import numpy as np
import numpy.typing as npt

from autotune.ir.graph import Op, Phase, TrainGraph

SMALLEST_SHARE = 20
"""A repeat counts when it covers at least one op in so many of the forward."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the chain. Blocks of one kind are isomorphic, op for op as they stand here."""

    forward: tuple[int, ...]
    """Ops as they run."""
    backward: tuple[int, ...]
    """Its gradients, and the updates that run among them."""
    kind: int


@dataclass(frozen=True, slots=True)
class Tie:
    """How a value that a piece reads or makes hangs on what runs outside of the piece."""

    origin: str
    """Made `before` the piece, `here`, in the gap `between` its forward and its backward; or `static`."""
    between: bool
    """Read in the gap."""
    after: bool
    """Read after the piece, or an output of the step."""
    changed: bool
    """Written in the gap."""


def find(graph: TrainGraph, order: Sequence[int] | None = None) -> tuple[Block, ...]:
    """The chain of an order (by default the traced one) that runs every op once.

    All forwards as they follow, then all backwards from the last block's to the first's, are the order itself. Without
    repeats the chain is one block.
    """
    order = tuple(range(len(graph.ops)) if order is None else order)
    if not order:
        return ()
    turn = _cut(np.array([-1 if graph.ops[op].phase is Phase.FORWARD else 1 for op in order]))
    forward, rest = order[:turn], order[turn:]
    if not forward:
        return (Block((), rest, 0),)
    edges = _edges(graph, forward)
    ends = _backward_edges(graph, forward, edges, rest)
    places = Places.make(graph, order)
    kinds: dict[Hashable, int] = {}
    blocks: list[Block] = []
    for (low, high), (end, begin) in zip(pairwise(edges), pairwise(ends), strict=True):
        mine, back = forward[low:high], rest[begin:end]
        kind = kinds.setdefault(form(graph, places, mine, back), len(kinds))
        blocks.append(Block(mine, back, kind))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Places:
    """Where ops stand in an order that runs each once."""

    of: tuple[int, ...]
    """Position of every op."""
    writers: Mapping[int, tuple[int, ...]]
    """Per value written in place the positions of its writers."""

    @classmethod
    def make(cls, graph: TrainGraph, order: Sequence[int]) -> Self:
        of = [0] * len(order)
        writers: dict[int, tuple[int, ...]] = {}
        for position, op in enumerate(order):
            of[op] = position
            for value in graph.ops[op].writes:
                writers[value] = (*writers.get(value, ()), position)
        return cls(tuple(of), writers)


def form(graph: TrainGraph, places: Places, forward: Sequence[int], backward: Sequence[int]) -> Hashable:
    """What pieces share that are isomorphic: ops, bytes, wiring inside, and how it hangs on what is outside."""
    number: dict[int, int] = {}

    def named(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(number.setdefault(value, len(number)) for value in values)

    ops = tuple(
        (*_look(graph.ops[op]), named(graph.ops[op].inputs), named(graph.ops[op].outputs), named(graph.ops[op].writes))
        for op in (*forward, *backward)
    )
    tied = ties(graph, places, forward, backward)
    values = tuple((graph.values[value].nbytes, graph.values[value].role, tied[value]) for value in number)
    return len(forward), ops, values


def ties(graph: TrainGraph, places: Places, forward: Sequence[int], backward: Sequence[int]) -> dict[int, Tie]:
    """How every value that a piece touches hangs on the rest of the order. A piece without backward has no after."""
    place = places.of
    begin, leave = place[forward[0]], place[forward[-1]]
    back, end = (place[backward[0]], place[backward[-1]]) if backward else (len(place), len(place))
    found: dict[int, Tie] = {}
    for op in map(graph.ops.__getitem__, (*forward, *backward)):
        for value in (*op.inputs, *op.outputs, *op.writes):
            if value in found:
                continue
            maker = graph.producer[value]
            readers = [place[reader] for reader in graph.consumers[value]]
            made = -1 if maker is None else place[maker]
            origin = "before" if made < begin else "between" if leave < made < back else "here"
            found[value] = Tie(
                "static" if value in graph.static else origin,
                any(leave < reader < back for reader in readers),
                value in graph.outputs or any(reader > end for reader in readers),
                any(leave < writer < back for writer in places.writers.get(value, ())),
            )
    return found


def _look(op: Op) -> tuple[Hashable, ...]:
    """Without the signature: steps of a recurrent net read other slices of one value and differ in nothing else."""
    return op.target, op.phase, op.repeatable, op.random


def _cut(signs: npt.NDArray[np.int64]) -> int:
    """The last position with as few as possible +1 before it and -1 after it."""
    sums = np.concatenate([[0], np.cumsum(signs)])
    return int(len(sums) - 1 - np.argmin(sums[::-1]))


# -- the forward -----------------------------------------------------------------------------------------------------


def _edges(graph: TrainGraph, forward: Sequence[int]) -> list[int]:
    """Positions at which the forward is cut: its ends, those of every repeat, and what lies between cut alike."""
    size = len(forward)
    width = _widths(graph, forward)
    tandems = list(_tandems(graph, forward))
    edges: set[int] = set()
    periods: list[int] = []
    pieces, rest = [(0, size)], []
    while pieces:
        low, high = pieces.pop()
        inside = [(max(low, start), min(high, end), period) for start, end, period in tandems]
        inside = [(start, end, period) for start, end, period in inside if end - start >= 2 * period]
        start, end, period = max(
            inside, key=lambda run: ((run[1] - run[0]) // run[2] * run[2], -run[2]), default=(0, 0, 1)
        )
        if (end - start) * SMALLEST_SHARE < size or end <= start:
            rest.append((low, high))
            continue
        cuts = _turned(width, start, end, period)
        edges.update(cuts)
        periods += [period] * (len(cuts) - 1)
        pieces += [piece for piece in ((low, cuts[0]), (cuts[-1], high)) if piece[0] < piece[1]]
    typical = median_low(periods) if periods else size
    for low, high in rest:
        edges.update((low, high))
        count = max(1, round((high - low) / typical))
        for index in range(1, count):
            middle, reach = low + (high - low) * index // count, typical // 3
            near = range(max(low + 1, middle - reach), min(high - 1, middle + reach) + 1)
            edges.add(min(near, key=lambda cut: (width[cut], abs(cut - middle)), default=middle))
    return sorted(edges)


def _widths(graph: TrainGraph, forward: Sequence[int]) -> list[int]:
    """Per position the bytes that the forward carries across it; what no gradient reads counts twice."""
    place = {op: position for position, op in enumerate(forward)}
    steps = [0] * (len(forward) + 1)
    for position, op in enumerate(forward):
        for value in graph.ops[op].outputs:
            readers = graph.consumers[value]
            last = max((place[reader] for reader in readers if reader in place), default=position)
            weight = graph.values[value].nbytes * (1 if any(reader not in place for reader in readers) else 2)
            if last > position:
                steps[position + 1] += weight
                steps[last + 1] -= weight
    return list(accumulate(steps))


def _turned(width: Sequence[int], start: int, end: int, period: int) -> list[int]:
    """Cuts of a repeat, one period apart, turned to where the forward is narrow; at most one instance is given up."""
    most = (end - start) // period

    def cuts(turn: int) -> list[int]:
        return list(range(start + turn, end + 1, period))

    found = [cuts(turn) for turn in range(period) if len(cuts(turn)) - 1 >= max(2, most - 1)]
    means = [sum(width[cut] for cut in made) / len(made) for made in found]
    narrow = [made for made, mean in zip(found, means, strict=True) if mean <= 1.1 * min(means)]
    return max(narrow, key=len)


def _tandems(graph: TrainGraph, forward: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, end, period) of every longest stretch whose ops are alike one period apart."""
    look: dict[Hashable, int] = {}
    wire: dict[Hashable, int] = {}
    place = {op: position for position, op in enumerate(forward)}
    looks, wires = [], []
    for position, op in enumerate(map(graph.ops.__getitem__, forward)):
        sizes = tuple(graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
        looks.append(look.setdefault((*_look(op), len(op.inputs), sizes), len(look)))
        makers = [graph.producer[value] for value in op.inputs]
        away = tuple(-1 if maker is None else position - place.get(maker, 0) for maker in makers)
        wires.append(wire.setdefault(away, len(wire)))
    looked, wired, size = np.array(looks), np.array(wires), len(forward)
    for period in range(1, size // 2 + 1):
        same = looked[:-period] == looked[period:]
        if int(same.sum()) < period:
            continue
        for low, high in _stretches(same, period):
            close = wired[low:high] == wired[low + period : high + period]
            for at in np.flatnonzero(~close).tolist():
                close[at] = _shared(
                    graph, graph.ops[forward[low + at]], graph.ops[forward[low + at + period]], place, period
                )
            for first, last in _stretches(close, period):
                yield low + first, low + last + period, period
                if last - first + period >= 0.9 * size:
                    return  # longer periods are several of this one


def _stretches(flags: npt.NDArray[np.bool_], length: int) -> list[tuple[int, int]]:
    """(start, end) of every stretch of trues that is long enough."""
    steps = np.diff(np.concatenate([[0], flags.view(np.int8), [0]]))
    pairs = zip(np.flatnonzero(steps > 0).tolist(), np.flatnonzero(steps < 0).tolist(), strict=True)
    return [(low, high) for low, high in pairs if high - low >= length]


def _shared(graph: TrainGraph, one: Op, other: Op, place: dict[int, int], period: int) -> bool:
    """Whether two ops read, input by input, the same value or values made one period apart."""
    for mine, its in zip(one.inputs, other.inputs, strict=True):
        first, second = graph.producer[mine], graph.producer[its]
        if mine == its or (first is None and second is None):
            continue
        if first is None or second is None or place.get(second, 0) - place.get(first, 0) != period:
            return False
    return True


# -- the backward ----------------------------------------------------------------------------------------------------


def _backward_edges(graph: TrainGraph, forward: Sequence[int], edges: Sequence[int], rest: Sequence[int]) -> list[int]:
    """Per block the end of its backward in `rest`, and 0 after the last: block i's is from the next one's end to its own."""
    count = len(edges) - 1
    touched: dict[int, list[int]] = {}
    for index, (low, high) in enumerate(pairwise(edges)):
        for op in forward[low:high]:
            for value in (*graph.ops[op].inputs, *graph.ops[op].outputs):
                blocks = touched.setdefault(value, [])
                if not blocks or blocks[-1] != index:
                    blocks.append(index)
    inside = set(rest)
    level: dict[int, int] = {}
    for step in map(graph.ops.__getitem__, rest):
        makers = {graph.producer[value] for value in step.inputs}
        cap = min(
            (level.get(maker, count - 1) for maker in makers if maker in inside and maker is not None),
            default=count - 1,
        )
        # a value between two blocks counts for the later, whose gradients come first
        known = [touched[value] for value in step.inputs if value in touched]
        level[step.id] = min((own[at - 1] for own in known if (at := bisect_right(own, cap))), default=cap)
    counted = np.array([level[op] if graph.ops[op].phase is Phase.BACKWARD else -1 for op in rest], dtype=np.int64)
    ends = [len(rest)]
    for block in range(1, count):
        signs = np.where(counted < 0, 0, np.where(counted < block, 1, -1))
        ends.append(min(ends[-1], _cut(signs)))
    return [*ends, 0]
