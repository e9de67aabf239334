"""Turn a plan's runs into a graph of their own, so that order planners can also place repeated runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.ir.costs import Costs
from autotune.ir.graph import Op, TrainGraph, Value


def unfold(graph: TrainGraph, order: Sequence[int], costs: Costs) -> tuple[TrainGraph, Costs]:
    """Return a graph in which the i-th run of `order` is op `i`, and its costs.

    Every run makes values of its own; a reader in the new graph reads those of the run that it reads in `order`.
    """
    values = [replace(graph.values[value], id=index) for index, value in enumerate(graph.inputs)]
    latest = {value: index for index, value in enumerate(graph.inputs)}
    ops: list[Op] = []
    for op in map(graph.ops.__getitem__, order):
        reads, writes, overwrites = (tuple(latest[v] for v in ids) for ids in (op.inputs, op.writes, op.inplace))
        outputs = tuple(range(len(values), len(values) + len(op.outputs)))
        for value, index in zip(op.outputs, outputs, strict=True):
            old = graph.values[value]
            values.append(Value(index, old.name, old.nbytes, old.role))
            latest[value] = index
        ops.append(
            replace(op, id=len(ops), inputs=reads, outputs=outputs, writes=writes, inplace=overwrites, alias_of=None)
        )
    kept = tuple(latest[value] for value in graph.outputs)
    runs = TrainGraph(f"runs of {graph.name}", tuple(ops), tuple(values), tuple(range(len(graph.inputs))), kept)
    seconds, scratch_bytes = tuple(costs.seconds[op] for op in order), tuple(costs.scratch_bytes[op] for op in order)
    return runs, replace(costs, seconds=seconds, scratch_bytes=scratch_bytes)


def fold(graph: TrainGraph, order: Sequence[int], runs: Iterable[int]) -> tuple[int, ...]:
    """Return the ops of `order` in the sequence of `runs`, an order of its unfolded graph, without unread runs.

    If two runs of an op come to precede one reader, the reader takes the later one: their results are bit-identical.
    """
    return drop_unread_runs(graph, [order[run] for run in runs])


def drop_unread_runs(graph: TrainGraph, order: Sequence[int]) -> tuple[int, ...]:
    """Return the order without runs whose results nobody reads; the last run of each op stays."""
    remaining = Counter(order)
    needed = set(graph.outputs)
    kept: list[int] = []
    for op_id in reversed(order):
        op = graph.ops[op_id]
        if remaining[op_id] > 1 and needed.isdisjoint(op.outputs):
            remaining[op_id] -= 1
            continue
        kept.append(op_id)
        needed.difference_update(op.outputs)
        needed.update(op.inputs)
    return tuple(reversed(kept))
