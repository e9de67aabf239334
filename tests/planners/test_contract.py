"""What every planner promises, on graphs nobody drew: a new planner in KINDS is held to it without a line here."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS
from autotune.planners.knobs import Choice, KnobValue
from autotune.predict.simulate import peak_bytes, simulate
from tests.graphs import random_graph, random_order, random_plan, training_chain

STORES = {
    "ssd": StoreCost(50.0, 25.0, 20.0, 10.0, pool_bytes=4),
    "ramdisk": StoreCost(500.0, 500.0, 400.0, 400.0, holds_memory=True),
    "host": StoreCost(500.0, 500.0, 400.0, 400.0),
}
RESTORES = {
    ("order", "traced"): "it restores the user's order",
    ("update", "at_end"): "it restores the place that clipping and scaling need",
    ("inplace", "never"): "it gives every output a buffer of its own",
}
"""Planners whose purpose it is to undo, which may raise the peak above the one they were given."""


def limits(knobs: Any) -> Iterator[dict[str, KnobValue]]:
    """Defaults, then each knob at each of its limits with the others as they come."""
    yield {}
    for name, knob in knobs.items():
        ends = knob.options if isinstance(knob, Choice) else (knob.low, knob.high)
        yield from ({name: end} for end in ends)


EVERY = [
    pytest.param(kind, name, knobs, id=" ".join([kind, name, *(f"{k}={v}" for k, v in knobs.items())]))
    for kind, planners in KINDS.items()
    for name, planner in planners.items()
    for knobs in limits(planner.knobs)
]
DEFAULT = [pytest.param(kind, name, id=f"{kind} {name}") for kind, found in KINDS.items() for name in found]
randoms = st.randoms(use_true_random=False)


def task(rng: random.Random, kind: str) -> tuple[TrainGraph, Plan, Costs]:
    """A graph, the plan that the kinds before this one might have made, and costs."""
    if rng.random() < 0.4:
        layers = rng.randint(1, 6 if kind == "offload" else 2)
        graph = training_chain(layers, rng.choice([3, 40]), rng.choice([1, 50]))
    else:
        graph = random_graph(rng, 9)
    costs = Costs(
        tuple(rng.choice([0.0, 0.5, 3.0]) for _ in graph.ops),
        tuple(rng.choice([0, 0, 7, 30]) for _ in graph.ops),
        STORES,
    )
    if kind in ("inplace", "offload"):
        return graph, random_plan(graph, rng, offload=False), costs
    return graph, Plan(random_order(graph, rng) if rng.random() < 0.5 else Plan.traced(graph).order), costs


@pytest.mark.parametrize(("kind", "name", "knobs"), EVERY)
@settings(max_examples=25)
@given(rng=randoms)
def test_the_plan_is_valid_the_same_again_and_never_higher(
    kind: str, name: str, knobs: dict[str, Any], rng: random.Random
):
    graph, plan, costs = task(rng, kind)
    before = peak_bytes(graph, plan, costs)
    budget = rng.choice([0, before // 2, before - 1])
    planner = KINDS[kind][name](**knobs)
    made = planner.plan(graph, plan, budget, costs)
    check(graph, made)
    lower(graph, made)
    assert planner.plan(graph, plan, budget, costs) == made
    if (kind, name) not in RESTORES:
        assert peak_bytes(graph, made, costs) <= before


@pytest.mark.parametrize(("kind", "name", "knobs"), EVERY)
@settings(max_examples=15)
@given(rng=randoms)
def test_a_budget_that_is_met_costs_no_seconds(kind: str, name: str, knobs: dict[str, Any], rng: random.Random):
    graph, plan, costs = task(rng, kind)
    before = simulate(graph, lower(graph, plan), costs)
    made = KINDS[kind][name](**knobs).plan(graph, plan, before.peak_bytes, costs)
    after = simulate(graph, lower(graph, made), costs)
    assert sorted(made.order) == sorted(plan.order)
    assert (after.seconds, after.transfer_bytes) == (pytest.approx(before.seconds), 0)


@pytest.mark.parametrize(("kind", "name"), DEFAULT)
@settings(max_examples=15)
@given(rng=randoms)
def test_a_kind_decides_its_own_part_only(kind: str, name: str, rng: random.Random):
    graph, plan, costs = task(rng, kind)
    made = KINDS[kind][name]().plan(graph, plan, 0, costs)
    if kind in ("order", "update"):
        assert sorted(made.order) == sorted(plan.order)
    if kind in ("inplace", "offload", "allocator"):
        assert made.order == plan.order
    if kind != "inplace":
        assert made.inplace == plan.inplace
    if kind != "offload":
        assert (made.offload, made.store, made.window) == (plan.offload, plan.store, plan.window)


@pytest.mark.parametrize(("kind", "name"), DEFAULT)
def test_knobs_are_the_fields_and_their_defaults_lie_inside(kind: str, name: str):
    planner = KINDS[kind][name]
    fields = {field.name: field.default for field in dataclasses.fields(planner)}  # type: ignore[arg-type]
    assert set(fields) == set(planner.knobs)
    assert all(planner.knobs[knob].holds(value) for knob, value in fields.items())
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        planner().anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "name"), DEFAULT)
def test_a_graph_without_ops_gets_the_empty_plan(kind: str, name: str):
    graph = TrainGraph("empty", (), (), (), ())
    made = KINDS[kind][name]().plan(graph, Plan(()), 0, Costs((), (), STORES))
    assert made.order == ()
