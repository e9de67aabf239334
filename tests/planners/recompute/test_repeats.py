import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.recompute.repeats import Block, find_blocks
from autotune.planners.update.with_gradient import WithGradient
from autotune.testing.graphs import Builder, chain, random_graph, random_order, training_chain
from autotune.workloads.zoo import ZOO
from tests.planners import synthetic
from tests.workloads.zoo.tiny import TINY


def most_alike(blocks: tuple[Block, ...]) -> int:
    return max(Counter(block.kind for block in blocks).values())


def early(graph: TrainGraph) -> tuple[int, ...]:
    return WithGradient().plan(graph, Plan.traced(graph), 0, Costs.unit(graph)).order


def test_layers_of_a_chain_are_one_kind_each_with_its_gradient_and_its_update():
    graph = training_chain(8)
    blocks = find_blocks(graph, early(graph))
    names = [[graph.ops[op].name for op in (*block.forward, *block.backward)] for block in blocks]
    assert ["fwd4", "dx4", "dw4", "update4"] in names
    assert most_alike(blocks) == 7


def test_a_layer_of_another_size_is_a_kind_of_its_own():
    built = Builder()
    built.value("x", 4, Role.BATCH)
    last = "x"
    for layer in range(9):
        size = 30 if layer == 4 else 20
        built.op(f"widen{layer}", [last], [(f"a{layer}", size)])
        built.op(f"squeeze{layer}", [f"a{layer}"], [(f"b{layer}", 4)])
        last = f"b{layer}"
    blocks = find_blocks(built.graph(last))
    (odd,) = [
        block for block in blocks if built.ids["a4"] in [v for op in block.forward for v in built.ops[op].outputs]
    ]
    assert [block.kind for block in blocks].count(odd.kind) == 1
    assert most_alike(blocks) >= 3


def test_ops_alike_but_wired_otherwise_are_no_repeat():
    """Every second layer adds what went into it, the others what its first op made: two layers are one period."""
    built = Builder()
    built.value("x", 4, Role.BATCH)
    last = "x"
    for layer in range(12):
        built.op(f"a{layer}", [last], [(f"p{layer}", 4)])
        built.op(f"b{layer}", [f"p{layer}"], [(f"q{layer}", 4)])
        built.op(f"add{layer}", [f"q{layer}", last if layer % 2 else f"p{layer}"], [(f"r{layer}", 4)])
        last = f"r{layer}"
    blocks = find_blocks(built.graph(last))
    assert [len(block.forward) for block in blocks] == [6] * 6
    assert most_alike(blocks) == 4  # the first reads the batch, nobody reads the last


def test_a_mask_that_all_layers_read_hides_no_repeat():
    built = Builder()
    built.value("x", 4, Role.BATCH)
    built.op("mask", ["x"], [("mask", 9)])
    last = "x"
    for layer in range(5):
        built.op(f"score{layer}", [last], [(f"s{layer}", 9)])
        built.op(f"masked{layer}", [f"s{layer}", "mask"], [(f"m{layer}", 9)])
        built.op(f"mix{layer}", [f"m{layer}"], [(f"h{layer}", 4)])
        last = f"h{layer}"
    blocks = find_blocks(built.graph(last))
    assert len(blocks) == 5
    assert most_alike(blocks) == 3  # the first holds the mask's op, nobody reads the last


def test_the_bottlenecks_of_a_stage_are_one_kind_and_its_first_another():
    graph, _ = synthetic.resnet((3, 4, 6, 3), batch=2, side=64)
    counts = Counter(block.kind for block in find_blocks(graph, early(graph)))
    assert sorted(counts.values(), reverse=True)[:4] == [5, 3, 2, 2]


@pytest.mark.parametrize("dropout", [True, False])
def test_every_layer_of_a_decoder_is_cut_at_the_residual_stream(dropout: bool):
    graph, _ = synthetic.gpt(6, 32, 2, 16, batch=2, vocabulary=32, dropout=dropout)
    blocks = find_blocks(graph, early(graph))
    assert most_alike(blocks) == 6
    kind = Counter(block.kind for block in blocks).most_common(1)[0][0]
    assert {graph.ops[block.forward[-1]].target for block in blocks if block.kind == kind} == {"add"}


@pytest.mark.parametrize(
    ("name", "arguments", "least"),
    [
        ("gpt2", {"depth": 5}, 3),
        pytest.param("resnet50", {"depth": 3}, 2, marks=pytest.mark.slow),
        ("lstm", {"tokens": 6}, 3),
    ],
)
def test_repeats_are_found_in_captured_models(name: str, arguments: dict[str, int], least: int):
    graph = capture(ZOO[name](**{**TINY[name], **arguments}), name).graph
    assert most_alike(find_blocks(graph, early(graph))) >= least


def test_a_graph_without_repeats_is_one_block():
    built = Builder()
    for index in range(6):
        built.op(f"{'abcdef'[index]}", [f"v{index - 1}"] if index else [], [(f"v{index}", 1 + index)])
    assert len(find_blocks(built.graph("v5"))) == 1
    assert find_blocks(TrainGraph("empty", (), (), (), ())) == ()
    assert most_alike(find_blocks(chain(8))) == 6


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_forwards_and_then_backwards_from_the_last_are_the_order_and_a_kind_has_one_look(rng: random.Random):
    graph = training_chain(rng.randint(1, 7)) if rng.random() < 0.3 else random_graph(rng, 24)
    order = random_order(graph, rng)
    blocks = find_blocks(graph, order)
    behind = [op for block in reversed(blocks) for op in block.backward]
    assert (*(op for block in blocks for op in block.forward), *behind) == order
    looks: dict[int, list[tuple[str, Phase, list[int]]]] = {}
    for block in blocks:
        ops = [graph.ops[op] for op in (*block.forward, *block.backward)]
        look = [(op.target, op.phase, [graph.values[v].nbytes for v in (*op.inputs, *op.outputs)]) for op in ops]
        assert looks.setdefault(block.kind, look) == look
