"""What no order of a graph's ops can do better than, as long as each runs once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.predict.bounds import peak_lower_bound, shared_bytes
from autotune.predict.min_cut import FREE, Network
from autotune.predict.ordering import Ordering, ordering
from autotune.predict.reachability import blocks, reach, sums

LARGEST = 20_000
"""Ops of a problem whose sets are looked at one by one; a set of each op's ancestors takes 50 MB then."""


def order_lower_bound(graph: TrainGraph, costs: Costs, *, inplace: bool = False) -> tuple[int, int]:
    """(bytes, op): while an op runs, all that is made before it in every order and read after it in every order lives;
    with `inplace` all but what its result may be made in. Nor does an order go below what holds for every plan.

    Plans that compute something again, or move it to a store, may go below.
    """
    if not graph.ops:
        return graph.static_bytes, -1
    needs = must_live(ordering(graph, costs))
    if inplace:
        reads = (frozenset(op.inputs) - graph.static for op in graph.ops)
        shared = (shared_bytes(graph, op, free, costs.scratch_bytes) for op, free in zip(graph.ops, reads, strict=True))
        needs -= np.fromiter(shared, dtype=np.int64)
    worst = int(needs.argmax())
    every, op = peak_lower_bound(graph, replace(costs, stores={}))
    return (every, op) if every > needs[worst] else (int(needs[worst]), worst)


def must_live(problem: Ordering) -> npt.NDArray[np.int64]:
    """Per op the bytes that live while it runs, whatever the order."""
    found = [_must_live(problem, first, end) for first, end in blocks(len(problem.before))]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _must_live(problem: Ordering, first: int, end: int) -> npt.NDArray[np.int64]:
    """For the ops from `first` on before `end`."""
    every = (1 << (end - first)) - 1
    ops = range(len(problem.before))
    earlier, later = reach(problem.before, ops, first, end), reach(problem.after, reversed(ops), first, end)
    rows, kept, throughout = [], [], problem.base
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
            rows.append(lives)
            kept.append(problem.nbytes[value])
    own = np.array(problem.scratch[first:end], dtype=np.int64) + throughout
    return own + sums(rows, kept, end - first)


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
    something else. `effort`: places of ops that may be decided; each op asked decides some, and looks at all.

    For a problem seen from its start, as `least_live` is.
    """
    count = len(problem.before)
    if count > LARGEST:
        return 0
    earlier = reach(problem.before, range(count), 0, count)
    later = reach(problem.after, reversed(range(count)), 0, count)
    profile = problem.profile(order)
    found = 0
    for place in sorted(range(count), key=lambda place: -profile[place]):
        op = order[place]
        if effort <= 0 or profile[place] <= found:
            break  # no bound of an op is above what the order takes there
        ran, barred = earlier[op] & ~(1 << op), later[op]
        effort -= count - ran.bit_count() - barred.bit_count() + 1 + count // 64
        live = live_bytes(problem, least_live(problem, ran, barred))
        makes = (value for value in problem.touches[op] if problem.ends[value][0] == op and value not in problem.stands)
        found = max(found, live + sum(problem.nbytes[value] for value in makes) + problem.scratch[op])
    return found
