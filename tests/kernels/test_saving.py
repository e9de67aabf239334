"""The choice between saving a forward value and rebuilding it: against all choices of small graphs."""

import itertools
import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.ir.graph import Phase, TrainGraph
from autotune.kernels.saving import rebuilding_ops, rebuilt_values
from autotune.testing.graphs import graphs, training_chain


def saved_values(graph: TrainGraph, rebuilt: frozenset[int]) -> set[int]:
    """Forward values that the backward pass reads from memory, itself or to rebuild others."""
    forward = {value for op in graph.ops if op.phase is Phase.FORWARD for value in op.outputs}
    wanted = {value for op in graph.ops if op.phase is not Phase.FORWARD for value in op.inputs if value in forward}
    ops = rebuilding_ops(graph, rebuilt, wanted)
    return ({value for op in ops for value in graph.ops[op].inputs if value in forward} | wanted) - rebuilt


def nbytes_of(graph: TrainGraph, values: set[int]) -> int:
    return sum(max(1, graph.values[value].nbytes) for value in values)


@settings(max_examples=100)
@given(graphs(max_ops=10), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_no_other_choice_costs_less_in_saved_bytes_and_rebuilding(graph: TrainGraph, rng: random.Random, price: float):
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    fusible = [op in forward and not op.random and not op.writes and rng.random() < 0.8 for op in graph.ops]
    saved = {value for op in graph.ops if op.phase is Phase.UPDATE for value in op.inputs}
    candidates = [value for op in forward if fusible[op.id] for value in op.outputs if value not in saved]
    assume(0 < len(candidates) <= 8)
    chosen = rebuilt_values(graph, fusible, price)

    def cost(rebuilt: frozenset[int]) -> int:
        ops = {graph.ops[graph.producer[value] or 0] for value in rebuilt}
        touched = [sum(graph.values[value].nbytes for value in (*op.inputs, *op.outputs)) for op in ops]
        return nbytes_of(graph, saved_values(graph, rebuilt)) + sum(round(price * nbytes) for nbytes in touched)

    assert saved.isdisjoint(chosen), "an earlier update may have changed what they are computed from"
    assert all(fusible[graph.producer[value] or 0] for value in chosen)
    best = min(
        cost(frozenset(choice))
        for count in range(len(candidates) + 1)
        for choice in itertools.combinations(candidates, count)
    )
    assert cost(chosen) == best


def test_a_price_saves_values_that_are_dear_to_rebuild():
    graph = training_chain(3)
    fusible = [op.phase is Phase.FORWARD for op in graph.ops]
    free, dear = rebuilt_values(graph, fusible), rebuilt_values(graph, fusible, rebuild_price=10.0)
    assert free
    assert not dear
