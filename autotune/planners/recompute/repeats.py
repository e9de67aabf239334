"""Find repeated blocks: cut the step into a chain of forward pieces with their backward pieces, and group equal ones.

Repeats are tandem repeats of the forward's ops: the same operators with the same wiring, one period apart, such as a
transformer's layers or the bottlenecks of one stage. Names and layers are ignored.
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
"""Divisor of the forward's length: a repeat covers at least this part of it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Piece of the chain. Blocks of one kind are isomorphic, op for op in the order of these fields."""

    forward: tuple[int, ...]
    """Forward ops in running order."""
    backward: tuple[int, ...]
    """Ops of its gradients, and the updates that run among them."""
    kind: int


@dataclass(frozen=True, slots=True)
class ValueLink:
    """Relation of a piece's value to the ops outside of the piece."""

    origin: str
    """Producer of the value: `before` the piece, `inside`, in the gap `between` forward and backward, or `static`."""
    between: bool
    """True if it is read in the gap."""
    after: bool
    """True if it is read after the piece, or is an output of the step."""
    changed: bool
    """True if it is overwritten in the gap."""


def find_blocks(graph: TrainGraph, order: Sequence[int] | None = None) -> tuple[Block, ...]:
    """Return the chain of blocks of an order that runs every op once, by default the traced one.

    All forwards in turn, then all backwards from the last block to the first, are the order itself. Without repeats the
    chain is one block.
    """
    order = tuple(range(len(graph.ops)) if order is None else order)
    if not order:
        return ()
    turn = _cut_position(np.array([-1 if graph.ops[op].phase is Phase.FORWARD else 1 for op in order]))
    forward, rest = order[:turn], order[turn:]
    if not forward:
        return (Block((), rest, 0),)
    edges = _edges(graph, forward)
    ends = _backward_edges(graph, forward, edges, rest)
    positions = Positions.from_order(graph, order)
    kinds: dict[Hashable, int] = {}
    blocks: list[Block] = []
    for (low, high), (end, begin) in zip(pairwise(edges), pairwise(ends), strict=True):
        ahead, back = forward[low:high], rest[begin:end]
        kind = kinds.setdefault(canonical_form(graph, positions, ahead, back), len(kinds))
        blocks.append(Block(ahead, back, kind))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the ops in an order that runs each once."""

    by_op: tuple[int, ...]
    """Position of every op."""
    writers: Mapping[int, tuple[int, ...]]
    """Positions of the writers of each value that is written in place."""

    @classmethod
    def from_order(cls, graph: TrainGraph, order: Sequence[int]) -> Self:
        """Return the positions of an order that runs each op once."""
        by_op = [0] * len(order)
        writers: dict[int, tuple[int, ...]] = {}
        for position, op in enumerate(order):
            by_op[op] = position
            for value in graph.ops[op].writes:
                writers[value] = (*writers.get(value, ()), position)
        return cls(tuple(by_op), writers)


def canonical_form(
    graph: TrainGraph, positions: Positions, forward: Sequence[int], backward: Sequence[int]
) -> Hashable:
    """Return a key that is equal for isomorphic pieces: ops, bytes, inner wiring and links to the outside."""
    number: dict[int, int] = {}

    def renumber(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(number.setdefault(value, len(number)) for value in values)

    ops = tuple(
        (
            *_op_key(graph.ops[op]),
            renumber(graph.ops[op].inputs),
            renumber(graph.ops[op].outputs),
            renumber(graph.ops[op].writes),
        )
        for op in (*forward, *backward)
    )
    links = find_links(graph, positions, forward, backward)
    values = tuple((graph.values[value].nbytes, graph.values[value].role, links[value]) for value in number)
    return len(forward), ops, values


def find_links(
    graph: TrainGraph, positions: Positions, forward: Sequence[int], backward: Sequence[int]
) -> dict[int, ValueLink]:
    """Return the link of every value that a piece touches. A piece without backward has no readers after it."""
    place = positions.by_op
    begin, leave = place[forward[0]], place[forward[-1]]
    back, end = (place[backward[0]], place[backward[-1]]) if backward else (len(place), len(place))
    links: dict[int, ValueLink] = {}
    for op in map(graph.ops.__getitem__, (*forward, *backward)):
        for value in (*op.inputs, *op.outputs, *op.writes):
            if value in links:
                continue
            maker = graph.producer[value]
            readers = [place[reader] for reader in graph.consumers[value]]
            source = -1 if maker is None else place[maker]
            origin = "before" if source < begin else "between" if leave < source < back else "inside"
            links[value] = ValueLink(
                "static" if value in graph.static else origin,
                any(leave < reader < back for reader in readers),
                value in graph.outputs or any(reader > end for reader in readers),
                any(leave < writer < back for writer in positions.writers.get(value, ())),
            )
    return links


def _op_key(op: Op) -> tuple[Hashable, ...]:
    """Return what isomorphic ops share.

    The signature is left out: steps of a recurrent net read different slices of one value and are equal otherwise.
    """
    return op.target, op.phase, op.repeatable, op.random


def _cut_position(signs: npt.NDArray[np.int64]) -> int:
    """Return the last position with the fewest +1 before it and -1 after it."""
    sums = np.concatenate([[0], np.cumsum(signs)])
    return int(len(sums) - 1 - np.argmin(sums[::-1]))


# -- the forward -----------------------------------------------------------------------------------------------------


def _edges(graph: TrainGraph, forward: Sequence[int]) -> list[int]:
    """Return the cuts of the forward: its ends, those of every repeat, and cuts of similar size in between."""
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
        cuts = _best_cuts(width, start, end, period)
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
    """Return the bytes that the forward carries across each position; values without a gradient reader count twice."""
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


def _best_cuts(width: Sequence[int], start: int, end: int, period: int) -> list[int]:
    """Return the cuts of a repeat, one period apart, shifted to narrow positions; at most one instance is lost."""
    most = (end - start) // period

    def shifted_cuts(shift: int) -> list[int]:
        return list(range(start + shift, end + 1, period))

    candidates = [shifted_cuts(shift) for shift in range(period) if len(shifted_cuts(shift)) - 1 >= max(2, most - 1)]
    means = [sum(width[cut] for cut in cuts) / len(cuts) for cuts in candidates]
    narrow = [cuts for cuts, mean in zip(candidates, means, strict=True) if mean <= 1.1 * min(means)]
    return max(narrow, key=len)


def _tandems(graph: TrainGraph, forward: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, period) of every maximal range whose ops equal those one period later."""
    op_keys: dict[Hashable, int] = {}
    wirings: dict[Hashable, int] = {}
    place = {op: position for position, op in enumerate(forward)}
    op_ids, wiring_ids = [], []
    for position, op in enumerate(map(graph.ops.__getitem__, forward)):
        sizes = tuple(graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
        op_ids.append(op_keys.setdefault((*_op_key(op), len(op.inputs), sizes), len(op_keys)))
        makers = [graph.producer[value] for value in op.inputs]
        distances = tuple(-1 if maker is None else position - place.get(maker, 0) for maker in makers)
        wiring_ids.append(wirings.setdefault(distances, len(wirings)))
    keys, wired, size = np.array(op_ids), np.array(wiring_ids), len(forward)
    for period in range(1, size // 2 + 1):
        same = keys[:-period] == keys[period:]
        if int(same.sum()) < period:
            continue
        for low, high in _ranges(same, period):
            close = wired[low:high] == wired[low + period : high + period]
            for index in np.flatnonzero(~close).tolist():
                earlier, later = forward[low + index], forward[low + index + period]
                close[index] = _same_wiring(graph, graph.ops[earlier], graph.ops[later], place, period)
            for first, last in _ranges(close, period):
                yield low + first, low + last + period, period
                if last - first + period >= 0.9 * size:
                    return  # longer periods are several of this one


def _ranges(flags: npt.NDArray[np.bool_], length: int) -> list[tuple[int, int]]:
    """Return (start, end) of every range of true flags with at least this length."""
    steps = np.diff(np.concatenate([[0], flags.view(np.int8), [0]]))
    pairs = zip(np.flatnonzero(steps > 0).tolist(), np.flatnonzero(steps < 0).tolist(), strict=True)
    return [(low, high) for low, high in pairs if high - low >= length]


def _same_wiring(graph: TrainGraph, earlier: Op, later: Op, place: dict[int, int], period: int) -> bool:
    """Return true if two ops read, input by input, the same value or values produced one period apart."""
    for early_input, late_input in zip(earlier.inputs, later.inputs, strict=True):
        first, second = graph.producer[early_input], graph.producer[late_input]
        if early_input == late_input or (first is None and second is None):
            continue
        if first is None or second is None or place.get(second, 0) - place.get(first, 0) != period:
            return False
    return True


# -- the backward ----------------------------------------------------------------------------------------------------


def _backward_edges(graph: TrainGraph, forward: Sequence[int], edges: Sequence[int], rest: Sequence[int]) -> list[int]:
    """Return the end of each block's backward in `rest`, then 0: a block's backward starts at the next one's end."""
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
        # a value between two blocks counts for the later one, whose gradients run first
        touching = [touched[value] for value in step.inputs if value in touched]
        level[step.id] = min(
            (numbers[end - 1] for numbers in touching if (end := bisect_right(numbers, cap))), default=cap
        )
    counted = np.array([level[op] if graph.ops[op].phase is Phase.BACKWARD else -1 for op in rest], dtype=np.int64)
    ends = [len(rest)]
    for block in range(1, count):
        signs = np.where(counted < 0, 0, np.where(counted < block, 1, -1))
        ends.append(min(ends[-1], _cut_position(signs)))
    return [*ends, 0]
