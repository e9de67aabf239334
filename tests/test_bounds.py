import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bounds import peak_lower_bound, seconds_lower_bound
from autotune.costs import Costs
from autotune.graph import Role, TrainGraph
from autotune.plan import Plan
from autotune.simulate import peak_bytes
from tests.graphs import Builder, chain, plans, random_graph


def topological_orders(graph: TrainGraph):
    for order in itertools.permutations(range(len(graph.ops))):
        place = {op: position for position, op in enumerate(order)}
        if all(place[earlier] < place[op] for op in order for earlier in graph.predecessors[op]):
            yield order


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


def test_no_plan_is_faster_than_every_op_once():
    assert seconds_lower_bound(Costs((0.5, 1.5), (0, 0))) == 2.0


@given(plans(), st.integers(0, 40))
def test_no_random_plan_peaks_below_the_bound(made: tuple[TrainGraph, Plan], scratch: int):
    graph, plan = made
    costs = Costs((1.0,) * len(graph.ops), tuple(scratch * (op.id % 3) for op in graph.ops))
    assert peak_bytes(graph, Plan(plan.order), costs) >= peak_lower_bound(graph, costs)[0]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_the_best_of_all_orders_is_not_below_the_bound(rng: random.Random):
    graph = random_graph(rng, 6)
    costs = Costs.unit(graph)
    best = min(peak_bytes(graph, Plan(order), costs) for order in topological_orders(graph))
    assert best >= peak_lower_bound(graph, costs)[0]
