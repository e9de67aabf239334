import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.predict.ordering import Ordering, ordering_problem, reverse_order
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, chain, random_graph, random_order

randoms = st.randoms(use_true_random=False)


def random_problem(rng: random.Random, max_ops: int = 12) -> tuple[TrainGraph, Costs, Ordering]:
    graph = random_graph(rng, max_ops)
    costs = Costs((1.0,) * len(graph.ops), tuple(rng.choice([0, 0, 7, 30]) for _ in graph.ops))
    return graph, costs, ordering_problem(graph, costs)


def test_a_chain_holds_two_values_from_its_second_op_on():
    assert ordering_problem(chain(4), Costs.unit(chain(4))).profile((0, 1, 2, 3)) == [10, 20, 20, 20]


def test_what_nobody_reads_comes_and_goes_with_its_op():
    built = Builder()
    built.op("a", makes=[("x", 10), ("unread", 5)])
    built.op("b", ["x"], [("y", 1)])
    graph = built.graph("y")
    assert ordering_problem(graph, Costs((1.0, 1.0), (2, 3))).profile((0, 1)) == [17, 14]


@settings(max_examples=60)
@given(randoms)
def test_an_order_peaks_where_the_simulator_says(rng: random.Random):
    graph, costs, problem = random_problem(rng)
    order = random_order(graph, rng)
    assert problem.peak(order) == peak_bytes(graph, Plan(order), costs)


@settings(max_examples=60)
@given(randoms)
def test_an_order_and_its_reverse_take_the_same_bytes(rng: random.Random):
    graph, _, problem = random_problem(rng)
    order = random_order(graph, rng)
    reverse = problem.reverse()
    assert reverse.profile(reverse_order(order)) == problem.profile(order)[::-1]
    assert reverse_order(reverse_order(order)) == order
    assert reverse.reverse().profile(order) == problem.profile(order)


@settings(max_examples=60)
@given(randoms)
def test_a_part_of_an_order_takes_what_it_takes_inside_the_whole(rng: random.Random):
    graph, _, problem = random_problem(rng)
    order = random_order(graph, rng)
    first = rng.randrange(len(order))
    last = rng.randint(first + 1, len(order))
    ops = sorted(order[first:last])
    part = problem.subproblem(set(order[:first]), ops)
    inside = tuple(ops.index(op) for op in order[first:last])
    assert part.profile(inside) == problem.profile(order)[first:last]
    assert all(earlier < op for op, before in enumerate(part.before) for earlier in before)
