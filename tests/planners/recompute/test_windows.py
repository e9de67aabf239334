import random
import sys
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.planners.recompute import cpsat as windows
from autotune.planners.recompute import greedy
from autotune.planners.recompute.cpsat import OpWindow, refine
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, random_graph, random_plan, training_chain


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
def test_an_order_put_together_from_its_own_window_is_valid_and_runs_as_much(rng: random.Random):
    """What runs again may move to the next run that touches the window; bytes outside of it are what is left."""
    graph = random_graph(rng, 14)
    order = random_plan(graph, rng, offload=False).order
    free = [op.id for op in graph.ops if op.repeatable and not op.random and not op.writes and op.outputs]
    window = OpWindow(graph, order, Costs.unit(graph), tuple(rng.sample(free, min(len(free), 4))))
    if all(at < window.slots[-1] for at in window.loose):
        chains: list[list[int]] = [[] for _ in window.slots]
        for at in window.loose:
            chains[bisect_left(window.slots, at)].append(order[at])
        assert sorted(window.order_with(chains)) == sorted(order)
        assert set(window.order_with([[] for _ in window.slots])) == set(order)
    live = [
        sum(graph.values[value].nbytes for value in window.values if window.runs.is_live(value, at))
        for at in range(len(order))
    ]
    for slot, at in enumerate(window.slots):
        assert window.before(slot) + live[at] == window.runs.bytes[at] - window.runs.op_bytes[order[at]]


def test_without_ortools_the_order_stays_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(windows._log, "info", lambda text, *args: said.append(text % args))
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    graph, order = detour()
    assert refine(graph, order, Costs.unit(graph), 100, 4) == order
    assert said == [
        "recompute: 4 windows not solved, ortools is not installed; "
        "pip install 'autotune-training[cpsat]', or in a checkout: pip install '.[cpsat]'"
    ]


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


def test_a_plan_with_windows_is_what_they_make_of_the_plan_without(monkeypatch: pytest.MonkeyPatch):
    graph = training_chain(8)
    costs = Costs.unit(graph)
    budget = peak_bytes(graph, Plan.traced(graph), costs) - 20
    plain = GreedyEviction().plan(graph, Plan.traced(graph), budget, costs)
    assert plain.recomputed
    asked: list[object] = []

    def refined(*question: object) -> tuple[int, ...]:
        asked.append(question)
        return Plan.traced(graph).order

    monkeypatch.setattr(greedy, "refine", refined)
    assert GreedyEviction(windows=2).plan(graph, Plan.traced(graph), budget, costs) == Plan.traced(graph)
    assert asked == [(graph, plain.order, costs, max(budget, peak_bytes(graph, plain, costs)), 2)]


def test_a_result_that_is_recomputed_before_its_first_reader_is_computed_once(monkeypatch: pytest.MonkeyPatch):
    built = Builder("late")
    built.op("cheap", [], [("u", 10)])
    built.op("dear", [], [("v", 1)])
    built.op("first", ["v"], [("a", 1)])
    built.op("big", ["a"], [("b", 50)])
    built.op("small", ["b"], [("c", 1)])
    built.op("second", ["u", "v", "c"], [("d", 1)])
    graph, order = built.graph("d"), (0, 1, 2, 3, 4, 1, 5)
    costs = Costs((0.1, 5.0, 1.0, 1.0, 1.0, 1.0), (0,) * 6)

    def solve(cp: object, window: OpWindow, limit: int, effort: float) -> list[list[int]]:
        return [[0] if order[slot] == 5 else [] for slot in window.slots]

    monkeypatch.setattr(windows, "_solve", solve)
    refined = refine(graph, order, costs, 55, 1)
    check(graph, Plan(refined))
    assert sorted(refined) == [0, 1, 2, 3, 4, 5]
