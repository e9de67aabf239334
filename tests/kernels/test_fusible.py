"""Ops that no compiled region may contain."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.capture.tracer import capture
from autotune.kernels.region_program import fuse, list_regions
from autotune.workloads.workload import Workload


class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 1, 16, 16))

    def forward(self, weights: Tensor) -> Tensor:
        return (F.unfold(self.image, 5, padding=2) * weights).sin().sum()


@pytest.mark.parametrize("name", ["col2im"])
def test_an_op_whose_sums_depend_on_the_threads_is_in_no_region(name: str):
    model = Unfolded()
    program = fuse(capture(Workload(model, lambda model, x: model(x), None, torch.randn(1, 25, 256))))
    assert any(name in op.target for op in program.graph.ops)
    assert list_regions(program)
    assert not any(name in str(call.target) for each in list_regions(program) for call in each.region.calls)
