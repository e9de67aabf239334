"""The compiled search against the Python one and the simulator; both keep what the protocol promises."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import native
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.recompute import compiled, greedy
from autotune.planners.recompute.compiled import CompiledSearch
from autotune.planners.recompute.editable_order import EditableOrder
from autotune.planners.recompute.greedy import GreedyEviction
from autotune.planners.recompute.search import PythonSearch, Search, start_search
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, random_graph, random_plan, training_chain
from tests.planners import synthetic
from tests.planners.recompute.test_runs import during

loaded = compiled.load_search()
needs_compiler = pytest.mark.skipif(loaded is None, reason="there is no g++ to build the search with")
SEARCHES = [pytest.param(PythonSearch, id="python"), pytest.param(CompiledSearch, id="compiled", marks=needs_compiler)]


def task(rng: random.Random) -> tuple[TrainGraph, Costs, EditableOrder]:
    graph = random_graph(rng, 14)
    costs = Costs(tuple(rng.choice([0.5, 1.0]) for _ in graph.ops), tuple(rng.choice([0, 9]) for _ in graph.ops))
    return graph, costs, EditableOrder(graph, random_plan(graph, rng, offload=False).order, costs)


def open_search(kind: Callable[..., Search], runs: EditableOrder) -> Search:
    return kind(runs) if kind is PythonSearch else kind(runs, loaded)


@needs_compiler
@settings(max_examples=80)
@given(rng=st.randoms(use_true_random=False))
def test_a_change_is_priced_and_refused_alike_in_both(rng: random.Random):
    """Evictions, their reverse and shifts one after the other, on orders that repeat already."""
    graph, _, runs = task(rng)
    search = CompiledSearch(runs, loaded)
    for _ in range(8):
        limit = runs.limit = rng.randint(graph.static_bytes, max(runs.peak, graph.static_bytes))
        repeats = [run for run in runs.repeats() if rng.random() < 0.3][:2]
        anchor, chain = -1, ()
        if rng.random() < 0.7:
            anchor = rng.choice(runs.sequence.tolist())
            makers = [op for op in runs.sources[runs.op_of[anchor]] if runs.may_run_before(op, runs.position(anchor))]
            if not makers or anchor in repeats:
                continue
            chain = (rng.choice(makers),)
        edit = runs.weigh_edit(anchor, chain, repeats)
        place = runs.position(anchor) if anchor >= 0 else -1
        made = search.edit(limit, place, chain, [runs.position(run) for run in repeats])
        assert (made is None) == (edit is None)
        if edit is not None:
            assert made == (edit.area, pytest.approx(edit.seconds, abs=1e-9))
            runs.apply(edit)
        assert (search.order, search.bytes.tolist()) == (runs.order, runs.bytes.tolist())


@pytest.mark.parametrize("kind", SEARCHES)
@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_every_move_leaves_a_valid_order_that_keeps_its_promise(kind: Callable[..., Search], rng: random.Random):
    graph, costs, runs = task(rng)
    search = open_search(kind, runs)

    def holds(made: Search) -> None:
        check(graph, Plan(made.order))
        assert made.peak == max(during(graph, made.order, costs), default=graph.static_bytes)
        assert made.seconds == pytest.approx(sum(costs.seconds[op] for op in made.order))

    search.fit(rng.randint(graph.static_bytes, max(search.peak, graph.static_bytes)), 1.5, 0.3, 1)
    holds(search)
    limit, seconds = search.peak, search.seconds
    search.undo(limit)
    holds(search)
    assert (search.peak <= limit, search.seconds <= seconds + 1e-9) == (True, True)
    twin, seconds = search.copy(), search.seconds
    search.improve(limit, 1.5, 400, seed=3)
    holds(search)
    assert (search.peak <= limit, search.seconds <= seconds + 1e-9) == (True, True)
    holds(twin)
    assert twin.seconds == seconds
    twin.improve(limit, 1.5, 400, seed=3)
    assert twin.order == search.order


@pytest.mark.parametrize("kind", SEARCHES)
def test_where_no_op_takes_time_the_largest_is_evicted_first(kind: Callable[..., Search]):
    built = Builder()
    built.op("few", makes=[("x", 5)])
    built.op("many", makes=[("y", 50)])
    built.op("high", makes=[("z", 60)])
    built.op("low", ["z"], [("v", 1)])
    built.op("end", ["x", "y", "v"], [("out", 1)])
    graph = built.graph("out")
    costs = Costs((0.0,) * 5, (0,) * 5)
    search = open_search(kind, EditableOrder(graph, range(5), costs))
    search.fit(70, 1.5)
    assert search.order == (0, 2, 3, 1, 4)  # `many` waits, `few` need not


@needs_compiler
def test_moves_come_out_of_a_corner_that_eviction_alone_is_stuck_in():
    graph, costs = synthetic.gpt(2, 64, 4, 32, batch=4, vocabulary=64)
    search = start_search(graph, Plan.traced(graph).order, costs)
    search.fit(0, 1.5)
    stuck = search.peak
    search.undo(stuck)
    search.improve(graph.static_bytes, 1.5, 20_000)
    assert search.peak < stuck


@needs_compiler
@pytest.mark.parametrize("size", [300, 1200])
def test_orders_of_many_blocks_keep_exact_bytes(size: int):
    """Blocks split, whole blocks are added to at once, what did not help is taken back."""
    graph = training_chain(size)
    costs = Costs.unit(graph)
    search = CompiledSearch(EditableOrder(graph, Plan.traced(graph).order, costs), loaded)
    limit = search.peak - 7 * size
    search.fit(limit, 1.5)
    search.improve(limit, 1.5, 3000)
    check(graph, Plan(search.order))
    assert search.bytes.tolist() == during(graph, search.order, costs)
    assert search.peak <= limit


def test_without_a_compiler_it_plans_in_python_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(native._log, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(native.Library, "locate", lambda *_: (_ for _ in ()).throw(OSError("there is no g++")))
    compiled.load_search.cache_clear()
    try:
        graph = training_chain(8)
        costs = Costs.unit(graph)
        budget = peak_bytes(graph, Plan.traced(graph), costs) - 20
        for _ in range(2):
            made = GreedyEviction().plan(graph, Plan.traced(graph), budget, costs)
            assert peak_bytes(graph, made, costs) <= budget
        assert isinstance(start_search(graph, made.order, costs), PythonSearch)
    finally:
        compiled.load_search.cache_clear()
    assert said == ["recompute is planned in Python, slower and not as well: there is no g++. Install g++"]


@needs_compiler
@pytest.mark.parametrize("percent", [85, 60])
def test_the_compiled_search_fits_where_python_does_and_costs_at_most_a_twentieth_more(percent: int, monkeypatch):
    graph, costs = synthetic.resnet((1, 1, 1, 1), batch=4, side=64)
    traced = Plan.traced(graph)
    budget = peak_bytes(graph, traced, costs) * percent // 100
    fast = GreedyEviction().plan(graph, traced, budget, costs)
    monkeypatch.setattr(
        greedy, "start_search", lambda graph, order, costs: PythonSearch(EditableOrder(graph, order, costs))
    )
    slow = GreedyEviction().plan(graph, traced, budget, costs)
    fast_peak, slow_peak = (peak_bytes(graph, made, costs) for made in (fast, slow))
    assert fast_peak <= max(budget, slow_peak)
    again = [sum(costs.seconds[op] for op in made.order) - sum(costs.seconds) for made in (fast, slow)]
    assert slow_peak > budget or again[0] <= 1.05 * again[1]
