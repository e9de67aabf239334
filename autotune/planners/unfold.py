"""A plan's runs as a graph of their own: whatever orders ops then orders runs, those that repeat included."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph, Value


def unfold(graph: TrainGraph, order: Sequence[int], costs: Costs) -> tuple[TrainGraph, Costs]:
    """A graph in which the i-th run is op `i` and makes values of its own, read by those that read that run."""
    values = [replace(graph.values[value], id=place) for place, value in enumerate(graph.inputs)]
    latest = {value: place for place, value in enumerate(graph.inputs)}
    ops: list[Op] = []
    for op in map(graph.ops.__getitem__, order):
        reads, writes, over = (tuple(latest[v] for v in named) for named in (op.inputs, op.writes, op.inplace))
        made = tuple(range(len(values), len(values) + len(op.outputs)))
        for value, place in zip(op.outputs, made, strict=True):
            old = graph.values[value]
            values.append(Value(place, old.name, old.nbytes, old.role))
            latest[value] = place
        ops.append(replace(op, id=len(ops), inputs=reads, outputs=made, writes=writes, inplace=over, given=None))
    outputs = tuple(latest[value] for value in graph.outputs)
    runs = TrainGraph(f"runs of {graph.name}", tuple(ops), tuple(values), tuple(range(len(graph.inputs))), outputs)
    seconds, scratch_bytes = tuple(costs.seconds[op] for op in order), tuple(costs.scratch_bytes[op] for op in order)
    return runs, replace(costs, seconds=seconds, scratch_bytes=scratch_bytes)


def fold(graph: TrainGraph, order: Sequence[int], runs: Iterable[int]) -> tuple[int, ...]:
    """The ops of `order` as an order of its unfolded graph has them, less the runs that nobody reads any more.

    Where two runs of an op have come to stand before one reader, it takes the later: the same bits.
    """
    return without_unread(graph, [order[run] for run in runs])


def without_unread(graph: TrainGraph, order: Sequence[int]) -> tuple[int, ...]:
    """The order less the runs that nobody reads; of each op one stays."""
    left = Counter(order)
    wanted = set(graph.outputs)
    kept: list[int] = []
    for op_id in reversed(order):
        op = graph.ops[op_id]
        if left[op_id] > 1 and wanted.isdisjoint(op.outputs):
            left[op_id] -= 1
            continue
        kept.append(op_id)
        wanted.difference_update(op.outputs)
        wanted.update(op.inputs)
    return tuple(reversed(kept))
