import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.planners.order import ORDERS
from autotune.planners.order.best import BestOrder, find_best_order
from autotune.planners.order.exact import ExactOrder
from autotune.predict.ordering import ordering_problem
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import chain, random_graph, random_order
from tests.planners import synthetic
from tests.planners.order.nets import alexnet, randwire
from tests.predict.test_order_bounds import optimum

MIB = 2**20
OTHERS = [name for name in ORDERS if name not in ("best", "traced")]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_other_planner_is_lower_and_the_bound_holds(rng: random.Random):
    graph = random_graph(rng, 9)
    costs = Costs((1.0,) * len(graph.ops), tuple(rng.choice([0, 0, 7, 30]) for _ in graph.ops))
    given_order = random_order(graph, rng)
    found = find_best_order(graph, costs, given_order)
    check(graph, Plan(found.order))
    assert found.peak_bytes == peak_bytes(graph, Plan(found.order), costs)
    assert found.lower_bound_bytes <= optimum(ordering_problem(graph, costs)) <= found.peak_bytes
    for name in OTHERS:
        assert found.peak_bytes <= peak_bytes(graph, ORDERS[name]().plan(graph, Plan(given_order), 0, costs), costs)


def test_alexnet_falls_to_the_gradient_of_its_largest_weight_and_what_that_reads():
    """144 MiB of gradient, 1.1 and 0.5 MiB that it is made of, and the loss: less than half of the traced order."""
    graph = alexnet(32)
    found = find_best_order(graph, Costs.unit(graph))
    assert found.proved
    assert found.peak_bytes == 4 * (9216 * 4096 + 32 * 9216 + 32 * 4096) + 4
    assert found.peak_bytes < 145.7 * MIB
    assert peak_bytes(graph, Plan.traced(graph), Costs.unit(graph)) > 254 * MIB


@pytest.mark.parametrize("blocks", [(3, 4, 6, 3), (3, 8, 36, 3)])
def test_a_resnets_training_step_is_proved_without_a_search(blocks: tuple[int, ...]):
    graph, costs = synthetic.resnet(blocks, batch=2)
    found = find_best_order(graph, costs)
    assert (found.proved, found.states) == (True, 0)
    assert found.peak_bytes < peak_bytes(graph, Plan.traced(graph), costs)


def test_an_order_that_cannot_be_better_comes_back_unchanged():
    graph = chain(5)
    assert find_best_order(graph, Costs.unit(graph)).order == (0, 1, 2, 3, 4)


def test_a_randomly_wired_training_step_is_within_three_percent_of_its_bound():
    graph = randwire(0, train=True)
    found = find_best_order(graph, Costs.unit(graph), effort=3000)
    assert found.peak_bytes <= 1.03 * found.lower_bound_bytes
    assert found.peak_bytes < 0.8 * peak_bytes(graph, Plan.traced(graph), Costs.unit(graph))


@pytest.mark.parametrize("effort", [100, 1000, 10_000])
def test_more_effort_than_asked_is_not_spent(effort: int):
    graph = randwire(3, train=True)
    assert find_best_order(graph, Costs.unit(graph), effort=effort).states <= effort


def test_a_search_of_windows_goes_on_where_the_whole_is_too_large():
    # the exact search of the whole gives up on so few states; stretches around the peak are still put right
    graph = randwire(1, stages=1)
    costs = Costs.unit(graph)
    exact = peak_bytes(graph, ExactOrder(states=100).plan(graph, Plan.traced(graph), 0, costs), costs)
    assert peak_bytes(graph, BestOrder(effort=400).plan(graph, Plan.traced(graph), 0, costs), costs) < exact
