"""Gradient sharing on training and inference graphs: what may share, what that saves, and that nothing is overwritten."""

import random

import pytest
from hypothesis import given

from autotune.capture.tracer import capture
from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.ir.plan import InPlace, Plan, Swap
from autotune.ir.schedule import aliased_runs
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.predict.simulate import peak_bytes
from autotune.testing.graphs import Builder, chain, graphs, random_order, training_chain
from autotune.workloads.zoo import ZOO
from experiments.claims.memonger.sharing.gradients import (
    blob_bytes,
    build_net,
    find_forward_values,
    find_gradients,
    share_buffers,
)
from experiments.claims.memonger.sharing.net import blob_lives
from experiments.claims.memonger.sharing.objects import share_exactly
from tests.experiments.memonger.nets import renamed, run, same, some_order
from tests.workloads.zoo.tiny import TINY


def stages(*nbytes: int) -> TrainGraph:
    """A chain of layers whose results have these sizes; its backward reads each layer's input."""
    built = Builder("stages")
    built.value("x", 1, Role.BATCH)
    back = {"phase": Phase.BACKWARD, "role": Role.ACTIVATION}
    for i, size in enumerate(nbytes):
        built.op(f"fwd{i}", [f"h{i - 1}" if i else "x"], [(f"h{i}", size)])
    last = len(nbytes) - 1
    built.op("loss", [f"h{last}"], [("loss", 1)])
    built.op("dloss", [f"h{last}"], [(f"g{last}", nbytes[last])], **back)
    for i in reversed(range(1, len(nbytes))):
        built.op(f"bwd{i}", [f"g{i}", f"h{i - 1}"], [(f"g{i - 1}", nbytes[i - 1])], **back)
    return built.graph("loss")


def names(graph: TrainGraph, values) -> set[str]:
    return {graph.values[value].name for value in values}


def test_gradients_are_what_backward_makes_but_those_of_parameters():
    graph = stages(4, 4, 1)
    assert names(graph, find_gradients(graph)) == {"g2", "g1", "g0"}
    assert names(graph, find_forward_values(graph)) == {"h0", "h1", "h2", "loss"}
    assert names(training_chain(2), find_gradients(training_chain(2))) == set()


def test_gradients_of_a_chain_take_the_two_largest_that_meet():
    found = share_buffers(stages(8, 4, 2, 1))
    assert found.unshared_bytes == 1 + 2 * 15 + 1
    assert found.shared_bytes == 1 + 15 + 1 + (8 + 4)
    assert found.saving == pytest.approx(3 / 32)


def test_gradients_take_the_place_of_activations_that_backward_has_read():
    graph = stages(4, 4, 4, 1, 1, 1)
    alone, both = share_buffers(graph), share_buffers(graph, activations=True)
    assert alone.shared_bytes == 1 + 15 + 1 + 8
    assert both.shared_bytes == 1 + 15 + 1 + 4 + 1
    mixed = {name for value, name in both.buffers.items() if value in find_forward_values(graph)}
    assert mixed & {name for value, name in both.buffers.items() if value in find_gradients(graph)}


def test_in_the_traced_order_the_exact_objects_are_a_byte_fewer_still():
    graph = stages(4, 4, 4, 1, 1, 1)
    net, blobs = build_net(graph)
    found = share_exactly(blob_lives(net, blob_bytes(graph, blobs)), static={blobs[value] for value in graph.outputs})
    assert found.shared_bytes == found.lower_bound_bytes == share_buffers(graph, activations=True).shared_bytes - 1


def test_an_inference_chain_needs_two_buffers_beside_its_output():
    graph = chain(9)
    assert share_buffers(graph).shared_bytes == share_buffers(graph).unshared_bytes == 90
    found = share_buffers(graph, activations=True)
    assert found.shared_bytes == 30
    assert len(found.buffers) == 8


def test_what_outlives_the_step_and_what_is_the_users_own_share_nothing():
    graph = stages(4, 4, 4)
    kept = {*graph.inputs, *graph.outputs}
    assert kept.isdisjoint(share_buffers(graph, activations=True).buffers)


@given(graphs(12))
def test_in_any_order_that_a_graph_allows_shared_buffers_hold_what_they_held(graph):
    rng = random.Random(len(graph.ops))
    plan = GreedyInPlace().plan(graph, Plan(random_order(graph, rng)), 0, Costs.unit(graph))
    for given_plan in (None, plan):
        net, blobs = build_net(graph, given_plan)
        for activations in (False, True):
            found = share_buffers(graph, given_plan, activations=activations)
            shared = renamed(net, {blobs[value]: name for value, name in found.buffers.items()})
            assert same(net, shared)
            expected = run(net)
            assert all(run(shared, some_order(net, rng)) == expected for _ in range(5))


@given(graphs(14))
def test_sharing_takes_no_less_than_lives_at_once_and_no_more_than_all_bytes(graph):
    found = share_buffers(graph, activations=True)
    scratch_free = peak_bytes(graph, Plan.traced(graph), Costs.unit(graph))
    handed = aliased_runs(graph, Plan.traced(graph).order).values()  # in the buffer of who takes it
    assert found.shared_bytes <= found.unshared_bytes
    assert found.unshared_bytes == sum(value.nbytes for value in graph.values if value.id not in handed)
    shareable = find_gradients(graph) | find_forward_values(graph)
    if all(value.id in shareable for value in graph.values if value.id not in graph.static):
        assert scratch_free <= found.shared_bytes


def test_a_value_made_in_place_lies_in_its_inputs_blob_and_is_counted_once():
    built = Builder()
    built.op("a", [], [("a", 8)])
    built.op("relu", ["a"], [("b", 8)], inplace=["a"])
    built.op("c", ["b"], [("c", 8)])
    graph = built.graph("c")
    net, blobs = build_net(graph, Plan((0, 1, 2), inplace=(InPlace(1, 0),)))
    assert blobs[0] == blobs[1]
    assert net.ops[1].inputs == net.ops[1].outputs
    assert share_buffers(graph).unshared_bytes == 24
    assert share_buffers(graph, Plan((0, 1, 2), inplace=(InPlace(1, 0),))).unshared_bytes == 16


def test_a_gradient_made_over_an_activation_shares_only_where_activations_do():
    built = Builder()
    built.op("h", [], [("h", 8)])
    built.op("loss", ["h"], [("loss", 1)])
    back = {"phase": Phase.BACKWARD}
    built.op("over", ["h"], [("g", 8)], inplace=["h"], **back)
    built.op("next", ["g"], [("k", 8)], **back)
    built.op("last", ["k"], [("l", 8)], **back)
    built.op("update", ["l"], [("done", 1)], phase=Phase.UPDATE)
    graph = built.graph("loss", "done")
    plan = Plan.traced(graph)
    plan = Plan(plan.order, inplace=(InPlace(2, 0),))
    assert share_buffers(graph, plan).buffers == {}
    assert names(graph, share_buffers(graph, plan, activations=True).buffers) == {"h", "g", "l"}


def test_a_plan_that_computes_again_or_sends_away_is_refused():
    graph = chain(3)
    with pytest.raises(PlanError, match="every op runs once and no value leaves"):
        share_buffers(graph, Plan((0, 1, 0, 2)))
    with pytest.raises(PlanError, match="every op runs once and no value leaves"):
        share_buffers(graph, Plan((0, 1, 2), (Swap(0, 0),), 1, "ssd"))


def test_a_captured_step_shares_and_every_op_reads_what_the_same_ops_made():
    graph = capture(ZOO["resnet18"](**TINY["resnet18"]), "resnet18").graph
    plan = GreedyInPlace().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
    for given_plan in (None, plan):
        net, blobs = build_net(graph, given_plan)
        alone, both = share_buffers(graph, given_plan), share_buffers(graph, given_plan, activations=True)
        assert both.shared_bytes < alone.shared_bytes < alone.unshared_bytes
        for found in (alone, both):
            shared = renamed(net, {blobs[value]: name for value, name in found.buffers.items()})
            assert same(net, shared)
            order = some_order(net, random.Random(0))
            assert run(shared, order) == run(net)
