import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import PlanError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.reorder.again import ReorderRuns
from autotune.planners.update.with_gradient import WithGradient
from autotune.predict.simulate import Estimate, peak_bytes, simulate
from autotune.testing.graphs import Builder, random_graph, random_plan, training_chain
from tests.planners import synthetic


def rank(seen: Estimate, budget: int) -> tuple[int, float]:
    return max(0, seen.peak_bytes - budget), seen.seconds


def test_a_recomputation_that_another_order_makes_needless_is_taken_back():
    """`a` of 30 was dropped for `wide`, which with its scratch needs 50; `wide` first needs no room beside it."""
    built = Builder()
    built.value("x", 1, Role.BATCH)
    built.op("make", ["x"], [("a", 30)])
    built.op("peek", ["a"], [("p", 1)])
    built.op("wide", ["x"], [("top", 20)])
    built.op("shrink", ["top"], [("small", 1)])
    built.op("use", ["a", "p", "small"], [("y", 1)], phase=Phase.BACKWARD)
    graph = built.graph("y")
    plan = Plan((0, 1, 2, 3, 0, 4))
    costs = Costs((1.0,) * 5, (0, 0, 30, 0, 0))
    assert peak_bytes(graph, plan, costs) == 1 + 1 + 50
    made = ReorderRuns().plan(graph, plan, 1 + 51, costs)
    check(graph, made)
    assert made.recomputed == 0
    assert peak_bytes(graph, made, costs) <= 1 + 51


@pytest.mark.parametrize("percent", [80, 60])
def test_after_greedy_it_is_never_slower_nor_above_the_budget(percent: int):
    graph, costs = synthetic.gpt(3, 64, 4, 32, batch=4, vocabulary=64)
    placed = WithGradient().plan(graph, Plan.traced(graph), 0, costs)
    budget = peak_bytes(graph, placed, costs) * percent // 100
    plan = GreedyEviction().plan(graph, placed, budget, costs)
    made = ReorderRuns().plan(graph, plan, budget, costs)
    check(graph, made)
    after, before = (simulate(graph, lower(graph, one), costs) for one in (made, plan))
    assert rank(after, budget) <= rank(before, budget)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_plan_that_repeats_becomes_a_valid_one_that_is_no_worse(rng: random.Random):
    graph = random_graph(rng)
    costs = Costs(tuple(rng.choice([0.0, 1.0, 3.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    plan = Plan(random_plan(graph, rng, offload=False).order)
    before = simulate(graph, lower(graph, plan), costs)
    budget = rng.randint(0, before.peak_bytes + 5)
    made = ReorderRuns().plan(graph, plan, budget, costs)
    check(graph, made)
    assert made == ReorderRuns().plan(graph, plan, budget, costs)
    assert rank(simulate(graph, lower(graph, made), costs), budget) <= rank(before, budget)


def test_a_plan_that_offloads_is_refused():
    graph = training_chain(4)
    plan = Plan(Plan.traced(graph).order, (Swap(graph.ops[0].outputs[0], 0),), 1, "ssd")
    with pytest.raises(PlanError, match="recompute before offload"):
        ReorderRuns().plan(graph, plan, 0, Costs.unit(graph))
