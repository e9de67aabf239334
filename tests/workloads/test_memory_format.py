"""A step in channels_last is eager's in channels_last, and the user's objects stay the user's."""

import copy
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.capture.tracer import capture
from autotune.errors import ConfigError, PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.plan_file import PlanFile
from autotune.runtime.train_step import TrainStep
from autotune.workloads.factory import load_workload
from autotune.workloads.memory_format import (
    available_formats,
    convert_batch,
    convert_model,
    in_format,
    keep_in_format,
)
from autotune.workloads.reference import WorkloadRef
from autotune.workloads.workload import Workload
from tests.support.eager import assert_equals_eager, eager_step, tensors, worst_difference
from tests.support.small import batch_of, make, mlp, normalized

IMAGES = (4, 3, 8, 8)
LAST = torch.channels_last


def in_channels_last(workload: Workload) -> Workload:
    """Return the workload as a user writes it."""
    workload.model.to(memory_format=LAST)
    images, labels = workload.batch
    return replace(workload, batch=(images.to(memory_format=LAST), labels))


@cache
def converted_graph() -> TrainGraph:
    return capture(in_channels_last(make(normalized, IMAGES))).graph


def plan_file() -> PlanFile:
    """Return the result of a search in channels_last."""
    graph = converted_graph()
    settings: Any = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 3}}
    plan = replace(make_plan(graph, settings, 0, Costs.unit(graph)), memory_format="channels_last")
    estimate = simulate(graph, lower(graph, plan))
    return PlanFile(WorkloadRef("small", {}), graph.digest, "50%", 0, 0, settings, plan, estimate)


def test_only_weights_of_four_dimensions_leave_a_choice():
    assert available_formats(normalized()) == ("", "channels_last")
    assert available_formats(mlp()) == ("",)
    assert available_formats(in_channels_last(make(normalized, IMAGES)).model) == ("",)


def test_the_graph_of_another_format_has_another_digest():
    workload = make(normalized, IMAGES)
    assert capture(workload).graph.digest != converted_graph().digest


def test_converting_is_what_model_to_does_and_back_is_what_there_was():
    workload, other = make(normalized, IMAGES), make(normalized, IMAGES)
    for each in (workload, other):
        eager_step(each)
    strides = {name: tensor.stride() for name, tensor in tensors(workload).items()}
    ids = {name: id(parameter) for name, parameter in workload.model.named_parameters()}
    convert_model(workload.model, workload.optimizer, "channels_last")
    expected = {name: p.stride() for name, p in in_channels_last(other).model.named_parameters()}
    assert {name: p.stride() for name, p in workload.model.named_parameters()} == expected
    state = workload.optimizer.state[workload.model[0].weight]["momentum_buffer"]
    assert state.stride() == workload.model[0].weight.stride()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    convert_model(workload.model, workload.optimizer, "")
    assert {name: tensor.stride() for name, tensor in tensors(workload).items()} == strides
    assert {name: id(parameter) for name, parameter in workload.model.named_parameters()} == ids


def test_state_lies_as_its_parameter_does_also_once_that_goes_back():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3)
    twin, inputs = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    convert_model(model, None, "channels_last")
    keep_in_format(model, "channels_last")
    model.to(memory_format=torch.contiguous_format)
    nets = [(each, torch.optim.AdamW(each.parameters(), lr=0.1, fused=True)) for each in (model, twin)]
    for _ in range(3):
        for net, optimizer in nets:
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, twin.weight)


def test_a_format_for_a_capture_leaves_the_tensors_in_their_memory():
    workload = make(normalized, IMAGES)
    eager_step(workload)
    places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors(workload).items()}
    with in_format(workload, "channels_last") as converted:
        assert capture(converted).graph.digest == converted_graph().digest
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors(workload).items()} == places
    assert workload.batch[0].is_contiguous()


def test_a_batch_that_lies_right_is_not_copied():
    batch = batch_of(*IMAGES)
    once = convert_batch(batch, "channels_last")
    assert once[0].is_contiguous(memory_format=LAST)
    assert torch.equal(once[0], batch[0])
    assert once[1] is batch[1]
    assert convert_batch(once, "channels_last")[0] is once[0]


def test_steps_equal_eager_in_the_same_format_bit_for_bit_in_whichever_format_batches_arrive(tmp_path: Path):
    workload, other = make(normalized, IMAGES), in_channels_last(make(normalized, IMAGES))
    planfile.write(tmp_path / "plan.json", plan_file())
    ids = {name: id(tensor) for name, tensor in (*workload.model.named_parameters(), *workload.model.named_buffers())}
    with TrainStep(
        workload.model, workload.loss_fn, workload.optimizer, workload.batch, tmp_path / "plan.json"
    ) as step:
        assert step.plan.memory_format == "channels_last"
        assert step.plan.recomputed > 0
        for seed in range(6):
            batch = batch_of(*IMAGES, seed=seed)
            other.batch = convert_batch(batch, "channels_last")
            assert torch.equal(step(other.batch if seed >= 3 else batch), eager_step(other)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            last = batch_of(2, 3, 8, 8)
            other.batch = convert_batch(last, "channels_last")
            assert torch.equal(step(last), eager_step(other)[0])
        assert step.plan.memory_format == "channels_last"
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    now = {name: id(tensor) for name, tensor in (*workload.model.named_parameters(), *workload.model.named_buffers())}
    assert now == ids
    assert workload.model[0].weight.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("name", "depth"), [("resnet18", {"depth": 1}), pytest.param("mobilenet_v2", {}, marks=pytest.mark.slow)]
)
def test_convolution_nets_of_the_zoo_equal_eager_in_the_same_format(name: str, depth: dict[str, int]):
    size = {"batch": 2, "size": 64, "width": 16, **depth}
    workload, other = load_workload(name, size), in_channels_last(load_workload(name, size))
    graph = capture(in_channels_last(load_workload(name, size))).graph
    settings: Any = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "greedy"}}
    half = simulate(graph, lower(graph, Plan.traced(graph))).peak_bytes - graph.static_bytes
    plan = make_plan(graph, settings, graph.static_bytes + half // 2, Costs.unit(graph))
    plan = replace(plan, memory_format="channels_last")
    assert_equals_eager(workload, other, plan)


def test_a_ready_workload_comes_in_a_format_as_a_user_would_put_it():
    size = {"batch": 2, "size": 32, "width": 8, "depth": 1}
    workload, other = (
        load_workload("resnet18", {**size, "memory_format": "channels_last"}),
        in_channels_last(load_workload("resnet18", size)),
    )
    assert {n: t.stride() for n, t in tensors(workload).items()} == {n: t.stride() for n, t in tensors(other).items()}
    assert workload.batch[0].stride() == other.batch[0].stride()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
    with pytest.raises(ConfigError, match="memory_format must be contiguous or channels_last"):
        load_workload("resnet18", {**size, "memory_format": "NHWC"})


def test_a_format_that_is_none_is_refused_before_anything_is_converted():
    workload = make(normalized, IMAGES)
    plan = replace(Plan.traced(converted_graph()), memory_format="channels_frist")
    with pytest.raises(PlanError, match="memory_format is 'channels_frist'; known: channels_last"):
        TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan)
