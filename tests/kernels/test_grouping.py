"""Groups of fusible ops: which ops may run as one, and at what cost in bytes."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.graph import Phase, TrainGraph
from autotune.kernels.grouping import group_ops
from autotune.testing.graphs import Builder, graphs


def fusible_ops(graph: TrainGraph, rng: random.Random) -> list[bool]:
    return [
        rng.random() < 0.7 and not op.random and not op.writes and op.repeatable and bool(op.outputs)
        for op in graph.ops
    ]


def has_cycle(graph: TrainGraph, groups: Sequence[Sequence[int]]) -> bool:
    """Remove groups whose predecessors are removed until none is left."""
    group_of = {op: ("group", number) for number, group in enumerate(groups) for op in group}
    units = {group_of.get(op.id, ("op", op.id)) for op in graph.ops}
    before = {
        unit: {group_of.get(p, ("op", p)) for op in graph.ops if group_of.get(op.id, ("op", op.id)) == unit
               for p in graph.predecessors[op.id]} - {unit}
        for unit in units
    }  # fmt: skip
    while ready := {unit for unit in units if not before[unit] & units}:
        units -= ready
    return bool(units)


@settings(max_examples=150)
@given(graphs(max_ops=16), st.randoms(use_true_random=False))
def test_each_fusible_op_is_in_one_group_of_one_phase_and_groups_can_be_ordered(graph: TrainGraph, rng: random.Random):
    fusible = fusible_ops(graph, rng)
    groups = group_ops(graph, fusible)
    assert sorted(op for group in groups for op in group) == [op.id for op in graph.ops if fusible[op.id]]
    assert all(len({graph.ops[op].phase for op in group}) == 1 for group in groups)
    assert not has_cycle(graph, groups)


def test_ops_with_an_unfusible_op_between_them_stay_apart():
    built = Builder()
    built.op("scale", [], [("a", 8)])
    built.op("matmul", ["a"], [("b", 8)])
    built.op("add", ["a", "b"], [("c", 8)])
    assert group_ops(built.graph("c"), [True, False, True]) == [[0], [2]]


def accumulation(nbytes: int) -> TrainGraph:
    """Gradients of three uses of one weight, added up as each exists."""
    built = Builder()
    built.value("x", 8)
    built.inputs.append(0)
    for step in range(3):
        built.op(f"matmul{step}", ["x"], [(f"g{step}", nbytes)], phase=Phase.BACKWARD)
        if step:
            built.op(f"add{step}", [f"s{step - 1}" if step > 1 else "g0", f"g{step}"], [(f"s{step}", nbytes)],
                     phase=Phase.BACKWARD)  # fmt: skip
    return built.graph("s2")


def test_additions_of_gradients_stay_apart_so_that_each_gradient_is_freed_early():
    graph = accumulation(100)
    assert group_ops(graph, [op.name.startswith("add") for op in graph.ops]) == [[2], [4]]


def test_two_readers_of_one_large_value_are_fused_and_of_a_small_one_are_not():
    for nbytes, expected in ((1 << 16, [[1, 2]]), (1 << 10, [[1], [2]])):
        built = Builder()
        built.op("matmul", [], [("x", nbytes)])
        built.op("sum", ["x"], [("a", 4)])
        built.op("scale", ["x"], [("b", nbytes)])
        assert group_ops(built.graph("a", "b"), [False, True, True]) == expected
