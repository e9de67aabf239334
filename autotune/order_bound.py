"""What no order of a graph's ops can do better than, as long as each runs once."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.min_cut import FREE, Network
from autotune.ordering import Ordering, ordering

BLOCK = 4096
"""Ops looked at together: bounds the memory that the bound itself takes."""
LARGEST = 20_000
"""Ops of a problem whose sets are looked at one by one; a set of each op's ancestors takes 50 MB then."""


def order_lower_bound(graph: TrainGraph, costs: Costs) -> tuple[int, int]:
    """(bytes, op): while an op runs, all that is made before it in every order and read after it in every order lives.

    Plans that compute something again may go below.
    """
    if not graph.ops:
        return graph.static_bytes, -1
    needs = must_live(ordering(graph, costs))
    worst = int(needs.argmax())
    return int(needs[worst]), worst


def must_live(problem: Ordering) -> npt.NDArray[np.int64]:
    """Per op the bytes that live while it runs, whatever the order."""
    count = len(problem.before)
    blocks = [_must_live(problem, first, min(first + BLOCK, count)) for first in range(0, count, BLOCK)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])


def _must_live(problem: Ordering, first: int, last: int) -> npt.NDArray[np.int64]:
    """For the ops from `first` on before `last`. Sets of them are whole numbers, a bit for each op."""
    every = (1 << (last - first)) - 1
    ops = range(len(problem.before))
    earlier, later = _reach(problem.before, ops, first, last), _reach(problem.after, reversed(ops), first, last)
    width = (last - first + 7) // 8
    rows, kept, throughout = bytearray(), [], problem.base
    for value, ends in enumerate(problem.ends):
        begun = every if value in problem.stands else 0
        needed = every if value in problem.stays else 0
        for op in ends:
            begun |= later[op]
            needed |= earlier[op]
        lives = begun & needed
        if lives == every:
            throughout += problem.nbytes[value]
        elif lives:
            rows += lives.to_bytes(width, "little")
            kept.append(problem.nbytes[value])
    sets = np.frombuffer(rows, dtype=np.uint8).reshape(len(kept), width)
    # sums of bytes stay exact in a double below 2^53, and a double's product is many times faster than an integer's
    sizes = np.array(kept, dtype=np.float64)
    total = np.zeros(last - first)
    for row in range(0, len(sets), 512):
        bits = np.unpackbits(sets[row : row + 512], axis=1, bitorder="little")[:, : last - first]
        total += sizes[row : row + 512] @ bits
    own = np.array(problem.scratch[first:last], dtype=np.int64) + throughout
    return own + total.astype(np.int64)


def _reach(steps: list[list[int]], ops: Iterable[int], first: int, last: int) -> list[int]:
    """Per op the set of it and all that `steps` lead to, of those from `first` on before `last`; `ops`: those led to first."""
    reached = [0] * len(steps)
    for op in ops:
        found = 1 << (op - first) if first <= op < last else 0
        for other in steps[op]:
            found |= reached[other]
        reached[op] = found
    return reached


def least_live(problem: Ordering, ran: int, barred: int) -> int:
    """Of the sets of ops that may have run, with all of `ran` and none of `barred`, the largest with the fewest bytes
    live after it. Sets are whole numbers, a bit for each op.

    For a problem seen from its start: values are made by one op, which runs before their readers.
    """
    network = Network()
    count = len(problem.before)
    undecided = [op for op in range(count) if not (ran | barred) >> op & 1]
    node = {op: network.node() for op in undecided}

    def side(op: int) -> int:
        return node.get(op, ran >> op & 1 ^ 1)

    for op in undecided:
        for earlier in problem.before[op]:
            if earlier in node:
                network.edge(node[op], node[earlier], FREE)
    for value in dict.fromkeys(value for op in undecided for value in problem.touches[op]):
        first, *rest = map(side, problem.ends[value])
        if value in problem.stands:
            first, rest = 0, [first, *rest]
        if value in problem.stays or 1 in rest:
            rest = [1]
        rest = [other for other in rest if other > 0]  # those that have run need it no more
        if first == 1 or not rest:
            continue
        if len(rest) == 1:
            network.edge(first, rest[0], problem.nbytes[value])
            continue
        held = network.node()
        network.edge(first, held, problem.nbytes[value])
        for other in rest:
            network.edge(held, other, FREE)
    sides = network.cut()
    return ran | sum(1 << op for op in undecided if sides[node[op]])


def live_bytes(problem: Ordering, ran: int) -> int:
    """Bytes that stand once a set of ops ran."""
    live = problem.base
    for value, ends in enumerate(problem.ends):
        begun = value in problem.stands or any(ran >> op & 1 for op in ends)
        needed = value in problem.stays or not all(ran >> op & 1 for op in ends)
        live += problem.nbytes[value] if begun and needed else 0
    return live


def must_live_near(problem: Ordering, order: Sequence[int], effort: int) -> int:
    """Bytes that no order avoids at some of the ops where this one has most: `must_live`, and what must live in place of
    something else. `effort`: places of ops that may be decided, each op asked decides some.

    For a problem seen from its start, as `least_live` is.
    """
    count = len(problem.before)
    if count > LARGEST:
        return 0
    earlier = _reach(problem.before, range(count), 0, count)
    later = _reach(problem.after, reversed(range(count)), 0, count)
    profile = problem.profile(order)
    found = 0
    for place in sorted(range(count), key=lambda place: -profile[place]):
        op = order[place]
        if effort <= 0 or profile[place] <= found:
            break  # no bound of an op is above what the order takes there
        ran, barred = earlier[op] & ~(1 << op), later[op]
        effort -= count - ran.bit_count() - barred.bit_count() + 1
        live = live_bytes(problem, least_live(problem, ran, barred))
        makes = (value for value in problem.touches[op] if problem.ends[value][0] == op and value not in problem.stands)
        found = max(found, live + sum(problem.nbytes[value] for value in makes) + problem.scratch[op])
    return found
