import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.predict import reachability as reach
from autotune.predict.bounds import peak_lower_bound
from autotune.predict.order_bounds import (
    improve_required_bytes,
    least_live_set,
    live_bytes,
    order_lower_bound,
    required_bytes,
)
from autotune.predict.ordering import Ordering, ordering_problem
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, random_graph, random_order, random_plan, training_chain
from tests.predict.test_bounds import random_costs
from tests.predict.test_ordering import random_problem

randoms = st.randoms(use_true_random=False)


def sets(problem: Ordering) -> set[int]:
    """Every set of ops that may have run, a bit for each op."""
    reachable = {0}
    for op, before in enumerate(problem.before):
        needs = sum(1 << earlier for earlier in before)
        reachable |= {ran | 1 << op for ran in reachable if ran & needs == needs}
    return reachable


def optimum(problem: Ordering) -> int:
    """Lowest peak of all orders, by looking at every set of ops that may have run."""
    peaks = {0: live_bytes(problem, 0)}
    for ran in sorted(sets(problem), key=int.bit_count):
        for op, before in enumerate(problem.before):
            if ran >> op & 1 or not all(ran >> earlier & 1 for earlier in before):
                continue
            fresh = {
                v
                for v in problem.touches[op]
                if v not in problem.live_at_start and not any(ran >> e & 1 for e in problem.ends[v])
            }
            during = live_bytes(problem, ran) + sum(problem.nbytes[value] for value in fresh) + problem.scratch[op]
            after = ran | 1 << op
            peaks[after] = min(peaks.get(after, 1 << 60), max(peaks[ran], during))
    return peaks[(1 << len(problem.before)) - 1]


def test_a_value_that_waits_for_another_branch_counts_there():
    # whatever runs first, `skip` lives from `a` to `join`: at `wide` beside its input and its output
    built = Builder()
    built.op("a", makes=[("x", 10), ("skip", 7)])
    built.op("wide", ["x"], [("y", 20)])
    built.op("narrow", ["y"], [("z", 1)])
    built.op("join", ["skip", "z"], [("out", 1)])
    graph = built.graph("out")
    assert peak_lower_bound(graph, Costs.unit(graph)) == (30, 1)
    assert order_lower_bound(graph, Costs.unit(graph)) == (37, 1)


def test_a_branch_that_may_run_before_or_after_leaves_its_input_or_its_result():
    # while `wide` runs either `a` waits for `shrink`, or what `shrink` made of it for `join`: 8 bytes at least
    built = Builder()
    built.op("split", makes=[("a", 10), ("b", 1)])
    built.op("shrink", ["a"], [("small", 8)])
    built.op("wide", ["b"], [("big", 20)])
    built.op("join", ["small", "big"], [("out", 0)])
    graph = built.graph("out")
    problem = ordering_problem(graph, Costs.unit(graph))
    assert required_bytes(problem).tolist() == [11, 18, 21, 28]
    assert improve_required_bytes(problem, (0, 1, 2, 3), 100) == 29 == optimum(problem)


def test_of_two_that_need_a_workspace_and_meet_later_one_runs_beside_the_others_result():
    # which of them is not known, so no op alone must live beside anything
    built = Builder()
    built.op("a", makes=[("x", 1)])
    built.op("b", makes=[("y", 1)])
    built.op("join", ["x", "y"], [("out", 0)])
    graph = built.graph("out")
    costs = Costs((1.0,) * 3, (7, 7, 0))
    problem = ordering_problem(graph, costs)
    assert required_bytes(problem).tolist() == [8, 8, 2]
    assert order_lower_bound(graph, costs) == (9, 2) == (optimum(problem), 2)


def test_a_training_chain_keeps_all_it_made_until_its_loss():
    graph = training_chain(3)
    assert order_lower_bound(graph, Costs.unit(graph))[0] == graph.static_bytes + 40
    assert graph.ops[order_lower_bound(graph, Costs.unit(graph))[1]].name in ("dloss", "dx2")


def test_a_graph_without_ops_needs_its_static_bytes():
    built = Builder()
    assert order_lower_bound(built.graph(), Costs((), ())) == (0, -1)


def test_blocks_of_ops_make_no_difference(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(1)
    _, _, problem = random_problem(rng, 40)
    whole = required_bytes(problem)
    monkeypatch.setattr(reach, "BLOCK", 7)
    assert required_bytes(problem).tolist() == whole.tolist()


@settings(max_examples=60)
@given(randoms)
def test_neither_bound_is_above_the_best_of_all_orders(rng: random.Random):
    graph, costs, problem = random_problem(rng, 8)
    best = optimum(problem)
    low, _ = order_lower_bound(graph, costs)
    near = improve_required_bytes(problem, random_order(graph, rng), 10**6)
    assert max(peak_lower_bound(graph, costs)[0], required_bytes(problem).max()) <= low <= best
    assert near <= best


@settings(max_examples=60)
@given(randoms)
def test_no_order_with_runs_in_place_goes_below_the_bound_in_place(rng: random.Random):
    graph = random_graph(rng, 12)
    plan = random_plan(graph, rng, offload=False)
    once = Plan(random_order(graph, rng))
    costs = random_costs(rng, graph)
    low, _ = order_lower_bound(graph, costs, inplace=True)
    assert low <= order_lower_bound(graph, costs)[0]
    assert peak_bytes(graph, GreedyInPlace().plan(graph, once, 0, costs), costs) >= low
    if not plan.recomputed:
        assert peak_bytes(graph, plan, costs) >= low


def test_an_op_in_place_needs_its_result_once():
    built = Builder()
    built.op("a", makes=[("x", 10)])
    built.op("relu", ["x"], [("y", 10)], inplace=["x"])
    graph = built.graph("y")
    assert order_lower_bound(graph, Costs.unit(graph)) == (20, 1)
    assert order_lower_bound(graph, Costs.unit(graph), inplace=True) == (10, 0)


@settings(max_examples=60)
@given(randoms)
def test_the_bound_is_the_same_from_the_end(rng: random.Random):
    _, _, problem = random_problem(rng)
    assert required_bytes(problem.reverse()).tolist() == required_bytes(problem).tolist()[::-1]


@settings(max_examples=60)
@given(randoms)
def test_no_set_between_two_has_fewer_bytes_and_it_is_the_largest(rng: random.Random):
    graph, _, problem = random_problem(rng, 8)
    order = random_order(graph, rng)
    low, high = sorted(rng.choices(range(len(order) + 1), k=2))
    ran = sum(1 << op for op in order[:low])
    barred = sum(1 << op for op in order[high:])
    least = least_live_set(problem, ran, barred)
    between = [ops for ops in sets(problem) if ops & ran == ran and not ops & barred]
    assert least in between
    fewest = min(live_bytes(problem, ops) for ops in between)
    assert live_bytes(problem, least) == fewest
    assert all(ops & ~least == 0 for ops in between if live_bytes(problem, ops) == fewest)
