"""What decisions save and cost: counted by hand on chains, and held to the same plan without them."""

from dataclasses import replace

import pytest
from hypothesis import given

from autotune.ir.costs import Costs, StoreCost
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, Swap
from autotune.ir.schedule import lower
from autotune.predict.simulate import peak_bytes, simulate
from autotune.predict.step_view import Walk
from autotune.report.decision_savings import INPLACE, KINDS, OFFLOAD, RECOMPUTE, UPDATE, Decision, decisions
from tests.graphs import Builder, plans, training_chain


def stored(graph: TrainGraph) -> Costs:
    seconds = tuple(0.5 + 0.25 * (op.id % 3) for op in graph.ops)
    return Costs(seconds, tuple(op.id % 4 for op in graph.ops), {"ssd": StoreCost(9.0, 7.0, 5.0, 4.0)})


def by_name(graph: TrainGraph, *names: str) -> list[int]:
    ids = {op.name: op.id for op in graph.ops}
    return [ids[name] for name in names]


def of(found: list[Decision], kind: str, layer: str = "") -> Decision:
    return next(one for one in found if (one.kind, one.layer) == (kind, layer))


def test_the_traced_step_decides_nothing():
    graph = training_chain(3)
    assert decisions(Walk(graph, Costs.unit(graph), Plan.traced(graph))) == []


def test_a_first_result_computed_again_saves_8_of_65_bytes_for_one_op():
    graph = training_chain(3)
    costs = Costs(tuple(1.0 + op.id for op in graph.ops), (0,) * len(graph.ops))
    order = list(Plan.traced(graph).order)
    order.insert(order.index(*by_name(graph, "dw1")), *by_name(graph, "fwd0"))
    found = decisions(Walk(graph, costs, Plan(tuple(order))))
    assert found == [Decision(RECOMPUTE, "", 8, 1.0, 0), Decision(RECOMPUTE, "block0", 8, 1.0, 0)]
    assert peak_bytes(graph, Plan.traced(graph), costs) == peak_bytes(graph, Plan(tuple(order)), costs) + 8


def test_what_is_made_again_only_to_make_something_else_again_saves_nothing_itself():
    built = Builder()
    built.op("a", [], [("v0", 50)])
    built.op("b", ["v0"], [("v1", 10)])
    built.op("c", ["v1"], [("v2", 40)])
    built.op("d", ["v2"], [("v3", 40)])
    built.op("e", ["v3", "v1"], [("v4", 1)])
    graph = built.graph("v4")
    again = decisions(Walk(graph, Costs.unit(graph), Plan((0, 1, 2, 3, 0, 1, 4))))
    # c and d hold 80 at once, 90 with v1; making v1 again holds 100: nothing is saved, and v0 was gone anyway
    assert [(one.layer, one.saved_bytes, one.seconds) for one in again] == [("", 0, 2.0), ("a", 0, 1.0), ("b", 0, 1.0)]


def test_updates_beside_their_gradients_save_10_bytes_and_no_time():
    graph = training_chain(3, nbytes=10, param_bytes=20)
    last = by_name(graph, "update0", "update1", "update2")
    order = [op for op in Plan.traced(graph).order if op not in last[1:]]
    for number in (2, 1):
        order.insert(order.index(*by_name(graph, f"dw{number}")) + 1, last[number])
    found = decisions(Walk(graph, Costs.unit(graph), Plan(tuple(order))))
    assert found == [
        Decision(UPDATE, "", 10, 0.0, 0), Decision(UPDATE, "block2", 10, 0.0, 0), Decision(UPDATE, "block1", 0, 0.0, 0),
    ]  # fmt: skip


def test_a_value_away_counts_its_bytes_both_ways_and_the_wait_for_it():
    graph = training_chain(6, nbytes=100)
    plan = Plan(Plan.traced(graph).order, (Swap(graph.ops[0].outputs[0], 1),), 1, "ssd")
    costs = stored(graph)
    found = decisions(Walk(graph, costs, plan))
    assert [(one.kind, one.layer, one.moved_bytes) for one in found] == [(OFFLOAD, "", 200), (OFFLOAD, "block0", 200)]
    assert found[1].seconds == pytest.approx(simulate(graph, lower(graph, plan), costs).stall_seconds)
    assert found[1].seconds > 0


def test_a_result_of_the_step_made_again_last_saves_its_bytes_until_then():
    built = Builder()
    built.op("a", [], [("loss", 10)])
    built.op("b", [], [("wide", 30)])
    built.op("c", ["wide"], [("end", 1)])
    graph = built.graph("loss", "end")
    plan = Plan((0, 1, 2, 0))
    assert peak_bytes(graph, plan, Costs.unit(graph)) == 31
    assert of(decisions(Walk(graph, Costs.unit(graph), plan)), RECOMPUTE).saved_bytes == 41 - 31


@given(plans())
def test_without_offload_or_without_in_place_the_peak_is_higher_by_what_they_are_said_to_save(case):
    graph, plan = case
    costs = stored(graph)
    found = decisions(Walk(graph, costs, plan))
    with_all = peak_bytes(graph, plan, costs)
    for kind, without in ((OFFLOAD, replace(plan, offload=(), store="")), (INPLACE, replace(plan, inplace=()))):
        saved = next((one.saved_bytes for one in found if (one.kind, one.layer) == (kind, "")), 0)
        assert peak_bytes(graph, without, costs) == with_all + saved


@given(plans())
def test_computing_again_saves_no_less_than_leaving_it_out_would_cost(case):
    graph, plan = case
    costs = stored(graph)
    again = replace(plan, inplace=(), offload=(), store="")
    found = decisions(Walk(graph, costs, again))
    saved = next((one.saved_bytes for one in found if (one.kind, one.layer) == (RECOMPUTE, "")), 0)
    once = Plan(tuple(dict.fromkeys(plan.order)))
    assert peak_bytes(graph, once, costs) <= peak_bytes(graph, again, costs) + saved


@given(plans())
def test_costs_add_up_to_the_steps_and_no_module_saves_more_than_all(case):
    graph, plan = case
    costs = stored(graph)
    found = decisions(Walk(graph, costs, plan))
    expected = simulate(graph, lower(graph, plan), costs)
    parts = [one for one in found if one.layer]
    for kind, seconds in ((RECOMPUTE, expected.recompute_seconds), (OFFLOAD, expected.stall_seconds)):
        assert sum(one.seconds for one in parts if one.kind == kind) == pytest.approx(seconds)
    assert sum(one.moved_bytes for one in parts) == expected.transfer_bytes
    for whole in (one for one in found if not one.layer):
        mine = [one for one in parts if one.kind == whole.kind]
        assert max(one.saved_bytes for one in mine) <= whole.saved_bytes
        assert whole.seconds == pytest.approx(sum(one.seconds for one in mine))
    assert [one.kind for one in found] == sorted((one.kind for one in found), key=KINDS.index)
