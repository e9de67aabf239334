import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.predict import bounds
from autotune.predict import reachability as reach
from autotune.predict.bounds import peak_lower_bound, seconds_lower_bound
from autotune.predict.simulate import peak_bytes, simulate
from autotune.testing.graphs import Builder, chain, plans, random_graph, training_chain
from tests.planners import synthetic
from tests.planners.recompute.oracle import least_seconds, lowest_peak

SSD = {"ssd": StoreCost(50.0, 25.0, 20.0, 10.0)}


def topological_orders(graph: TrainGraph):
    for order in itertools.permutations(range(len(graph.ops))):
        place = {op: position for position, op in enumerate(order)}
        if all(place[earlier] < place[op] for op in order for earlier in graph.predecessors[op]):
            yield order


def random_costs(rng: random.Random, graph: TrainGraph, stores: dict[str, StoreCost] | None = None) -> Costs:
    return Costs(
        tuple(float(rng.choice([0, 1, 2, 5])) for _ in graph.ops),
        tuple(rng.choice([0, 7]) for _ in graph.ops),
        stores or {},
    )


def sandwich(mask_bytes: int = 30, *, draws: bool = True) -> TrainGraph:
    """`mask` is made first and read last; `wide` in between needs 41 bytes itself."""
    built = Builder("sandwich")
    built.value("x", 1, Role.BATCH)
    built.op("draw", ["x"], [("mask", mask_bytes)], draws=draws)
    built.op("scale", ["mask", "x"], [("small", 1)])
    built.op("wide", ["small"], [("top", 40)])
    built.op("loss", ["top"], [("loss", 1)])
    built.op("back", ["mask", "loss"], [("g", 1)], phase=Phase.BACKWARD)
    return built.graph("loss")


@pytest.mark.parametrize("block", [1, 3, 8, 64])
def test_bounds_looked_at_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, block: int):
    for seed in range(20):
        rng = random.Random(seed)
        graph = random_graph(rng, 20)
        costs = random_costs(rng, graph)
        tight = (graph.static_bytes + simulate(graph, lower(graph, Plan.traced(graph)), costs).peak_bytes) // 2
        results = []
        for width in (reach.BLOCK, block):
            monkeypatch.setattr(reach, "BLOCK", width)
            for cached in (bounds._crossing, bounds._peak, bounds._extra_seconds):
                cached.cache_clear()
            results.append((peak_lower_bound(graph, costs), seconds_lower_bound(graph, costs, tight)))
        assert results[0] == results[1]


def test_the_bound_of_a_chain_is_reached():
    graph = chain(5)
    assert peak_lower_bound(graph, Costs.unit(graph)) == (20, 1)


def test_scratch_and_static_bytes_count_and_the_op_is_named():
    built = Builder()
    built.value("w", 7, Role.PARAM)
    built.op("a", ["w"], [("x", 10)])
    built.op("b", ["x", "w"], [("y", 1)])
    graph = built.graph("y")
    assert peak_lower_bound(graph, Costs((1.0, 1.0), (0, 0))) == (7 + 11, 1)
    assert peak_lower_bound(graph, Costs((1.0, 1.0), (5, 0))) == (7 + 15, 0)


def test_a_graph_without_ops_needs_its_static_bytes():
    built = Builder()
    built.value("w", 7, Role.PARAM)
    assert peak_lower_bound(built.graph("w"), Costs((), ())) == (7, -1)


def test_a_mask_stands_beside_every_op_between_its_making_and_its_reading():
    graph = sandwich()
    assert peak_lower_bound(graph, Costs.unit(graph)) == (1 + 30 + 41, 2) == (lowest_peak(graph, Costs.unit(graph)), 2)


def test_what_can_be_made_again_need_not_stand():
    graph = sandwich(draws=False)
    assert peak_lower_bound(graph, Costs.unit(graph)) == (1 + 41, 2)
    assert lowest_peak(graph, Costs.unit(graph)) == 1 + 41


def test_with_a_store_even_a_mask_may_be_away():
    graph = sandwich()
    assert peak_lower_bound(graph, Costs((1.0,) * 5, (0,) * 5, SSD)) == (1 + 41, 2)


def test_what_is_made_of_a_mask_stands_or_the_mask_does():
    """`back` reads `scaled`, which can be made of `mask` again, or kept; the smaller of both stands beside `wide`."""
    built = Builder()
    built.value("x", 1, Role.BATCH)
    built.op("draw", ["x"], [("mask", 10)], draws=True)
    built.op("scale", ["mask", "x"], [("scaled", 30)])
    built.op("wide", ["scaled"], [("top", 5)])
    built.op("wider", ["top"], [("loss", 50)])
    built.op("back", ["scaled", "loss"], [("g", 1)], phase=Phase.BACKWARD)
    graph = built.graph()
    costs = Costs((1.0,) * 5, (0, 0, 0, 40, 0))
    assert peak_lower_bound(graph, costs) == (1 + 10 + 5 + 50 + 40, 3)
    assert lowest_peak(graph, costs) == 1 + 10 + 5 + 50 + 40


def test_an_op_that_runs_in_place_needs_one_buffer():
    built = Builder()
    built.op("make", makes=[("a", 10)])
    built.op("relu", ["a"], [("b", 10)], inplace=["a"])
    graph = built.graph("b")
    assert peak_lower_bound(graph, Costs((1.0,) * 2, (0, 3))) == (13, 1)


def test_both_inputs_of_an_op_cannot_have_been_made_last():
    """`join` needs 21 itself; `a` and `b` of 10 are each made with 15 of scratch, the later beside the earlier."""
    built = Builder()
    built.op("left", makes=[("a", 10)])
    built.op("right", makes=[("b", 10)])
    built.op("join", ["a", "b"], [("y", 1)])
    graph = built.graph("y")
    costs = Costs((1.0,) * 3, (15, 15, 0))
    assert peak_lower_bound(graph, costs) == (35, 2)
    assert lowest_peak(graph, costs) == 35
    assert peak_lower_bound(graph, Costs((1.0,) * 3, (15, 3, 0))) == (25, 0)


def test_a_result_whose_input_was_overwritten_stands_until_it_is_read():
    built = Builder()
    built.value("w", 4, Role.PARAM)
    built.op("read", ["w"], [("kept", 20)])
    built.op("update", ["w"], [("big", 50)], writes=["w"], repeatable=False)
    built.op("use", ["kept", "big"], [("y", 1)])
    graph = built.graph("y")
    assert peak_lower_bound(graph, Costs.unit(graph))[0] == 4 + 20 + 50 + 1
    built = Builder()
    built.value("w", 4, Role.PARAM)
    built.op("read", ["w"], [("kept", 20)])
    built.op("update", ["w"], [("big", 50)], writes=["w"], repeatable=False)
    built.op("shrink", ["big"], [("small", 1)])
    built.op("use", ["kept", "small"], [("y", 1)])
    graph = built.graph("y")
    assert peak_lower_bound(graph, Costs.unit(graph)) == (4 + 20 + 51, 2)


def test_no_plan_is_faster_than_every_op_once():
    graph = chain(2)
    assert seconds_lower_bound(graph, Costs((0.5, 1.5), (0, 0))) == 2.0


def test_what_a_budget_leaves_no_room_for_is_computed_again():
    graph = sandwich(draws=False)
    costs = Costs((3.0, 1.0, 1.0, 1.0, 1.0), (0,) * 5)
    assert seconds_lower_bound(graph, costs, 1 + 71) == 7.0
    assert seconds_lower_bound(graph, costs, 1 + 41) == 10.0 == least_seconds(graph, 1 + 41, costs)
    assert seconds_lower_bound(graph, costs, 1 + 56) == pytest.approx(8.5)
    assert seconds_lower_bound(graph, Costs(costs.seconds, costs.scratch_bytes, SSD), 1 + 41) == 7.0


def test_what_is_made_again_needs_its_own_input_made_again_too():
    """Neither `a` nor `b` fits beside `wide`: `b` of 30 is made again from `a` of 30, which is made again from the batch."""
    built = Builder()
    built.value("x", 1, Role.BATCH)
    built.op("first", ["x"], [("a", 30)])
    built.op("second", ["a"], [("b", 30)])
    built.op("shrink", ["b"], [("small", 1)])
    built.op("wide", ["small"], [("top", 70)])
    built.op("loss", ["top"], [("loss", 1)])
    built.op("back", ["b", "loss"], [("g", 1)], phase=Phase.BACKWARD)
    graph = built.graph("loss")
    costs = Costs((4.0, 2.0, 1.0, 1.0, 1.0, 1.0), (0,) * 6)
    assert seconds_lower_bound(graph, costs, 1 + 71) == pytest.approx(16.0)
    assert least_seconds(graph, 1 + 71, costs) == 16.0


@settings(max_examples=60)
@given(plans(), st.integers(0, 40))
def test_no_random_plan_peaks_below_the_bound(drawn: tuple[TrainGraph, Plan], scratch: int):
    graph, plan = drawn
    costs = Costs((1.0,) * len(graph.ops), tuple(scratch * (op.id % 3) for op in graph.ops))
    assert peak_bytes(graph, Plan(plan.order, inplace=plan.inplace), costs) >= peak_lower_bound(graph, costs)[0]


@settings(max_examples=60)
@given(plans(), st.integers(0, 40))
def test_no_plan_that_offloads_peaks_below_the_bound_with_a_store(drawn: tuple[TrainGraph, Plan], scratch: int):
    graph, plan = drawn
    costs = Costs((1.0,) * len(graph.ops), tuple(scratch * (op.id % 3) for op in graph.ops), SSD)
    assert peak_bytes(graph, plan, costs) >= peak_lower_bound(graph, costs)[0]


@settings(max_examples=60)
@given(plans())
def test_no_random_plan_is_faster_than_the_bound_for_its_own_peak(drawn: tuple[TrainGraph, Plan]):
    graph, plan = drawn
    costs = random_costs(random.Random(len(plan.order)), graph)
    estimate = simulate(graph, lower(graph, Plan(plan.order, inplace=plan.inplace)), costs)
    assert estimate.seconds >= seconds_lower_bound(graph, costs, estimate.peak_bytes) - 1e-9


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_the_best_of_all_orders_is_not_below_the_bound(rng: random.Random):
    graph = random_graph(rng, 6)
    costs = Costs.unit(graph)
    best = min(peak_bytes(graph, Plan(order), costs) for order in topological_orders(graph))
    assert best >= peak_lower_bound(graph, costs)[0]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_no_plan_at_all_is_below_either_bound(rng: random.Random):
    """Every order with any number of repetitions and outputs in place, by brute force; at three budgets."""
    graph = random_graph(rng, 6)
    costs = random_costs(rng, graph)
    low = lowest_peak(graph, costs, inplace=True)
    assert low >= peak_lower_bound(graph, costs)[0]
    high = peak_bytes(graph, Plan.traced(graph), costs)
    for budget in (low, (low + high) // 2, rng.randint(low, high)):
        least = least_seconds(graph, budget, costs, inplace=True)
        assert least is not None
        assert least >= seconds_lower_bound(graph, costs, budget) - 1e-9


@pytest.mark.parametrize("layers", [1, 2])
def test_no_plan_of_a_training_step_is_below_either_bound(layers: int):
    graph = training_chain(layers, nbytes=10, param_bytes=2)
    costs = Costs(tuple(1.0 + op.id % 3 for op in graph.ops), (0,) * len(graph.ops))
    low = lowest_peak(graph, costs)
    assert low >= peak_lower_bound(graph, costs)[0]
    for budget in range(low, peak_bytes(graph, Plan.traced(graph), costs) + 1, 3):
        least = least_seconds(graph, budget, costs)
        assert least is not None
        assert least >= seconds_lower_bound(graph, costs, budget) - 1e-9


def test_half_of_a_nets_bytes_cost_seconds_by_proof_and_dropout_keeps_its_masks():
    graph, costs = synthetic.gpt(3, 64, 4, 32, batch=4, vocabulary=64)
    plain, plain_costs = synthetic.gpt(3, 64, 4, 32, batch=4, vocabulary=64, dropout=False)
    masks = sum(graph.values[v].nbytes for op in graph.ops if op.random for v in op.outputs)
    assert peak_lower_bound(graph, costs)[0] >= masks + plain.static_bytes
    half = peak_bytes(plain, Plan.traced(plain), plain_costs) * 70 // 100
    assert seconds_lower_bound(plain, plain_costs, half) > sum(plain_costs.seconds)
