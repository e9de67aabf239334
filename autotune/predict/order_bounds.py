"""Lower bounds of the peak over all orders of a graph's ops, each run once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.predict.bounds import peak_lower_bound, shared_bytes
from autotune.predict.min_cut import UNCUTTABLE, Network
from autotune.predict.ordering import Ordering, ordering_problem
from autotune.predict.reachability import blocks, reachable_sets, sum_sets

LARGEST = 20_000
"""Maximum number of ops for bounds that inspect each op's ancestors; the sets take 50 MB then."""


def order_lower_bound(graph: TrainGraph, costs: Costs, *, inplace: bool = False) -> tuple[int, int]:
    """Return (bytes, op): no order of the ops peaks lower, and this op requires it.

    While an op runs, every value is live that is created before it and read after it in every order. With `inplace`,
    an input that the op's output may reuse is not counted. The bound of all plans (`peak_lower_bound`) holds too.

    Plans that recompute or offload may peak lower.
    """
    if not graph.ops:
        return graph.static_bytes, -1
    needs = required_bytes(ordering_problem(graph, costs))
    if inplace:
        reads = (frozenset(op.inputs) - graph.static for op in graph.ops)
        shared = (shared_bytes(graph, op, free, costs.scratch_bytes) for op, free in zip(graph.ops, reads, strict=True))
        needs -= np.fromiter(shared, dtype=np.int64)
    worst = int(needs.argmax())
    every, op = peak_lower_bound(graph, replace(costs, stores={}))
    return (every, op) if every > needs[worst] else (int(needs[worst]), worst)


def required_bytes(problem: Ordering) -> npt.NDArray[np.int64]:
    """Return per op the bytes that are live while it runs, whatever the order."""
    parts = [_required_bytes(problem, first, end) for first, end in blocks(len(problem.before))]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _required_bytes(problem: Ordering, first: int, end: int) -> npt.NDArray[np.int64]:
    """Return `required_bytes` for the block of ops from `first` to before `end`."""
    every = (1 << (end - first)) - 1
    ops = range(len(problem.before))
    earlier = reachable_sets(problem.before, ops, first, end)
    later = reachable_sets(problem.after, reversed(ops), first, end)
    rows, sizes, throughout = [], [], problem.base
    for value, ends in enumerate(problem.ends):
        begun = every if value in problem.live_at_start else 0
        needed = every if value in problem.live_at_end else 0
        for op in ends:
            begun |= later[op]
            needed |= earlier[op]
        live = begun & needed
        if live == every:
            throughout += problem.nbytes[value]
        elif live:
            rows.append(live)
            sizes.append(problem.nbytes[value])
    scratch = np.array(problem.scratch[first:end], dtype=np.int64)
    return scratch + throughout + sum_sets(rows, sizes, end - first)


def least_live_set(problem: Ordering, ran: int, barred: int) -> int:
    """Return the set of completed ops, with all of `ran` and none of `barred`, after which the fewest bytes are live.

    Of several such sets the largest is returned. Sets are integers with one bit for each op. The problem must be seen
    from its start: values have one producer, which runs before their readers.
    """
    network = Network()
    count = len(problem.before)
    undecided = [op for op in range(count) if not (ran | barred) >> op & 1]
    node = {op: network.add_node() for op in undecided}

    def side(op: int) -> int:
        return node.get(op, ran >> op & 1 ^ 1)

    for op in undecided:
        for earlier in problem.before[op]:
            if earlier in node:
                network.add_edge(node[op], node[earlier], UNCUTTABLE)
    for value in dict.fromkeys(value for op in undecided for value in problem.touches[op]):
        first, *rest = map(side, problem.ends[value])
        if value in problem.live_at_start:
            first, rest = 0, [first, *rest]
        if value in problem.live_at_end or 1 in rest:
            rest = [1]
        rest = [other for other in rest if other > 0]  # completed readers no longer need the value
        if first == 1 or not rest:
            continue
        if len(rest) == 1:
            network.add_edge(first, rest[0], problem.nbytes[value])
            continue
        live = network.add_node()
        network.add_edge(first, live, problem.nbytes[value])
        for other in rest:
            network.add_edge(live, other, UNCUTTABLE)
    sides = network.min_cut()
    return ran | sum(1 << op for op in undecided if sides[node[op]])


def live_bytes(problem: Ordering, ran: int) -> int:
    """Return the bytes that are live once a set of ops ran."""
    live = problem.base
    for value, ends in enumerate(problem.ends):
        begun = value in problem.live_at_start or any(ran >> op & 1 for op in ends)
        needed = value in problem.live_at_end or not all(ran >> op & 1 for op in ends)
        live += problem.nbytes[value] if begun and needed else 0
    return live


def improve_required_bytes(problem: Ordering, order: Sequence[int], effort: int) -> int:
    """Return a lower bound of the peak of all orders, tried at the ops where this order needs most.

    The bound counts the values of `required_bytes`, and those of which one or another must be live. `effort` limits the
    number of ops that are decided; each op tried decides some and scans all. The problem must be seen from its start,
    as in `least_live_set`.
    """
    count = len(problem.before)
    if count > LARGEST:
        return 0
    earlier = reachable_sets(problem.before, range(count), 0, count)
    later = reachable_sets(problem.after, reversed(range(count)), 0, count)
    profile = problem.profile(order)
    bound = 0
    for position in sorted(range(count), key=lambda position: -profile[position]):
        op = order[position]
        if effort <= 0 or profile[position] <= bound:
            break  # no op's bound exceeds the bytes of this order there
        ran, barred = earlier[op] & ~(1 << op), later[op]
        effort -= count - ran.bit_count() - barred.bit_count() + 1 + count // 64
        live = live_bytes(problem, least_live_set(problem, ran, barred))
        outputs = (
            value
            for value in problem.touches[op]
            if problem.ends[value][0] == op and value not in problem.live_at_start
        )
        bound = max(bound, live + sum(problem.nbytes[value] for value in outputs) + problem.scratch[op])
    return bound
