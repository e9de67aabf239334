"""The belief about costs: the simulator's numbers at first, the measured ones later, and never more certain than allowed."""

import itertools
import random

import numpy as np
import pytest

from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.moves.cost_belief import (
    LOWEST_WEIGHT,
    CostBelief,
    MeasuredPlan,
    correct_costs,
    describe_costs,
    learn_costs,
)
from autotune.predict.simulate import simulate
from autotune.testing.graphs import Builder, random_plan, training_chain

GRAPH = training_chain(5)
COSTS = Costs(tuple(1.0 + op.id % 2 for op in GRAPH.ops), (0,) * len(GRAPH.ops))


def measured(plan: Plan, factor: float = 1.0, noise: float = 1e-3, offset: float = 0.0) -> MeasuredPlan:
    """A plan whose recomputation takes `factor` times the profiled seconds."""
    estimate = simulate(GRAPH, lower(GRAPH, plan), COSTS)
    return MeasuredPlan(plan, estimate, offset + estimate.seconds + (factor - 1) * estimate.recompute_seconds, noise)


def drawn_plans(count: int) -> list[Plan]:
    rng = random.Random(3)
    return [Plan(random_plan(GRAPH, rng, repeat=6, offload=False).order) for _ in range(count)]


def features(plan: Plan) -> dict[str, float]:
    return describe_costs(GRAPH, COSTS, plan, simulate(GRAPH, lower(GRAPH, plan), COSTS))


def test_before_any_measurement_a_saving_is_the_simulators_and_is_as_uncertain_as_the_recomputation_that_changes():
    first, second = Plan((0, 1, 0, *range(2, len(GRAPH.ops)))), Plan.traced(GRAPH)
    assert set(first.order) == set(second.order)
    mean, spread = CostBelief().predict(features(first), features(second))
    assert mean == pytest.approx(COSTS.seconds[0])
    assert spread >= 0.3 * COSTS.seconds[0]
    assert CostBelief().predict(features(first), features(first)) == (0.0, 0.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_measured_plans_show_the_true_cost_of_recomputation(factor):
    plans = drawn_plans(12)
    belief = learn_costs(GRAPH, COSTS, [measured(plan, factor, offset=40.0) for plan in plans[:-2]])
    first, second = plans[-2:]
    expected = measured(first, factor).seconds - measured(second, factor).seconds
    mean, spread = belief.predict(features(first), features(second))
    assert mean == pytest.approx(expected, abs=max(0.2, 0.15 * abs(expected)))
    prior = CostBelief().predict(features(first), features(second))[1]
    assert spread < prior


def test_noisy_measurements_change_the_belief_less_than_exact_ones():
    plan = next(plan for plan in drawn_plans(20) if plan.recomputed)
    traced = measured(Plan.traced(GRAPH), noise=1e-6)
    target = GRAPH.ops[plan.order[next(at for at, op in enumerate(plan.order) if op in plan.order[:at])]].target
    exact = learn_costs(GRAPH, COSTS, [traced, measured(plan, 3.0, noise=1e-6)]).weight(target)
    noisy = learn_costs(GRAPH, COSTS, [traced, measured(plan, 3.0, noise=10.0)]).weight(target)
    assert 1.0 < noisy < 1.1 < exact


def test_a_measurement_never_makes_the_belief_less_certain():
    plans = drawn_plans(8)
    spreads = [
        learn_costs(GRAPH, COSTS, [measured(plan, 2.0, noise=0.5) for plan in plans[:count]]).predict(
            features(plans[-1]), features(plans[-2])
        )[1]
        for count in range(1, 7)
    ]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(spreads))


@pytest.mark.parametrize("noise", [1e-12, 1e-6, 1e-3, 1.0])
def test_the_covariance_is_symmetric_and_without_negative_variances(noise: float):
    belief = learn_costs(GRAPH, COSTS, [measured(plan, 2.0, noise) for plan in drawn_plans(10)] * 2)
    assert np.array_equal(belief.covariance, belief.covariance.T)
    variances = np.linalg.eigvalsh(belief.covariance)
    assert variances.min() > -1e-14 * variances.max()
    assert belief.covariance.diagonal().min() >= 0.0


def test_a_corrected_cost_is_never_zero_or_below():
    plans = [plan for plan in drawn_plans(20) if plan.recomputed][:4]
    belief = learn_costs(GRAPH, COSTS, [measured(plan, -20.0, noise=1e-6) for plan in plans])
    corrected = correct_costs(GRAPH, COSTS, belief)
    assert min(corrected) >= LOWEST_WEIGHT * min(COSTS.seconds)


def test_a_run_far_from_the_producer_of_its_input_is_counted_by_its_seconds():
    built = Builder()
    built.op("make", [], [("a", 4)])
    built.op("other", [], [("b", 4)])
    built.op("read", ["a"], [("c", 4)])
    graph, costs = built.graph("b", "c"), Costs((1.0, 2.0, 4.0), (0, 0, 0))

    def apart(order: tuple[int, ...]) -> float:
        plan = Plan(order)
        return describe_costs(graph, costs, plan, simulate(graph, lower(graph, plan), costs)).get("apart", 0.0)

    assert apart((0, 1, 2)) == 4.0
    assert apart((1, 0, 2)) == 0.0
