"""Run a planner through the contract that every planner of the project keeps, on random graphs.

Subclass `PlannerContract` in a test module and name the kind and the planner; pytest collects its tests:

    class TestLateOpsFirst(PlannerContract):
        kind = "order"
        planner = LateOpsFirst
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.ir.check import check
from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.base import Planner
from autotune.planners.knobs import Choice, Knob, KnobValue
from autotune.predict.simulate import peak_bytes, simulate
from autotune.testing.graphs import random_graph, random_order, random_plan, training_chain

STORES: Mapping[str, StoreCost] = {
    "ssd": StoreCost(50.0, 25.0, 20.0, 10.0, pool_bytes=4),
    "ramdisk": StoreCost(500.0, 500.0, 400.0, 400.0, holds_memory=True),
    "host": StoreCost(500.0, 500.0, 400.0, 400.0),
}
"""Costs of the stores that are open in every contract test, slow in bytes per second: the graphs have few bytes."""

_RANDOM = st.randoms(use_true_random=False)
_INHERITED = [HealthCheck.differing_executors]  # one test runs in every subclass


def knob_limits(knobs: Mapping[str, Knob]) -> Iterator[dict[str, KnobValue]]:
    """Yield knob values to test: all defaults, then each knob at each of its limits or options."""
    yield {}
    for name, knob in knobs.items():
        ends = knob.options if isinstance(knob, Choice) else (knob.low, knob.high)
        yield from ({name: end} for end in ends)


def random_task(rng: random.Random, kind: str) -> tuple[TrainGraph, Plan, Costs]:
    """Return a graph, a plan as the kinds before `kind` might leave it, and costs."""
    if rng.random() < 0.4:
        layers = rng.randint(1, 6 if kind == "offload" else 2)
        graph = training_chain(layers, rng.choice([3, 40]), rng.choice([1, 50]))
    else:
        graph = random_graph(rng, 9)
    costs = Costs(
        tuple(rng.choice([0.0, 0.5, 3.0]) for _ in graph.ops),
        tuple(rng.choice([0, 0, 7, 30]) for _ in graph.ops),
        dict(STORES),
    )
    if kind in ("inplace", "offload"):
        return graph, random_plan(graph, rng, offload=False), costs
    return graph, Plan(random_order(graph, rng) if rng.random() < 0.5 else Plan.traced(graph).order), costs


class PlannerContract:
    """Tests that hold for every planner. Set `kind` and `planner` in a subclass whose name begins with `Test`."""

    kind: ClassVar[str]
    """Planner kind: a key of `autotune.planners.KINDS`."""
    planner: ClassVar[type[Planner]]
    """Planner under test: a frozen dataclass with defaults for all fields."""
    may_raise_peak: ClassVar[str] = ""
    """Reason why the planner may raise the peak; empty for a planner that must not."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that has the argument `knobs` once with the defaults and once for each limit of each knob."""
        if "knobs" in metafunc.fixturenames:
            every = list(knob_limits(self.planner.knobs))
            ids = [" ".join(f"{name}={value}" for name, value in knobs.items()) or "defaults" for knobs in every]
            metafunc.parametrize("knobs", every, ids=ids)

    @settings(report_multiple_bugs=False, max_examples=25, suppress_health_check=_INHERITED)
    @given(rng=_RANDOM)
    def test_the_plan_is_valid_deterministic_and_not_higher(self, knobs: dict[str, Any], rng: random.Random) -> None:
        graph, plan, costs = random_task(rng, self.kind)
        before = peak_bytes(graph, plan, costs)
        budget = rng.choice([0, before // 2, before - 1])
        planner = self.planner(**knobs)
        result = planner.plan(graph, plan, budget, costs)
        check(graph, result)
        lower(graph, result)
        assert planner.plan(graph, plan, budget, costs) == result, "two calls return different plans"
        if not self.may_raise_peak:
            after = peak_bytes(graph, result, costs)
            assert after <= before, f"the peak rises from {before} to {after} bytes for a budget of {budget}"

    @settings(report_multiple_bugs=False, max_examples=15, suppress_health_check=_INHERITED)
    @given(rng=_RANDOM)
    def test_a_budget_that_is_met_costs_no_seconds(self, knobs: dict[str, Any], rng: random.Random) -> None:
        graph, plan, costs = random_task(rng, self.kind)
        before = simulate(graph, lower(graph, plan), costs)
        result = self.planner(**knobs).plan(graph, plan, before.peak_bytes, costs)
        after = simulate(graph, lower(graph, result), costs)
        assert sorted(result.order) == sorted(plan.order), "a plan that fits gets other runs"
        assert after.transfer_bytes == 0, "a plan that fits moves values to a store"
        assert after.seconds == pytest.approx(before.seconds), "a plan that fits becomes slower or faster"

    @settings(report_multiple_bugs=False, max_examples=15, suppress_health_check=_INHERITED)
    @given(rng=_RANDOM)
    def test_a_kind_decides_its_own_part_only(self, rng: random.Random) -> None:
        graph, plan, costs = random_task(rng, self.kind)
        result = self.planner().plan(graph, plan, 0, costs)
        if self.kind in ("order", "update"):
            assert sorted(result.order) == sorted(plan.order), f"a planner of {self.kind} repeats or drops ops"
        if self.kind in ("inplace", "offload", "allocator"):
            assert result.order == plan.order, f"a planner of {self.kind} changes the order"
        if self.kind != "inplace":
            assert result.inplace == plan.inplace, f"a planner of {self.kind} changes inplace"
        if self.kind != "offload":
            offload = result.offload, result.store, result.window
            assert offload == (plan.offload, plan.store, plan.window), f"a planner of {self.kind} changes offload"

    def test_knobs_are_the_fields_and_their_defaults_lie_inside(self) -> None:
        fields = {field.name: field.default for field in dataclasses.fields(self.planner)}  # type: ignore[arg-type]
        assert set(fields) == set(self.planner.knobs), "the fields differ from the keys of `knobs`"
        for name, value in fields.items():
            knob = self.planner.knobs[name]
            assert knob.contains(value), f"the default of {name} is {value!r}; it must be {knob}"
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            self.planner().anything = 1  # type: ignore[attr-defined]

    def test_a_graph_without_ops_gets_the_empty_plan(self) -> None:
        graph = TrainGraph("empty", (), (), (), ())
        result = self.planner().plan(graph, Plan(()), 0, Costs((), (), dict(STORES)))
        assert result.order == ()
