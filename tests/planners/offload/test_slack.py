import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.planners.offload.slack import stretch_transfers
from autotune.predict.simulate import peak_bytes, simulate
from autotune.testing.graphs import Builder, random_graph, random_plan

SSD = StoreCost(50.0, 25.0, 20.0, 10.0)


def with_store(graph: TrainGraph, store: StoreCost = SSD) -> Costs:
    return dataclasses.replace(Costs.unit(graph), stores={"ssd": store})


def long_gap(*beside: int) -> TrainGraph:
    """`v0` of 100 bytes is made by op0 and read by the last op; those between make so many bytes for a moment."""
    built = Builder("long_gap")
    built.op("op0", makes=[("v0", 100)])
    for at, nbytes in enumerate(beside, 1):
        built.op(f"op{at}", [f"v{at - 1}"] if at > 1 else [], [(f"v{at}", nbytes)])
    built.op("last", [f"v{len(beside)}", "v0"], [("end", 0)])
    return built.graph("end")


def away_v0(graph: TrainGraph) -> Plan:
    return Plan(Plan.traced(graph).order, (Swap(0, 0),), 1, "ssd")


def test_a_load_begins_as_early_as_it_takes_where_memory_is_free():
    # the read takes 4 of the 9 s between: at the window's single layer 3 of them would be waited for
    graph = long_gap(*(0,) * 9)
    costs = with_store(graph, dataclasses.replace(SSD, write_bytes_per_second=1e9))
    made = stretch_transfers(graph, away_v0(graph), 100, costs)
    assert simulate(graph, lower(graph, away_v0(graph)), costs).stall_seconds == pytest.approx(3)
    assert made.offload == (Swap(0, 0, 0, 3),)
    assert simulate(graph, lower(graph, made), costs).stall_seconds == pytest.approx(0)


def test_a_save_may_last_as_long_as_it_takes_where_memory_is_free():
    # written in 5 s, from 1 to 6: beside op1 to op5
    graph = long_gap(*(0,) * 9)
    costs = with_store(graph, dataclasses.replace(SSD, write_bytes_per_second=20.0, read_bytes_per_second=1e9))
    made = stretch_transfers(graph, away_v0(graph), 100, costs)
    assert simulate(graph, lower(graph, away_v0(graph)), costs).stall_seconds == pytest.approx(4)
    assert made.offload[0].late in (4, 5)
    assert simulate(graph, lower(graph, made), costs).stall_seconds == pytest.approx(0)


def test_neither_goes_where_another_needs_the_memory():
    # 50 bytes at op2 stop the save, 50 at op8 the load: in between it is away as before
    graph = long_gap(0, 50, 0, 0, 0, 0, 50, 50, 0)
    costs = with_store(graph)
    made = stretch_transfers(graph, away_v0(graph), 100, costs)
    assert made == away_v0(graph)
    roomy = stretch_transfers(graph, away_v0(graph), 200, costs)
    assert simulate(graph, lower(graph, roomy), costs).seconds < simulate(graph, lower(graph, made), costs).seconds


def test_a_load_never_overtakes_one_that_is_needed_earlier():
    built = Builder("two")
    for name in ("a", "b"):
        built.op(name, makes=[(name, 100)])
    for at in range(10):
        built.op(f"op{at}", makes=[(f"v{at}", 0)])
    for name in ("a", "b"):
        built.op(f"use_{name}", [name], [(f"end_{name}", 0)])
    graph = built.graph("end_a", "end_b")
    costs = with_store(graph)
    a, b = stretch_transfers(
        graph, Plan(Plan.traced(graph).order, (Swap(0, 0), Swap(1, 0)), 1, "ssd"), 200, costs
    ).offload
    assert 12 - 1 - a.early <= 13 - 1 - b.early
    assert a.early > b.early - 1


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.floats(1.0, 200.0), st.integers(0, 300))
def test_a_stretched_plan_is_valid_no_slower_and_keeps_the_limit(rng: random.Random, rate: float, more: int):
    graph = random_graph(rng, 14)
    plan = random_plan(graph, rng)
    bare = dataclasses.replace(plan, offload=tuple(Swap(swap.value, swap.gap) for swap in plan.offload))
    if not bare.offload:
        return
    costs = with_store(graph, StoreCost(rate, rate, rate / 2, rate / 2, 0.1, contention=1.2, slowed=1.3))
    limit = peak_bytes(graph, bare, costs) + more
    made = stretch_transfers(graph, bare, limit, costs)
    check(graph, made)
    assert peak_bytes(graph, made, costs) <= limit
    assert simulate(graph, lower(graph, made), costs).seconds <= simulate(graph, lower(graph, bare), costs).seconds
    assert [(swap.value, swap.gap) for swap in made.offload] == [(swap.value, swap.gap) for swap in bare.offload]
