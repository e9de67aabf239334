import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.costs import Costs
from autotune.plan import Plan, check
from autotune.planners.recompute import windows
from autotune.planners.recompute.greedy import Greedy
from autotune.planners.recompute.runs import Runs
from autotune.planners.recompute.windows import Window, refine
from autotune.simulate import peak_bytes
from tests.graphs import Builder, random_graph, random_plan


def detour():
    """`dear` runs again before its second reader, although its result could have stayed: 30 bytes are free."""
    built = Builder("detour")
    built.op("dear", [], [("v", 10)])
    built.op("first", ["v"], [("a", 1)])
    built.op("big", ["a"], [("b", 50)])
    built.op("small", ["b"], [("c", 1)])
    built.op("second", ["v", "c"], [("d", 1)])
    graph = built.graph("d")
    return graph, (0, 1, 2, 3, 0, 4)


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_an_order_put_together_from_its_own_window_is_itself(rng: random.Random):
    graph = random_graph(rng, 14)
    order = random_plan(graph, rng, offload=False).order
    runs = Runs(graph, order, Costs.unit(graph))
    first = rng.randrange(len(graph.ops))
    window = Window(graph, order, Costs.unit(graph), first, first + rng.randint(1, 6))
    chains: list[list[int]] = [[] for _ in window.own]
    for slot, op in window.again:
        chains[slot].append(op)
    assert window.order_with(chains) == order
    active = sum(graph.values[value].nbytes for value in window.active if window.live(value, window.begin))
    own = runs.own[order[window.begin]]
    assert window.standing_bytes + active == runs.bytes[window.begin] - own


def test_without_ortools_the_order_stays_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(windows._log, "info", lambda text, *args: said.append(text % args))
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    graph, order = detour()
    assert refine(graph, order, Costs.unit(graph), 100, 4) == order
    assert said == ["recompute: 4 windows not solved, ortools is not installed; pip install autotune[cpsat]"]


def test_a_result_that_could_stay_is_not_made_twice():
    pytest.importorskip("ortools")
    graph, order = detour()
    assert refine(graph, order, Costs.unit(graph), 61, 1) == (0, 1, 2, 3, 4)
    assert refine(graph, order, Costs.unit(graph), 60, 1) == order


@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_windows_are_valid_and_never_dearer_or_higher_than_the_limit(rng: random.Random):
    pytest.importorskip("ortools")
    graph = random_graph(rng, 14)
    costs = Costs(tuple(rng.choice([0.0, 1.0, 3.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    order = random_plan(graph, rng, offload=False).order
    limit = peak_bytes(graph, Plan(order), costs) + rng.choice([0, 10])
    made = refine(graph, order, costs, limit, 3)
    check(graph, Plan(made))
    assert peak_bytes(graph, Plan(made), costs) <= limit
    assert sum(costs.seconds[op] for op in made) <= sum(costs.seconds[op] for op in order)


def test_a_plan_with_windows_is_no_dearer_than_one_without():
    graph = random_graph(random.Random(3), 14)
    costs = Costs.unit(graph)
    budget = peak_bytes(graph, Plan.traced(graph), costs) - 1
    plain = Greedy().plan(graph, Plan.traced(graph), budget, costs)
    refined = Greedy(windows=2).plan(graph, Plan.traced(graph), budget, costs)
    assert sum(costs.seconds[op] for op in refined.order) <= sum(costs.seconds[op] for op in plain.order)
