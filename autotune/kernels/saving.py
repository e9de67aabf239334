"""Choose the forward values that a step saves for its backward pass; regions of the backward pass rebuild the others."""

from collections.abc import Iterable, Sequence

from autotune.ir.graph import Phase, TrainGraph
from autotune.predict.min_cut import UNCUTTABLE, Network

_SOURCE, _SINK = 0, 1


def rebuilt_values(graph: TrainGraph, fusible: Sequence[bool], rebuild_price: float = 0.0) -> frozenset[int]:
    """Return the forward values that the backward pass computes again, so that the bytes saved between both are fewest.

    The choice is a minimum cut between the values that no op can rebuild and those that the backward pass reads. Inside a
    region a rebuilt value never reaches memory. What an update or a commit reads is saved: an earlier one may have changed
    a weight or a buffer from which the value would be rebuilt.

    Args:
        graph: The step.
        fusible: True for each op that may be part of a region; only these rebuild values.
        rebuild_price: Bytes that may be saved in addition, for each byte that a rebuilding op reads or writes.

    >>> from autotune.testing.graphs import training_chain
    >>> graph = training_chain(2)
    >>> rebuilt = rebuilt_values(graph, [op.name.startswith("fwd1") for op in graph.ops])
    >>> [graph.values[value].name for value in rebuilt]
    ['h1']
    """
    network = Network()
    entry: dict[int, int] = {}
    leave: dict[int, int] = {}
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    for op in forward:
        for value in op.outputs:
            entry[value], leave[value] = network.add_node(), network.add_node()
            network.add_edge(entry[value], leave[value], max(1, graph.values[value].nbytes))
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            for value in op.inputs:
                if value in leave:
                    network.add_edge(leave[value], _SINK, UNCUTTABLE)
                    if op.phase is Phase.UPDATE:  # an earlier update may have changed what a rebuilding op would read
                        network.add_edge(_SOURCE, entry[value], UNCUTTABLE)
    for op in forward:
        touched = sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs))
        cost = round(rebuild_price * touched) if fusible[op.id] else UNCUTTABLE
        node = network.add_node()  # an op is paid for once, however many of its outputs are rebuilt
        if cost:
            network.add_edge(_SOURCE, node, cost)
        for value in op.outputs:
            network.add_edge(node, entry[value], UNCUTTABLE)
        if fusible[op.id]:
            for source in op.inputs:
                if source in leave:
                    network.add_edge(leave[source], node, UNCUTTABLE)
    on_source_side = network.min_cut()
    return frozenset(value for value, node in entry.items() if not on_source_side[node])


def rebuilding_ops(graph: TrainGraph, rebuilt: frozenset[int], wanted: Iterable[int]) -> list[int]:
    """Return the ops that rebuild those of the wanted values that are not saved, in traced order."""
    needed: set[int] = set()
    unresolved = list(wanted)
    while unresolved:
        value = unresolved.pop()
        producer = graph.producer[value]
        if value in rebuilt and producer is not None and producer not in needed:
            needed.add(producer)
            unresolved += graph.ops[producer].inputs
    return sorted(needed)
