"""Workloads whose factories draw weights or read values are captured on fake tensors, or refused with the next step."""

from dataclasses import replace

import pytest
import torch

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError
from autotune.workloads.workload import Workload


def sum_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def linear() -> Workload:
    model = torch.nn.Linear(8, 8)
    return Workload(model, sum_loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8))


def truncated() -> Workload:
    """Weights drawn within bounds, as vision transformers draw theirs: values outside are drawn again."""
    workload = linear()
    torch.nn.init.trunc_normal_(workload.model.weight, std=0.02)
    return workload


def scaled() -> Workload:
    workload = linear()
    if workload.model.weight.abs().max() > 1:
        workload.model.weight.data.mul_(0.5)
    return workload


def test_weights_drawn_within_bounds_are_captured_as_on_real_tensors():
    assert (
        capture_on_fake_tensors(truncated, "truncated").graph.digest == capture(truncated(), "truncated").graph.digest
    )


def test_a_factory_that_reads_a_value_is_refused_with_its_line_and_the_next_step():
    with pytest.raises(
        ConfigError, match=r"scaled: the factory reads the value of a tensor at .*abs\(\).max\(\).*Python numbers"
    ):
        capture_on_fake_tensors(scaled, "scaled")


def test_a_step_that_dynamo_refuses_is_refused_with_dynamos_reason_and_the_command_that_captures_it():
    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        print("a step")
        return sum_loss(model, batch)

    def printing() -> Workload:
        return replace(linear(), loss_fn=loss_fn)

    assert capture(printing()).recorded
    with pytest.raises(
        CaptureError, match=r"^cannot estimate printing on .* Dynamo refuses .*`print`.*; run autotune plan"
    ):
        capture_on_fake_tensors(printing, "printing")
