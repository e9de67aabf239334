import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.order import ORDERS
from autotune.planners.unfold import fold, unfold
from autotune.predict.simulate import peak_bytes, simulate
from autotune.testing.graphs import chain, random_graph, random_order, random_plan


def test_a_run_that_repeats_becomes_an_op_of_its_own_with_a_value_of_its_own():
    graph = chain(3)
    runs, costs = unfold(graph, (0, 1, 0, 2), Costs((5.0, 1.0, 1.0), (3, 0, 0)))
    assert [op.name for op in runs.ops] == ["op0", "op1", "op0", "op2"]
    assert [op.outputs for op in runs.ops] == [(0,), (1,), (2,), (3,)]
    assert runs.ops[3].inputs == (1,)
    assert runs.outputs == (3,)
    assert (costs.seconds, costs.scratch_bytes) == ((5.0, 1.0, 5.0, 1.0), (3, 0, 3, 0))


def test_a_run_that_nobody_reads_falls_away_but_never_the_last_of_its_op():
    graph = chain(3)
    order = (0, 1, 0, 2)
    assert fold(graph, order, range(4)) == (0, 1, 2)
    assert fold(graph, order, (2, 0, 1, 3)) == (0, 1, 2)


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_unfolded_runs_take_the_bytes_and_the_seconds_of_their_plan(rng: random.Random):
    graph = random_graph(rng)
    costs = Costs(tuple(rng.choice([0.5, 2.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    plan = Plan(random_plan(graph, rng, offload=False).order)
    runs, own = unfold(graph, plan.order, costs)
    assert peak_bytes(runs, Plan.traced(runs), own) == peak_bytes(graph, plan, costs)
    seen = simulate(graph, lower(graph, plan), costs).seconds
    assert abs(simulate(runs, lower(runs, Plan.traced(runs)), own).seconds - seen) < 1e-9


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_any_order_of_the_runs_folds_into_a_valid_plan_of_no_more_runs(rng: random.Random):
    graph = random_graph(rng)
    plan = Plan(random_plan(graph, rng, offload=False).order)
    runs, own = unfold(graph, plan.order, Costs.unit(graph))
    orders = [random_order(runs, rng), *(one().plan(runs, Plan.traced(runs), 0, own).order for one in ORDERS.values())]
    for order in orders:
        folded = Plan(fold(graph, plan.order, order))
        check(graph, folded)
        assert len(folded.order) <= len(plan.order)
