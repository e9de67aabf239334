from dataclasses import replace

from hypothesis import given, settings

from autotune.ir.costs import Costs
from autotune.ir.plan import InPlace, Plan
from autotune.ir.schedule import lower
from autotune.layout import check_layout, lay_out
from autotune.predict.plan_layout import add_layout, lay_out_plan, plan_buffers, to_buffers
from autotune.predict.simulate import simulate, timeline
from autotune.testing.graphs import chain, plans, training_chain


def most(planned):
    """The highest sum of sizes that live at once."""
    return max((sum(b.size for b in planned if b.born <= a.born < b.died) for a in planned), default=0)


def test_a_chain_of_three_lies_in_the_bytes_of_two():
    graph = chain(3)
    planned = plan_buffers(graph, Plan.traced(graph), Costs.unit(graph))
    # the last value outlives the step, so it lies outside
    assert [(buffer.size, buffer.born, buffer.died) for buffer in planned] == [(10, 0, 4), (10, 2, 8)]


@settings(max_examples=60)
@given(plans())
def test_what_lives_at_once_is_the_peak_that_the_simulator_predicts_beside_what_stays(drawn):
    graph, plan = drawn
    costs = replace(Costs.unit(graph), scratch_bytes=tuple(3 * (op.id % 4) for op in graph.ops))
    if plan.offload:
        plan = replace(plan, offload=())
    planned = plan_buffers(graph, plan, costs)
    kept = set(graph.outputs) - graph.static
    live, highest = 0, 0
    for moment in timeline(graph, lower(graph, plan), costs):
        live = moment.during_bytes - graph.static_bytes
        highest = max(highest, live)
    outside = sum(graph.values[value].nbytes for value in kept)
    assert most(planned) <= highest <= most(planned) + outside


@settings(max_examples=60)
@given(plans())
def test_every_plans_layout_holds(drawn):
    graph, plan = drawn
    if plan.offload:
        plan = replace(plan, offload=())
    buffers = to_buffers(plan_buffers(graph, plan, Costs.unit(graph)))
    check_layout(buffers, lay_out(buffers, work=10**6))


def test_a_run_in_place_stays_in_the_buffer_that_it_takes():
    graph = chain(4)
    plan = replace(Plan.traced(graph), inplace=(InPlace(1, graph.ops[1].inputs[0]),))
    apart = plan_buffers(graph, Plan.traced(graph), Costs.unit(graph))
    together = plan_buffers(graph, plan, Costs.unit(graph))
    assert [(buffer.born, buffer.died) for buffer in apart] == [(0, 4), (2, 8), (6, 12)]
    # run, run, run, free: what the second run takes over needs no free of its own
    assert [(buffer.born, buffer.died) for buffer in together] == [(0, 6), (4, 10)]


def test_only_a_plan_in_the_arena_gets_a_layout():
    graph = training_chain(4)
    costs = Costs.unit(graph)
    plan = Plan.traced(graph)
    expected = simulate(graph, lower(graph, plan), costs)
    assert add_layout(graph, plan, costs, expected) == expected
    laid = add_layout(graph, replace(plan, allocator="arena"), costs, expected)
    laid_out = lay_out_plan(graph, plan, costs)
    assert (laid.layout_bytes, laid.layout_live_bytes) == (laid_out.bytes, laid_out.max_live)
    assert laid.charged_bytes == laid.peak_bytes + laid_out.bytes - laid_out.max_live
    assert expected.charged_bytes is None
