"""The planner contract on random graphs: a new planner in KINDS is held to it without a line here."""

import doctest
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

import autotune.planners
from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners import KINDS, auto, base
from autotune.planners.knobs import Int, Knob
from autotune.planners.order import ORDERS
from autotune.testing.planner_contract import PlannerContract

MAY_RAISE_PEAK = {
    ("order", "traced"): "it restores the user's order",
    ("update", "at_end"): "it restores the place that clipping and scaling need",
    ("inplace", "never"): "it gives every output a buffer of its own",
}
"""Planners whose purpose is to undo, which may raise the peak above that of their input."""

for kind, planners in KINDS.items():
    for name, planner in planners.items():
        title = f"Test{kind.title()}{name.title().replace('_', '')}"
        about = {"kind": kind, "planner": planner, "may_raise_peak": MAY_RAISE_PEAK.get((kind, name), "")}
        assert title not in globals()
        globals()[title] = type(title, (PlannerContract,), about | {"__module__": __name__})


def test_every_planner_is_run_through_the_contract():
    tested = {value.planner for value in list(globals().values()) if _is_contract(value)}
    assert tested == {planner for planners in KINDS.values() for planner in planners.values()}


def _is_contract(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PlannerContract) and value is not PlannerContract


@dataclass(frozen=True, slots=True)
class Broken:
    """An order planner that keeps a rule only if `rule` is another one."""

    knobs: ClassVar[dict[str, Knob]] = {"rule": Int(0, 4)}
    rule: int = 0

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        match self.rule:
            case 1:
                return replace(plan, order=plan.order[::-1])
            case 2:
                return replace(plan, window=random.SystemRandom().randrange(1, 1000))
            case 3:
                return replace(plan, order=(*plan.order, *plan.order))
        return plan


@pytest.mark.parametrize(
    ("test", "knobs", "error"),
    [
        ("test_the_plan_is_valid_deterministic_and_not_higher", {"rule": 0}, None),
        ("test_the_plan_is_valid_deterministic_and_not_higher", {"rule": 1}, PlanError),
        ("test_the_plan_is_valid_deterministic_and_not_higher", {"rule": 2}, AssertionError),
        ("test_a_budget_that_is_met_costs_no_seconds", {"rule": 0}, None),
        ("test_a_budget_that_is_met_costs_no_seconds", {"rule": 3}, (AssertionError, PlanError)),
    ],
)
def test_the_contract_finds_a_planner_that_breaks_it(test: str, knobs: dict[str, Any], error: Any):
    contract: Any = type("Contract", (PlannerContract,), {"kind": "order", "planner": Broken})()
    if error is None:
        getattr(contract, test)(knobs=knobs)
    else:
        with pytest.raises(error):
            getattr(contract, test)(knobs=knobs)


def test_the_example_of_the_protocol_runs_and_keeps_the_contract():
    example = doctest.DocTestParser().get_doctest(base.Planner.__doc__ or "", {}, "Planner", None, 0)
    assert len(example.examples) >= 8
    runner = doctest.DocTestRunner()
    try:
        runner.run(example, clear_globs=False)
        assert runner.failures == 0
        contract = example.globs["TestLateOpsFirst"]()
        for knobs in ({}, {"count": 1}, {"count": 64}):
            contract.test_the_plan_is_valid_deterministic_and_not_higher(knobs=knobs)
            contract.test_a_budget_that_is_met_costs_no_seconds(knobs=knobs)
        contract.test_a_kind_decides_its_own_part_only()
        contract.test_knobs_are_the_fields_and_their_defaults_lie_inside()
        contract.test_a_graph_without_ops_gets_the_empty_plan()
    finally:
        ORDERS.pop("late_ops_first", None)


@pytest.mark.parametrize("module", [auto, autotune.planners], ids=["auto", "planners"])
def test_the_examples_run(module: Any):
    results = doctest.testmod(module)
    assert results.attempted
    assert results.failed == 0
