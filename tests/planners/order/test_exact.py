import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.order.exact import ExactOrder, independent_pieces, search, solve
from autotune.predict.ordering import ordering_problem
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, chain, random_graph, random_order, training_chain
from tests.planners.order.nets import bottleneck, randwire, xla_seven
from tests.predict.test_order_bounds import optimum

randoms = st.randoms(use_true_random=False)


def task(rng: random.Random, max_ops: int) -> tuple[TrainGraph, Costs]:
    graph = random_graph(rng, max_ops)
    return graph, Costs((1.0,) * len(graph.ops), tuple(rng.choice([0, 0, 7, 30]) for _ in graph.ops))


def test_fifteen_hundred_small_graphs_get_the_best_of_all_orders_and_the_proof():
    for seed in range(1500):
        rng = random.Random(seed)
        graph, costs = task(rng, 9)
        problem = ordering_problem(graph, costs)
        plan = ExactOrder().plan(graph, Plan(random_order(graph, rng)), 0, costs)
        check(graph, plan)
        best = optimum(problem)
        assert peak_bytes(graph, plan, costs) == best, seed
        assert solve(problem, plan.order, 10**6).proved, seed


@settings(max_examples=40)
@given(randoms)
def test_wider_graphs_too(rng: random.Random):
    graph, costs = task(rng, 13)
    problem = ordering_problem(graph, costs)
    found = solve(problem, random_order(graph, rng), 10**6)
    assert found.peak_bytes == found.lower_bound_bytes == optimum(problem)


@given(randoms, st.integers(0, 5))
def test_a_search_that_is_cut_off_claims_no_more_than_it_knows(rng: random.Random, states: int):
    graph, costs = task(rng, 9)
    problem = ordering_problem(graph, costs)
    order = random_order(graph, rng)
    found = solve(problem, order, states)
    assert found.states <= states
    assert found.lower_bound_bytes <= optimum(problem) <= found.peak_bytes == problem.peak(found.order)
    assert found.peak_bytes <= problem.peak(order)


def test_a_search_that_needs_too_much_memory_ends_without_a_proof(monkeypatch: pytest.MonkeyPatch):
    problem = ordering_problem(graph := randwire(0), Costs.unit(graph))
    whole = solve(problem, problem.traced, 10_000)
    monkeypatch.setattr("autotune.planners.order.exact.STORED_BYTES", 1)
    cut = solve(problem, problem.traced, 10_000)
    assert (cut.states, cut.proved) == (0, False)
    assert cut.lower_bound_bytes <= whole.peak_bytes < cut.peak_bytes


def test_nothing_below_the_best_is_found_and_that_is_a_proof():
    problem = ordering_problem(graph := bottleneck(), Costs.unit(graph))
    assert search(problem, 0, 225, 1000).order == ()
    assert search(problem, 0, 225, 1000).proved
    assert problem.peak(search(problem, 0, 226, 1000).order) == 225


@pytest.mark.parametrize(("graph", "peak"), [(bottleneck(), 225), (xla_seven(), 5)])
def test_the_known_examples_are_proved(graph: TrainGraph, peak: int):
    found = solve(ordering_problem(graph, Costs.unit(graph)), Plan.traced(graph).order, 1000)
    assert (found.peak_bytes, found.proved) == (peak, True)


@pytest.mark.parametrize(("seed", "tensors"), [(0, 13), (1, 14), (2, 15), (3, 14)])
def test_a_randomly_wired_net_is_proved_within_ten_thousand_states(seed: int, tensors: int):
    """The traced order holds 17, 17, 18 and 18 of its tensors, which are all of one size."""
    problem = ordering_problem(graph := randwire(seed, nbytes=64), Costs.unit(graph))
    found = solve(problem, problem.traced, 10_000)
    assert (found.peak_bytes, found.proved) == (64 * tensors, True)


def test_stages_in_a_row_cost_one_search_for_the_highest():
    one, three = randwire(1), randwire(1, stages=3)
    alone = solve(ordering_problem(one, Costs.unit(one)), Plan.traced(one).order, 10_000)
    row = solve(ordering_problem(three, Costs.unit(three)), Plan.traced(three).order, 10_000)
    assert (row.peak_bytes, row.states) == (alone.peak_bytes, alone.states)


def test_a_chain_is_cut_at_every_op_and_a_fork_stays_whole():
    line, fork = chain(3), bottleneck()
    assert list(independent_pieces(ordering_problem(line, Costs.unit(line)))) == [(0, 1), (1, 2), (2, 3)]
    assert list(independent_pieces(ordering_problem(fork, Costs.unit(fork)))) == [(0, 1), (1, 5), (5, 6)]


@given(randoms)
def test_an_op_between_two_pieces_stands_there_in_every_order(rng: random.Random):
    graph = random_graph(rng, 10)
    order = random_order(graph, rng)
    pieces = list(independent_pieces(ordering_problem(graph, Costs.unit(graph))))
    assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
    assert all(sorted(order[first:last]) == list(range(first, last)) for first, last in pieces)


def test_what_lies_behind_a_valley_is_not_searched_again():
    # twelve pairs that rise to 100 bytes and fall to none, and a fork that takes 225 where the bound says 200: whichever
    # pairs have run, 4096 sets of them, the fork is the same
    built = Builder()
    for pair in range(12):
        built.op(f"up{pair}", makes=[(f"high{pair}", 100)])
        built.op(f"down{pair}", [f"high{pair}"], [(f"low{pair}", 0)])
    for op in bottleneck().ops:
        makes = [(value.name, value.nbytes) for value in bottleneck().values if value.id in op.outputs]
        built.op(op.name, [bottleneck().values[value].name for value in op.inputs], makes)
    graph = built.graph("T6")
    problem = ordering_problem(graph, Costs.unit(graph))
    found = search(problem, 200, 300, 300)
    assert (found.peak_bytes, found.proved, problem.peak(found.order)) == (225, True, 225)


def test_a_valley_is_entered_without_what_need_not_be_there():
    # `cheap` looks best at first, and with it `drop` falls below where it began; `wide` had better not find it there
    built = Builder()
    built.op("start", makes=[("held", 20), ("go", 0)])
    built.op("cheap", ["go"], [("rest", 1)])
    built.op("help", ["go"], [("aid", 2)])
    built.op("drop", ["held", "aid"], [("low", 0)])
    built.op("wide", ["low"], [("big", 100)])
    built.op("thin", ["big"], [("done", 0)])
    built.op("end", ["rest", "done"], [("out", 0)])
    graph = built.graph("out")
    problem = ordering_problem(graph, Costs.unit(graph))
    found = solve(problem, problem.traced, 1000)
    assert (problem.peak(problem.traced), found.peak_bytes, found.proved) == (101, 100, True)


def test_one_weights_gradient_at_a_time_is_enough():
    # eleven activations, the loss, the gradient of the last one and the first weight's that is made of it
    graph = training_chain(12, nbytes=10, param_bytes=20)
    plan = ExactOrder().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    assert peak_bytes(graph, plan, Costs.unit(graph)) == graph.static_bytes + 11 * 10 + 1 + 10 + 20
    assert peak_bytes(graph, Plan.traced(graph), Costs.unit(graph)) == graph.static_bytes + 12 * 20 + 10 + 1


def test_ways_that_tie_in_everything_are_looked_at_in_turn():
    """`d` before or after either of two equal ops: the same peak, depth and bytes, from states that have no order."""
    built = Builder()
    built.op("a", [], [("x", 50)])
    built.op("b", [], [("y", 50)])
    built.op("sum", ["x", "y"], [("z", 3)])
    built.op("d", [], [("kept", 8), ("unread", 8)])
    problem = ordering_problem(built.graph("kept"), Costs((1.0,) * 4, (20, 20, 9, 9)))
    assert search(problem, 0, 10**9, 100).peak_bytes == optimum(problem)
