"""The planners that need no search."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.planners.order import ORDERS
from autotune.planners.order.beam import Beam, search_beam
from autotune.planners.order.depth_first import DepthFirst, order_depth_first
from autotune.planners.order.longest_path import order_longest_chain_first
from autotune.predict.ordering import ordering_problem
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, chain, random_graph
from tests.planners.order.nets import bottleneck, randwire
from tests.planners.order.test_list_by_bytes import binary_tree


def copies(*chains: str) -> TrainGraph:
    """Ops by number, each reading those that are named after it: `0 1:0` reads op 0 in op 1."""
    built = Builder()
    for text in " ".join(chains).split():
        name, _, reads = text.partition(":")
        built.op(f"op{name}", [f"v{read}" for read in reads.split(",") if read], [(f"v{name}", 1)])
    return built.graph()


@pytest.mark.parametrize(
    ("graph", "order"),
    [
        (copies("0 1:0 2 3:1,2"), (0, 1, 2, 3)),
        (copies("0 1 2:1 3:0,2"), (1, 2, 0, 3)),
        (copies("0 1:0 2 3:1,2 4 5:4"), (0, 1, 2, 3, 4, 5)),
        (copies("0"), (0,)),
        (copies("0 1:0 2:1 3 4:3 5:2,4 6:2"), (0, 1, 2, 6, 3, 4, 5)),
    ],
)
def test_the_longest_chain_goes_first_and_others_when_it_waits(graph: TrainGraph, order: tuple[int, ...]):
    assert order_longest_chain_first(ordering_problem(graph, Costs.unit(graph))) == order


def test_depth_first_makes_the_large_branch_first_or_the_small_one():
    built = Builder()
    built.op("small", makes=[("a", 1)])
    built.op("large", makes=[("b", 9)])
    built.op("join", ["a", "b"], [("c", 1)])
    problem = ordering_problem(graph := built.graph("c"), Costs.unit(graph))
    assert next(order_depth_first(problem, large=True)) == (1, 0, 2)
    assert next(order_depth_first(problem, large=False)) == (0, 1, 2)


def test_depth_first_is_not_limited_by_how_deep_a_graph_is():
    graph = chain(5000)
    assert DepthFirst().plan(graph, Plan.traced(graph), 0, Costs.unit(graph)) == Plan.traced(graph)


@pytest.mark.parametrize("name", ["list_by_bytes", "depth_first", "longest_path", "beam"])
def test_a_tree_of_sums_falls_from_all_its_leaves_to_its_depth_and_two(name: str):
    graph = binary_tree(5)
    costs = Costs.unit(graph)
    assert peak_bytes(graph, Plan.traced(graph), costs) == 33
    assert peak_bytes(graph, ORDERS[name]().plan(graph, Plan.traced(graph), 0, costs), costs) == 7


@pytest.mark.parametrize("first", ["large", "small"])
def test_depth_and_chains_miss_what_sizes_show_on_nntrainer_1126(first: str):
    graph = bottleneck()
    costs = Costs.unit(graph)
    assert peak_bytes(graph, DepthFirst(first).plan(graph, Plan.traced(graph), 0, costs), costs) == 300
    assert peak_bytes(graph, Beam(1).plan(graph, Plan.traced(graph), 0, costs), costs) == 225


def test_a_beam_finds_on_random_wires_what_a_list_does_not():
    graph = randwire(0)
    costs = Costs.unit(graph)
    peaks = {
        name: peak_bytes(graph, ORDERS[name]().plan(graph, Plan.traced(graph), 0, costs), costs) // 64
        for name in ("traced", "list_by_bytes", "beam")
    }
    assert peaks == {"traced": 17, "list_by_bytes": 16, "beam": 13}


@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 30]))
def test_a_beam_of_any_width_ends_with_every_op(rng: random.Random, width: int):
    graph = random_graph(rng, 10)
    problem = ordering_problem(graph, Costs.unit(graph))
    check(graph, Plan(search_beam(problem, width, 0)))
    check(graph, Plan(search_beam(problem, width, problem.peak(problem.traced))))


@pytest.mark.parametrize("name", ORDERS)
def test_order_comes_before_recompute_and_offload(name: str):
    graph, planner = chain(6), ORDERS[name]()
    with pytest.raises(PlanError, match="already recomputes op0"):
        planner.plan(graph, Plan((0, 1, 0, 2, 3, 4, 5)), 0, Costs.unit(graph))
    with pytest.raises(PlanError, match="already offloads v0"):
        planner.plan(graph, Plan((0, 1, 2, 3, 4, 5), (Swap(0, 0),), 1, "ssd"), 0, Costs.unit(graph))
