import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.planners.order.list_by_bytes import ListByBytes
from autotune.planners.order.traced import TracedOrder
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, chain, random_graph, training_chain
from tests.predict.test_bounds import topological_orders


def listed(graph: TrainGraph, costs: Costs | None = None) -> Plan:
    return ListByBytes().plan(graph, Plan.traced(graph), 0, costs or Costs.unit(graph))


def names(graph: TrainGraph, plan: Plan) -> str:
    return " ".join(graph.ops[op].name for op in plan.order)


def peak(graph: TrainGraph, plan: Plan) -> int:
    return peak_bytes(graph, plan, Costs.unit(graph))


def optimum(graph: TrainGraph) -> int:
    return min(peak(graph, Plan(order)) for order in topological_orders(graph))


def test_a_chain_stays_as_it_is():
    graph = chain(5)
    assert listed(graph) == Plan.traced(graph)


def test_the_fork_of_nntrainer_1126_takes_225_bytes():
    """TracedOrder, the wide branch waits beside the other one and takes 300: nnstreamer/nntrainer#1126."""
    built = Builder("nntrainer1126")
    built.op("input", makes=[("in", 100)])
    built.op("L", ["in"], [("l", 100)])
    built.op("M", ["l"], [("m", 25)])
    built.op("N", ["m"], [("n", 100)])
    built.op("P", ["in"], [("p", 100)])
    built.op("add", ["n", "p"], [("out", 0)])
    graph = built.graph("out")
    assert peak(graph, Plan.traced(graph)) == 300
    assert names(graph, listed(graph)) == "input L M P N add"
    assert peak(graph, listed(graph)) == 225 == optimum(graph)


def binary_tree(depth: int) -> TrainGraph:
    """Sums of unit leaves, traced level by level: all leaves first."""
    built = Builder(f"tree{depth}")
    for leaf in range(2**depth):
        built.op(f"leaf{leaf}", makes=[(f"{depth}.{leaf}", 1)])
    for level in reversed(range(depth)):
        for i in range(2**level):
            built.op(f"sum{level}.{i}", [f"{level + 1}.{2 * i}", f"{level + 1}.{2 * i + 1}"], [(f"{level}.{i}", 1)])
    return built.graph("0.0")


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_binary_tree_falls_from_all_its_leaves_to_its_depth_and_two(depth: int):
    graph = binary_tree(depth)
    assert peak(graph, Plan.traced(graph)) == 2**depth + 1
    assert peak(graph, listed(graph)) == depth + 2


def test_independent_chains_run_one_after_the_other():
    built = Builder("chains")
    for step in range(3):
        for name in "abc":
            built.op(f"{name}{step}", [f"{name}{step - 1}v"] if step else [], [(f"{name}{step}v", [10, 8, 1][step])])
    built.op("join", ["a2v", "b2v", "c2v"], [("out", 1)])
    graph = built.graph("out")
    assert names(graph, listed(graph)) == "a0 a1 a2 b0 b1 b2 c0 c1 c2 join"
    assert peak(graph, listed(graph)) == 20


def test_an_update_that_frees_its_gradient_runs_as_soon_as_it_may():
    graph = training_chain(3, nbytes=10, param_bytes=20)
    order = names(graph, listed(graph)).split()
    for i in (2, 1):
        assert order.index(f"update{i}") == max(order.index(f"dw{i}"), order.index(f"dx{i}")) + 1
    assert order.index("update0") == order.index("dw0") + 1


def test_scratch_counts():
    # either branch first leaves the same bytes; the one with much scratch had better run while the other is not there
    built = Builder()
    built.op("small", makes=[("a", 10)])
    built.op("hungry", makes=[("b", 10)])
    built.op("join", ["a", "b"], [("c", 0)])
    graph = built.graph("c")
    assert names(graph, listed(graph, Costs((1.0,) * 3, (0, 100, 0)))) == "hungry small join"


def test_values_that_outlive_the_step_are_not_counted_as_freed():
    # reading `keep` last frees nothing; reading `drop` last does: with both ready, `b` goes first
    built = Builder()
    built.op("make", makes=[("keep", 50), ("drop", 50)])
    built.op("a", ["keep"], [("x", 10)])
    built.op("b", ["drop"], [("y", 10)])
    graph = built.graph("keep", "x", "y")
    assert names(graph, listed(graph)) == "make b a"


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_no_list_beats_the_best_of_all_orders(rng: random.Random):
    graph = random_graph(rng, 6)
    assert optimum(graph) <= peak(graph, listed(graph)) <= peak(graph, Plan.traced(graph))


def test_most_small_graphs_reach_the_best_of_all_orders():
    found = [random_graph(random.Random(seed), 6) for seed in range(150)]
    best = sum(peak(graph, listed(graph)) == optimum(graph) for graph in found)
    assert best >= 140


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_the_best_order_is_kept_when_it_comes_in(rng: random.Random):
    graph = random_graph(rng, 6)
    best = Plan(min(topological_orders(graph), key=lambda order: peak(graph, Plan(order))))
    assert ListByBytes().plan(graph, best, 0, Costs.unit(graph)) == best


def test_the_traced_order_comes_back_whatever_came_in():
    graph = binary_tree(3)
    assert TracedOrder().plan(graph, listed(graph), 0, Costs.unit(graph)) == Plan.traced(graph)


@pytest.mark.parametrize("planner", [TracedOrder(), ListByBytes()])
def test_order_comes_before_recompute_and_offload(planner: TracedOrder | ListByBytes):
    graph = chain(6)
    with pytest.raises(PlanError, match="already recomputes op0"):
        planner.plan(graph, Plan((0, 1, 0, 2, 3, 4, 5)), 0, Costs.unit(graph))
    with pytest.raises(PlanError, match="already offloads v0"):
        planner.plan(graph, Plan((0, 1, 2, 3, 4, 5), (Swap(0, 0),), 1, "ssd"), 0, Costs.unit(graph))


def test_the_users_own_bytes_move_no_op():
    built = Builder()
    built.value("w", 10**6, Role.PARAM)
    built.op("a", ["w"], [("x", 10)])
    built.op("b", ["w"], [("y", 10)])
    graph = built.graph("x", "y")
    assert listed(graph) == Plan.traced(graph)
