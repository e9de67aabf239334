import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.recompute.block_options import Piece, solve_options
from autotune.planners.recompute.blocks import Blocks, Chain, plan_by_chain
from autotune.planners.recompute.editable_order import EditableOrder
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.recompute.repeats import Positions, find_blocks
from autotune.planners.update.with_gradient import WithGradient
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import chain, random_graph, random_order, training_chain
from tests.planners import synthetic


def placed(graph: TrainGraph, costs: Costs) -> Plan:
    return WithGradient().plan(graph, Plan.traced(graph), 0, costs)


def gpt(layers: int) -> tuple[TrainGraph, Costs]:
    return synthetic.gpt(layers, 64, 4, 32, batch=4, vocabulary=64)


NETS = {
    "resnet": synthetic.resnet((2, 3, 1, 1), batch=4, side=64),
    "gpt": gpt(5),
    "lstm": synthetic.lstm(8, 64, 8, 64),
    "chain": (training_chain(12), Costs.unit(training_chain(12))),
}
SMALL = {
    "resnet": synthetic.resnet((3,), batch=2, side=32),
    "gpt": synthetic.gpt(3, 32, 2, 16, batch=2, vocabulary=32, dropout=False),
    "chain": NETS["chain"],
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("end", [True, False])
def test_what_stands_beside_a_block_is_the_same_at_each_of_its_ops(net: str, end: bool):
    graph, costs = NETS[net]
    plan = Plan.traced(graph) if end else placed(graph, costs)
    positions, bytes_ = Positions.from_order(graph, plan.order), EditableOrder(graph, plan.order, costs).bytes
    blocks = find_blocks(graph, plan.order)
    for block in blocks:
        piece = Piece.from_block(graph, positions, costs, (block.forward, block.backward))
        inside = piece.edit().bytes
        ahead = {int(bytes_[positions.by_op[op]] - inside[at]) for at, op in enumerate(block.forward, 1)}
        behind = {int(bytes_[positions.by_op[op]] - inside[at]) for at, op in enumerate(block.backward, piece.gap + 2)}
        assert len(ahead) <= 1
        assert len(behind) <= 1


@pytest.mark.parametrize("net", NETS)
def test_options_of_a_block_are_bought_with_seconds(net: str):
    graph, costs = NETS[net]
    plan = placed(graph, costs)
    positions, blocks = Positions.from_order(graph, plan.order), find_blocks(graph, plan.order)
    block = blocks[len(blocks) // 2]
    unchanged, *others = solve_options(Piece.from_block(graph, positions, costs, (block.forward, block.backward)), 1.5)
    assert unchanged.seconds == 0.0
    assert (unchanged.forward, unchanged.backward) == (block.forward, block.backward)
    for option in others:
        assert option.seconds > 0.0
        lower = [
            option.kept_bytes < unchanged.kept_bytes,
            option.forward_bytes < unchanged.forward_bytes,
            option.backward_bytes < unchanged.backward_bytes,
        ]
        assert any(lower)


@pytest.mark.parametrize("net", ["resnet", "gpt", "chain"])
@pytest.mark.parametrize("percent", [85, 70, 55])
def test_the_flattened_order_stays_within_the_budget_that_the_chain_was_chosen_for(net: str, percent: int):
    graph, costs = NETS[net]
    plan = placed(graph, costs)
    before = peak_bytes(graph, plan, costs)
    budget = graph.static_bytes + (before - graph.static_bytes) * percent // 100
    order = Chain(graph, plan.order, find_blocks(graph, plan.order), costs, 1.5).order(budget)
    assert order is not None
    assert len(order) > len(plan.order)
    check(graph, Plan(order))
    assert peak_bytes(graph, Plan(order), costs) <= budget


def test_a_deep_chain_is_run_again_in_groups_from_where_they_begin():
    """24 layers of 10 bytes: kept one by one they need 240; the last few of each group alone are kept."""
    graph = training_chain(24)
    costs = Costs.unit(graph)
    plan = placed(graph, costs)
    order = Chain(graph, plan.order, find_blocks(graph, plan.order), costs, 1.5).lowest()
    assert order is not None
    assert peak_bytes(graph, Plan(order), costs) - graph.static_bytes <= 130


@pytest.mark.parametrize(
    ("net", "percent"), [("resnet", 70), ("gpt", 80), ("gpt", 50), ("chain", 70), ("chain", 40), ("chain", 0)]
)
def test_at_one_budget_it_is_no_worse_than_the_greedy_of_the_whole(net: str, percent: int):
    graph, costs = SMALL[net]
    plan = placed(graph, costs)
    budget = graph.static_bytes + (peak_bytes(graph, plan, costs) - graph.static_bytes) * percent // 100
    ours, theirs = (
        EditableOrder(graph, planner.plan(graph, plan, budget, costs).order, costs)
        for planner in (Blocks(), GreedyEviction())
    )
    assert max(ours.peak, budget) <= max(theirs.peak, budget)
    if theirs.peak <= budget or ours.peak == theirs.peak:
        assert ours.seconds <= theirs.seconds


def test_without_repeats_it_answers_as_the_greedy_does():
    compared = 0
    for seed in range(40):
        rng = random.Random(seed)
        graph = random_graph(rng, 12)
        plan, costs = Plan.traced(graph), Costs.unit(graph)
        if len({block.kind for block in find_blocks(graph)}) == len(find_blocks(graph)):
            assert Blocks().plan(graph, plan, 0, costs) == GreedyEviction().plan(graph, plan, 0, costs)
            assert plan_by_chain(graph, plan, 0, costs, 1.5) == plan
            compared += 1
    assert compared > 5


def test_a_block_keeps_what_its_ops_may_overwrite():
    graph, costs = NETS["chain"]
    graph = replace(graph, ops=tuple(replace(op, inplace=op.inputs[-1:]) for op in graph.ops))
    positions = Positions.from_order(graph, Plan.traced(graph).order)
    for block in find_blocks(graph):
        piece = Piece.from_block(graph, positions, costs, (block.forward, block.backward))
        inner = [op for op in piece.graph.ops if op.inplace]
        assert [op.inplace for op in inner] == [op.inputs[-1:] for op in inner]
        assert len(inner) == sum(bool(graph.ops[op].inputs) for op in (*block.forward, *block.backward))
    check(graph, Blocks().plan(graph, placed(graph, costs), 0, costs))


def test_nothing_is_computed_again_where_nothing_is_gained():
    graph = chain(9)
    assert Blocks().plan(graph, Plan.traced(graph), 0, Costs.unit(graph)) == Plan.traced(graph)


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_any_order_of_any_chain_gets_a_valid_plan(rng: random.Random):
    graph = training_chain(rng.randint(2, 9), rng.choice([3, 40]), rng.choice([1, 50]))
    if rng.random() < 0.4:
        graph = random_graph(rng, 16)
    costs = Costs(tuple(rng.choice([0.0, 1.0, 3.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    plan = Plan(random_order(graph, rng) if rng.random() < 0.5 else Plan.traced(graph).order)
    before = peak_bytes(graph, plan, costs)
    limit = rng.randint(0, before)
    made = plan_by_chain(graph, plan, limit, costs, 1.5)
    check(graph, made)
    assert peak_bytes(graph, Blocks().plan(graph, plan, limit, costs), costs) <= before
