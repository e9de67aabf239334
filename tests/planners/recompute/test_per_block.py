from dataclasses import replace
from itertools import pairwise

import pytest

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.recompute.per_block import PerBlock, group_by_block
from autotune.planners.update.with_gradient import WithGradient
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, training_chain


def stacked(layers: int, name: str = "encoder.layer.{}") -> TrainGraph:
    """A stem, `layers` blocks of three ops each that keep everything for their gradients, and a loss."""
    built = Builder("stacked")
    built.op("stem", [], [("x0", 10)], layer="stem")
    for i in range(layers):
        layer = name.format(i)
        built.op(f"a{i}", [f"x{i}"], [(f"a{i}", 10)], layer=f"{layer}.attention")
        built.op(f"b{i}", [f"a{i}"], [(f"b{i}", 40)], layer=f"{layer}.mlp")
        built.op(f"x{i + 1}", [f"b{i}"], [(f"x{i + 1}", 10)], layer=layer)
    built.op("loss", [f"x{layers}"], [("loss", 1)], layer="loss")
    grad = "loss"
    for i in reversed(range(layers)):
        back = {"phase": Phase.BACKWARD, "layer": name.format(i)}
        built.op(f"dx{i}", [f"b{i}", grad], [(f"gb{i}", 10)], **back)
        built.op(f"db{i}", [f"a{i}", f"gb{i}"], [(f"ga{i}", 10)], **back)
        built.op(f"da{i}", [f"x{i}", f"ga{i}"], [(f"g{i}", 10)], **back)
        grad = f"g{i}"
    return built.graph("loss", grad)


def names(graph: TrainGraph, plan: Plan) -> list[str]:
    return [graph.ops[op].name for op in plan.order]


def test_each_block_runs_again_up_to_what_its_gradients_need_just_before_them():
    graph = stacked(2)
    made = PerBlock().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    check(graph, made)
    first = ["stem", "a0", "b0", "x1", "a1", "b1", "x2", "loss"]
    assert names(graph, made) == [*first, "a1", "b1", "dx1", "db1", "da1", "a0", "b0", "dx0", "db0", "da0"]


def test_what_is_kept_grows_by_one_entrance_for_one_block_more():
    peaks = []
    for layers in (4, 5, 6):
        graph = stacked(layers)
        costs = Costs.unit(graph)
        peaks.append(peak_bytes(graph, PerBlock().plan(graph, Plan.traced(graph), 0, costs), costs))
    assert [later - earlier for earlier, later in pairwise(peaks)] == [10, 10]


@pytest.mark.parametrize("name", ["stem{}", "encoder.layer", "only.0.part{}"])
def test_a_step_without_numbered_blocks_that_have_sisters_stays_as_it_is(name: str):
    graph = stacked(3, name)
    assert PerBlock().plan(graph, Plan.traced(graph), 0, Costs.unit(graph)) == Plan.traced(graph)


def test_nested_numbers_are_nested_blocks_and_the_lowest_peak_decides_between_them():
    graph = stacked(4)
    ops = [graph.ops[op] for found in group_by_block(graph, Plan.traced(graph).order, 1).values() for op in found]
    assert len(group_by_block(graph, Plan.traced(graph).order, 1)) == 4
    assert {op.phase for op in ops} == {Phase.FORWARD}
    assert group_by_block(graph, Plan.traced(graph).order, 2) == {}
    costs = Costs.unit(graph)
    lowest = peak_bytes(graph, PerBlock().plan(graph, Plan.traced(graph), 0, costs), costs)
    assert lowest == peak_bytes(graph, PerBlock(1).plan(graph, Plan.traced(graph), 0, costs), costs)
    assert PerBlock(2).plan(graph, Plan.traced(graph), 0, costs) == Plan.traced(graph)


def test_no_block_runs_again_after_its_weight_was_updated():
    graph = training_chain(6)
    named = replace(graph, ops=tuple(replace(op, layer=op.layer.replace("block", "layers.")) for op in graph.ops))
    costs = Costs.unit(named)
    placed = WithGradient().plan(named, Plan.traced(named), 0, costs)
    made = PerBlock().plan(named, placed, 0, costs)
    check(named, made)
    updated: set[int] = set()
    for op in map(named.ops.__getitem__, made.order):
        if op.phase is Phase.FORWARD:
            assert updated.isdisjoint(op.inputs)
        updated.update(op.writes)


@pytest.mark.parametrize("layers", [3, 6, 12])
def test_the_search_is_no_dearer_at_the_peak_of_blocks(layers: int):
    graph = stacked(layers)
    costs = Costs(tuple(1.0 + op.id % 5 for op in graph.ops), (0,) * len(graph.ops))
    theirs = PerBlock().plan(graph, Plan.traced(graph), 0, costs)
    budget = peak_bytes(graph, theirs, costs)
    ours = GreedyEviction().plan(graph, Plan.traced(graph), budget, costs)
    assert peak_bytes(graph, ours, costs) <= budget
    assert sum(costs.seconds[op] for op in ours.order) <= sum(costs.seconds[op] for op in theirs.order)
