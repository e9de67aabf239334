"""What a clip's gradient reads, to the bit and in bytes kept."""

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.capture.tracer import capture
from autotune.ir.graph import Phase, Role, TrainGraph
from autotune.workloads.workload import Workload
from tests.capture.twins import Twins
from tests.support.small import make

aten = torch.ops.aten
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30]


class Clipped(nn.Module):
    """Two convolutions with a clip of a BatchNorm's output between them: the second one keeps what the clip made."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.clip, self.last = clip, nn.Conv2d(8, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.clip(3 * self.norm(self.first(images)))).mean((2, 3))


def kept_bytes(graph: TrainGraph) -> int:
    """What forward makes and backward reads."""
    made = {value for op in graph.ops if op.phase is Phase.FORWARD for value in op.outputs}
    read = {value for op in graph.ops if op.phase is Phase.BACKWARD for value in op.inputs}
    return sum(graph.values[value].nbytes for value in made & read)


def kept_by_eager(workload: Workload) -> int:
    """What autograd keeps, parameters and batch aside."""
    assert workload.loss_fn is not None
    own = {part.untyped_storage()._cdata for part in (*workload.model.parameters(), *workload.batch)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = workload.loss_fn(workload.model, workload.batch)
    found = sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in own)
    del loss
    return found


def clipped(clip: Any) -> Workload:
    return make(lambda: Clipped(clip()), (2, 3, 8, 8))


@cache
def twins(kind: Any, inplace: bool) -> Twins:
    return Twins(lambda: clipped(partial(kind, inplace=inplace)))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.SiLU])
def test_a_captured_step_keeps_no_more_for_backward_than_eager_and_trains_the_same_bits(kind: Any, inplace: bool):
    made = twins(kind, inplace)
    assert kept_bytes(made.graph) <= kept_by_eager(clipped(partial(kind, inplace=inplace)))
    made.assert_equals_eager(steps=2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", [nn.ReLU6, nn.Hardtanh, nn.LeakyReLU])
def test_a_clip_keeps_what_a_relu_keeps(kind: Any, inplace: bool):
    assert kept_bytes(twins(kind, inplace).graph) == kept_bytes(twins(nn.ReLU, False).graph)


@pytest.mark.parametrize(
    ("clip", "target"),
    [
        (partial(nn.Hardtanh, 0.1, 0.7), "hardtanh"),  # bounds that bfloat16 rounds, one way or the other
        (partial(nn.LeakyReLU, -0.5), "leaky_relu"),  # what was negative comes out positive
    ],
)
def test_a_result_that_does_not_tell_what_was_clipped_is_not_read(clip: Any, target: str):
    graph = capture(clipped(clip)).graph
    forward, backward = (
        next(op for op in graph.ops if op.target == f"aten.{name}.default") for name in (target, f"{target}_backward")
    )
    assert set(forward.inputs) <= set(backward.inputs)
    assert set(forward.outputs).isdisjoint(backward.inputs)


def test_a_result_that_backward_would_not_keep_stays_unkept():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.relu6(self.first(inputs)) + 1

    graph = capture(make(Last)).graph
    forward = next(op for op in graph.ops if op.target == "aten.hardtanh.default")
    readers = [op for op in graph.ops if op.phase is Phase.BACKWARD and set(forward.outputs) & set(op.inputs)]
    assert readers == []
    assert graph.values[forward.inputs[0]].role is Role.ACTIVATION


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("forward", "backward", "bounds"),
    [
        (aten.hardtanh, aten.hardtanh_backward, (0.0, 6.0)),
        (aten.hardtanh, aten.hardtanh_backward, (-1.0, 1.0)),
        (aten.leaky_relu, aten.leaky_relu_backward, (0.01,)),
        (aten.leaky_relu, aten.leaky_relu_backward, (0.0,)),
    ],
)
def test_a_gradient_of_the_result_has_the_bits_of_one_of_what_was_read(forward, backward, bounds, dtype):
    inputs = torch.cat([torch.randn(1000) * 4, torch.tensor([*EDGES, *bounds])]).to(dtype)
    beside = [torch.nextafter(inputs, torch.full_like(inputs, end)) for end in (-math.inf, math.inf)]
    inputs = torch.cat([inputs, *beside])
    gradient = torch.randn(inputs.shape).to(dtype)
    last = () if len(bounds) == 2 else (False,)
    expected, found = (backward(gradient, read, *bounds, *last) for read in (inputs, forward(inputs, *bounds)))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(found.view(bits), expected.view(bits))
