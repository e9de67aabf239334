"""Ops that no compiled region may contain."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.capture.tracer import capture
from autotune.ir.plan import Plan
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import fuse, list_regions
from autotune.runtime.train_step import TrainStep
from autotune.workloads.workload import Workload
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import make


class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 1, 16, 16))

    def forward(self, weights: Tensor) -> Tensor:
        return (F.unfold(self.image, 5, padding=2) * weights).sin().sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.linear(x)) * (0.5 * self.beta)).square().sum()


def test_an_op_that_reads_a_number_from_a_tensor_is_in_no_region(monkeypatch: pytest.MonkeyPatch):
    def trace_and_run(region: CompiledRegion) -> Any:
        region._trace()
        return lambda tensors: list(region.region(*tensors))

    monkeypatch.setattr(CompiledRegion, "is_loaded", True)
    monkeypatch.setattr(CompiledRegion, "compile", trace_and_run)
    ours, other = (
        make(Scaled, (4, 8), loss_fn=lambda model, x: model(x[0])),
        make(Scaled, (4, 8), loss_fn=lambda model, x: model(x[0])),
    )
    plan = replace(Plan.traced(fuse(capture(ours)).graph), kernels="inductor")
    with TrainStep(ours.model, ours.loss_fn, ours.optimizer, ours.batch, plan) as step:
        for turn in range(3):
            for model in (ours.model, other.model):
                model.beta = 1.0 - 0.25 * turn  # an input of the step from its first change on
            assert torch.equal(step(ours.batch), eager_step(other)[0])
    assert worst_difference(tensors(ours), tensors(other)) == 0.0


@pytest.mark.parametrize("name", ["col2im"])
def test_an_op_whose_sums_depend_on_the_threads_is_in_no_region(name: str):
    model = Unfolded()
    program = fuse(capture(Workload(model, lambda model, x: model(x), None, torch.randn(1, 25, 256))))
    assert any(name in op.target for op in program.graph.ops)
    assert list_regions(program)
    assert not any(name in str(call.target) for each in list_regions(program) for call in each.region.calls)
