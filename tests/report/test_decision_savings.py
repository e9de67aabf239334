"""Savings and costs of decisions: counted by hand on chains, and compared with the same plan without them."""

from dataclasses import replace

import pytest
from hypothesis import given

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.predict.simulate import peak_bytes, simulate
from autotune.predict.step_view import StepTimeline
from autotune.report.decision_savings import DecisionKind, DecisionSaving, evaluate_decisions
from autotune.testing.graphs import Builder, plans, training_chain


def stored(graph: TrainGraph) -> Costs:
    seconds = tuple(0.5 + 0.25 * (op.id % 3) for op in graph.ops)
    return Costs(seconds, tuple(op.id % 4 for op in graph.ops), {"ssd": StoreCost(9.0, 7.0, 5.0, 4.0)})


def by_name(graph: TrainGraph, *names: str) -> list[int]:
    ids = {op.name: op.id for op in graph.ops}
    return [ids[name] for name in names]


def select(savings: list[DecisionSaving], kind: str, layer: str = "") -> DecisionSaving:
    return next(saving for saving in savings if (saving.kind, saving.layer) == (kind, layer))


def test_the_traced_step_decides_nothing():
    graph = training_chain(3)
    assert evaluate_decisions(StepTimeline(graph, Costs.unit(graph), Plan.traced(graph))) == []


def test_a_first_result_computed_again_saves_8_of_65_bytes_for_one_op():
    graph = training_chain(3)
    costs = Costs(tuple(1.0 + op.id for op in graph.ops), (0,) * len(graph.ops))
    order = list(Plan.traced(graph).order)
    order.insert(order.index(*by_name(graph, "dw1")), *by_name(graph, "fwd0"))
    savings = evaluate_decisions(StepTimeline(graph, costs, Plan(tuple(order))))
    assert savings == [
        DecisionSaving(DecisionKind.RECOMPUTE, "", 8, 1.0, 0),
        DecisionSaving(DecisionKind.RECOMPUTE, "block0", 8, 1.0, 0),
    ]
    assert peak_bytes(graph, Plan.traced(graph), costs) == peak_bytes(graph, Plan(tuple(order)), costs) + 8


def test_what_is_made_again_only_to_make_something_else_again_saves_nothing_itself():
    builder = Builder()
    builder.op("a", [], [("v0", 50)])
    builder.op("b", ["v0"], [("v1", 10)])
    builder.op("c", ["v1"], [("v2", 40)])
    builder.op("d", ["v2"], [("v3", 40)])
    builder.op("e", ["v3", "v1"], [("v4", 1)])
    graph = builder.graph("v4")
    again = evaluate_decisions(StepTimeline(graph, Costs.unit(graph), Plan((0, 1, 2, 3, 0, 1, 4))))
    # c and d hold 80 at once, 90 with v1; making v1 again holds 100: nothing is saved, and v0 was gone anyway
    assert [(saving.layer, saving.saved_bytes, saving.seconds) for saving in again] == [
        ("", 0, 2.0),
        ("a", 0, 1.0),
        ("b", 0, 1.0),
    ]


def test_updates_beside_their_gradients_save_10_bytes_and_no_time():
    graph = training_chain(3, nbytes=10, param_bytes=20)
    last = by_name(graph, "update0", "update1", "update2")
    order = [op for op in Plan.traced(graph).order if op not in last[1:]]
    for number in (2, 1):
        order.insert(order.index(*by_name(graph, f"dw{number}")) + 1, last[number])
    savings = evaluate_decisions(StepTimeline(graph, Costs.unit(graph), Plan(tuple(order))))
    assert savings == [
        DecisionSaving(DecisionKind.UPDATE, "", 10, 0.0, 0), DecisionSaving(DecisionKind.UPDATE, "block2", 10, 0.0, 0), DecisionSaving(DecisionKind.UPDATE, "block1", 0, 0.0, 0),
    ]  # fmt: skip


def test_a_value_away_counts_its_bytes_both_ways_and_the_wait_for_it():
    graph = training_chain(6, nbytes=100)
    plan = Plan(Plan.traced(graph).order, (Swap(graph.ops[0].outputs[0], 1),), 1, "ssd")
    costs = stored(graph)
    savings = evaluate_decisions(StepTimeline(graph, costs, plan))
    assert [(saving.kind, saving.layer, saving.moved_bytes) for saving in savings] == [
        (DecisionKind.OFFLOAD, "", 200),
        (DecisionKind.OFFLOAD, "block0", 200),
    ]
    assert savings[1].seconds == pytest.approx(simulate(graph, lower(graph, plan), costs).stall_seconds)
    assert savings[1].seconds > 0


def test_a_result_of_the_step_made_again_last_saves_its_bytes_until_then():
    builder = Builder()
    builder.op("a", [], [("loss", 10)])
    builder.op("b", [], [("wide", 30)])
    builder.op("c", ["wide"], [("end", 1)])
    graph = builder.graph("loss", "end")
    plan = Plan((0, 1, 2, 0))
    assert peak_bytes(graph, plan, Costs.unit(graph)) == 31
    assert (
        select(evaluate_decisions(StepTimeline(graph, Costs.unit(graph), plan)), DecisionKind.RECOMPUTE).saved_bytes
        == 41 - 31
    )


@given(plans())
def test_without_offload_or_without_in_place_the_peak_is_higher_by_what_they_are_said_to_save(case):
    graph, plan = case
    costs = stored(graph)
    savings = evaluate_decisions(StepTimeline(graph, costs, plan))
    with_all = peak_bytes(graph, plan, costs)
    for kind, without in (
        (DecisionKind.OFFLOAD, replace(plan, offload=(), store="")),
        (DecisionKind.INPLACE, replace(plan, inplace=())),
    ):
        saved = next((saving.saved_bytes for saving in savings if (saving.kind, saving.layer) == (kind, "")), 0)
        assert peak_bytes(graph, without, costs) == with_all + saved


@given(plans())
def test_computing_again_saves_no_less_than_leaving_it_out_would_cost(case):
    graph, plan = case
    costs = stored(graph)
    again = replace(plan, inplace=(), offload=(), store="")
    savings = evaluate_decisions(StepTimeline(graph, costs, again))
    saved = next(
        (saving.saved_bytes for saving in savings if (saving.kind, saving.layer) == (DecisionKind.RECOMPUTE, "")), 0
    )
    once = Plan(tuple(dict.fromkeys(plan.order)))
    assert peak_bytes(graph, once, costs) <= peak_bytes(graph, again, costs) + saved


@given(plans())
def test_costs_add_up_to_the_steps_and_no_module_saves_more_than_all(case):
    graph, plan = case
    costs = stored(graph)
    savings = evaluate_decisions(StepTimeline(graph, costs, plan))
    expected = simulate(graph, lower(graph, plan), costs)
    parts = [saving for saving in savings if saving.layer]
    for kind, seconds in (
        (DecisionKind.RECOMPUTE, expected.recompute_seconds),
        (DecisionKind.OFFLOAD, expected.stall_seconds),
    ):
        assert sum(saving.seconds for saving in parts if saving.kind == kind) == pytest.approx(seconds)
    assert sum(saving.moved_bytes for saving in parts) == expected.transfer_bytes
    for whole in (saving for saving in savings if not saving.layer):
        modules = [saving for saving in parts if saving.kind == whole.kind]
        assert max(saving.saved_bytes for saving in modules) <= whole.saved_bytes
        assert whole.seconds == pytest.approx(sum(saving.seconds for saving in modules))
    assert [saving.kind for saving in savings] == sorted(
        (saving.kind for saving in savings), key=list(DecisionKind).index
    )
