import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import Role, TrainGraph
from autotune.ir.plan import Plan, Swap, events
from autotune.ir.schedule import layer_numbers, leaves_memory, lower
from autotune.planners.offload.keep import KeepResident
from autotune.planners.offload.window import OffloadWindow
from autotune.predict.simulate import peak_bytes, simulate
from autotune.testing.graphs import Builder, random_graph, random_plan, training_chain

SSD = StoreCost(50.0, 25.0, 20.0, 10.0)


def with_store(graph: TrainGraph, store: StoreCost = SSD) -> Costs:
    return dataclasses.replace(Costs.unit(graph), stores={"ssd": store, "ramdisk": store})


def two_long_lives() -> TrainGraph:
    """`old` (10 bytes, away longest) and `young` (30 bytes) both live across `peak`, which makes 100 bytes."""
    built = Builder("two_long_lives")
    built.op("old", makes=[("old", 10)])
    built.op("young", makes=[("young", 30)])
    for i in range(3):
        built.op(f"wait{i}", makes=[(f"w{i}", 0)])
    built.op("peak", makes=[("big", 100)])
    for i in range(3):
        built.op(f"rest{i}", makes=[(f"r{i}", 0)])
    built.op("use_young", ["young"], [("y", 0)])
    built.op("use_old", ["old"], [("o", 0)])
    return built.graph("y", "o")


def away_at(budget: int, **knobs: object) -> list[str]:
    graph = two_long_lives()
    made = OffloadWindow(**knobs).plan(graph, Plan.traced(graph), budget, with_store(graph))  # type: ignore[arg-type]
    return [graph.values[swap.value].name for swap in made.offload]


def test_a_budget_that_is_met_sends_nothing_away():
    assert away_at(140) == []


def test_longest_away_goes_first_and_only_as_much_as_the_budget_needs():
    assert away_at(139) == ["old"]
    assert away_at(110) == ["young"]  # `old` went first, and proved needless once `young` had to go
    assert away_at(100) == ["old", "young"]


def test_a_budget_out_of_reach_gets_the_lowest_peak():
    assert away_at(0) == ["old", "young"]


def test_what_the_store_takes_longer_to_begin_than_to_move_leaves_last():
    graph = two_long_lives()
    costs = with_store(graph, dataclasses.replace(SSD, latency_seconds=0.4))  # 20 bytes, written meanwhile
    for budget, names in ((139, ["young"]), (110, ["young"]), (100, ["old", "young"])):
        made = OffloadWindow().plan(graph, Plan.traced(graph), budget, costs)
        assert [graph.values[swap.value].name for swap in made.offload] == names


def test_the_last_part_of_500_of_the_lowest_peak_is_worth_no_transfer():
    graph = two_long_lives()
    costs = with_store(graph)
    wide = dataclasses.replace(graph, values=tuple(dataclasses.replace(v, nbytes=200 * v.nbytes) for v in graph.values))
    few = dataclasses.replace(
        wide, values=tuple(dataclasses.replace(v, nbytes=40 if v.name == "old" else v.nbytes) for v in wide.values)
    )
    assert len(OffloadWindow().plan(wide, Plan.traced(wide), 0, costs).offload) == 2
    assert [swap.value for swap in OffloadWindow().plan(few, Plan.traced(few), 0, costs).offload] == [1]
    exact = OffloadWindow().plan(few, Plan.traced(few), 20_000, costs)
    assert peak_bytes(few, exact, costs) == 20_000, "a budget that can be kept is kept to the byte"


def test_a_share_bounds_the_bytes_that_leave():
    assert away_at(0, share=0.0) == []
    assert away_at(0, share=0.25) == ["old"]  # 10 of 40 bytes
    assert away_at(0, share=0.75) == ["old"]
    assert away_at(0, share=1.0) == ["old", "young"]


def test_a_wide_window_keeps_what_a_narrow_one_sends_away():
    assert away_at(0, window=3) == ["old", "young"]
    assert away_at(0, window=4) == ["old"]
    assert away_at(0, window=5) == []


def test_a_ramdisk_in_the_devices_own_memory_is_left_alone():
    graph = two_long_lives()
    costs = with_store(graph, dataclasses.replace(SSD, holds_memory=True))
    assert OffloadWindow(store="ramdisk").plan(graph, Plan.traced(graph), 0, costs) == Plan.traced(graph)


@pytest.mark.parametrize(("pool", "names"), [(39, 2), (40, 0), (1000, 0)])
def test_bounce_buffers_as_large_as_what_leaves_are_not_worth_it(pool: int, names: int):
    graph = two_long_lives()
    costs = with_store(graph, dataclasses.replace(SSD, pool_bytes=pool))
    assert len(OffloadWindow().plan(graph, Plan.traced(graph), 0, costs).offload) == names


def test_bounce_buffers_count_against_the_budget():
    graph = two_long_lives()
    costs = with_store(graph, dataclasses.replace(SSD, pool_bytes=5))
    made = OffloadWindow().plan(graph, Plan.traced(graph), 132, costs)  # without them `old` alone would do: 130
    assert peak_bytes(graph, made, costs) == 140 - 30 + 5


def test_a_value_that_is_not_there_at_the_peak_stays():
    # `early` is idle for long too, but comes back before the peak
    built = Builder()
    built.op("early", makes=[("early", 50)])
    for i in range(6):
        built.op(f"wait{i}", makes=[(f"w{i}", 0)])
    built.op("use_early", ["early"], [("e", 0)])
    built.op("peak", makes=[("big", 100)])
    graph = built.graph("e")
    assert OffloadWindow().plan(graph, Plan.traced(graph), 60, with_store(graph)).offload == ()


def test_empty_values_never_travel():
    built = Builder()
    built.op("empty", makes=[("empty", 0)])
    for i in range(6):
        built.op(f"op{i}", makes=[(f"v{i}", 10)])
    built.op("use", ["empty"], [("y", 0)])
    graph = built.graph("y")
    assert OffloadWindow().plan(graph, Plan.traced(graph), 0, with_store(graph)).offload == ()


def test_a_gap_that_recompute_bridges_is_left_to_it():
    built = Builder()
    built.op("make", makes=[("v", 30)])
    built.op("first", ["v"], [("f", 0)])
    for i in range(8):
        built.op(f"op{i}", makes=[(f"v{i}", 100 if i == 4 else 0)])
    built.op("use", ["v"], [("y", 0)])
    graph = built.graph("y")
    recomputed = Plan((*range(10), 0, 10))
    assert OffloadWindow().plan(graph, recomputed, 0, with_store(graph)).offload == ()
    leaves = OffloadWindow().plan(graph, Plan.traced(graph), 0, with_store(graph)).offload
    assert [(swap.value, swap.gap) for swap in leaves] == [(0, 1)]


def test_what_was_offloaded_before_is_decided_anew():
    graph = two_long_lives()
    before = Plan(Plan.traced(graph).order, (Swap(0, 0),), 2, "ramdisk")
    assert KeepResident().plan(graph, before, 0, with_store(graph)) == Plan.traced(graph)
    made = OffloadWindow().plan(graph, before, 110, with_store(graph))
    assert [(swap.value, swap.gap) for swap in made.offload] == [(1, 0)]
    assert (made.window, made.store) == (1, "ssd")


def test_on_a_training_chain_only_the_window_stays():
    graph = training_chain(30, nbytes=100, param_bytes=1)
    made = OffloadWindow().plan(graph, Plan.traced(graph), 0, with_store(graph))
    seen = simulate(graph, lower(graph, made), with_store(graph))
    assert seen.peak_bytes - graph.static_bytes < 8 * 100
    assert seen.transfer_bytes == 2 * sum(graph.values[swap.value].nbytes for swap in made.offload)


def test_on_equal_layers_each_layer_of_the_window_costs_one_layer_of_memory():
    graph = training_chain(40, nbytes=100, param_bytes=0)
    costs = with_store(graph)
    peaks = [
        peak_bytes(graph, OffloadWindow(window).plan(graph, Plan.traced(graph), 0, costs), costs)
        for window in range(1, 9)
    ]
    assert [wider - peak for peak, wider in itertools.pairwise(peaks)] == [100] * 7
    # the window, one being saved, one being loaded, and two gradients beside them; the loss takes a byte
    assert peaks[0] - graph.static_bytes <= (1 + 2 + 2) * 100 + 1


def test_weights_and_state_leave_only_where_asked_for_and_from_their_size_on():
    graph = training_chain(12, nbytes=100, param_bytes=50)
    costs = with_store(graph)
    roles = {}
    for what, least in (("activations", 1), ("all", 1), ("all", 51), ("all", 101)):
        made = OffloadWindow(what=what, least_bytes=least).plan(graph, Plan.traced(graph), 0, costs)
        roles[what, least] = {graph.values[swap.value].role for swap in made.offload}
    assert roles["activations", 1].isdisjoint({Role.PARAM, Role.STATE})
    assert roles["all", 1] >= {Role.PARAM, Role.STATE}
    assert roles["all", 51].isdisjoint({Role.PARAM, Role.STATE})
    assert roles["all", 51]
    assert roles["all", 101] == set()
    own = dataclasses.replace(costs, stores={"ssd": dataclasses.replace(costs.stores["ssd"], least_own_bytes=51)})
    kept = OffloadWindow(what="all").plan(graph, Plan.traced(graph), 0, own)
    assert {graph.values[swap.value].role for swap in kept.offload}.isdisjoint({Role.PARAM, Role.STATE})
    lower_peak, peak = (
        peak_bytes(graph, OffloadWindow(what=what).plan(graph, Plan.traced(graph), 0, costs), costs)
        for what in ("all", "activations")
    )
    assert lower_peak < peak


def gaps_of(graph: TrainGraph, plan: Plan, window: int) -> list[Swap]:
    layers = layer_numbers(graph, plan.order)
    return [
        Swap(value.id, gap)
        for value, happened in zip(graph.values, events(graph, plan.order), strict=True)
        if value.id not in graph.static
        for gap, ((here, _), (there, again)) in enumerate(itertools.pairwise(happened))
        if not again and leaves_memory(layers[here], layers[there], window)
    ]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(1, 2))
def test_with_no_budget_to_meet_no_subset_of_gaps_peaks_lower(rng: random.Random, window: int):
    graph = random_graph(rng, 14)
    plan = random_plan(graph, rng, offload=False)
    costs = with_store(graph)
    gaps = gaps_of(graph, plan, window)[:6]
    subsets = (s for n in range(len(gaps) + 1) for s in itertools.combinations(gaps, n))
    lowest = min(peak_bytes(graph, Plan(plan.order, s, window, "ssd"), costs) for s in subsets)
    made = OffloadWindow(window=window).plan(graph, plan, 0, costs)
    assert peak_bytes(graph, made, costs) <= lowest


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_every_value_that_leaves_is_needed_for_the_budget_or_the_peak(rng: random.Random):
    graph = training_chain(rng.randint(3, 12), rng.choice([5, 50])) if rng.random() < 0.5 else random_graph(rng, 14)
    plan, costs = random_plan(graph, rng, offload=False), with_store(graph)
    budget = rng.randint(graph.static_bytes, peak_bytes(graph, plan, costs))
    made = OffloadWindow(share=rng.choice([0.5, 1.0])).plan(graph, plan, budget, costs)
    reached = max(budget, peak_bytes(graph, made, costs))
    for swap in made.offload:
        fewer = tuple(other for other in made.offload if other != swap)
        assert peak_bytes(graph, dataclasses.replace(made, offload=fewer), costs) > reached
