"""A kernel that overwrites an input makes the same bits as one that does not, and takes no second buffer on the way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.capture.inplace_kernels import KERNELS, InplaceKernel, write_over
from autotune.capture.program import Call, Read
from autotune.capture.rewrites import slices
from autotune.capture.tracer import capture
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.planners import make_plan
from autotune.runtime.op_profiler import read_allocations
from autotune.runtime.train_step import TrainStep
from tests.support.eager import eager_step, tensors, worst_difference
from tests.support.small import make, normalized

aten = torch.ops.aten
Make = Callable[[], Tensor]

ARGUMENTS: dict[Any, Callable[[Make], tuple[Any, ...]]] = {
    aten.addmm.default: lambda make: (c := make(), c[:, : min(c.shape[0], 32)] * 0.5, c[: min(c.shape[1], 32)] - 1.0),
    slices.write_part: lambda make: (make(), make()[..., :1], ((aten.slice.Tensor, (-1, 0, 1), ()),)),
    aten.hardtanh.default: lambda make: (make(), 0.0, 1.5),
    aten.masked_fill.Scalar: lambda make: (make(), make() > 0, -0.5),
    aten.masked_fill.Tensor: lambda make: (make(), make() > 0, torch.tensor(2.0)),
    aten.where.self: lambda make: (make() > 0, make(), make()),
    aten.pow.Tensor_Scalar: lambda make: (make(), 3.0),
    aten.clamp.default: lambda make: (make(), -1.0, 0.5),
    aten.clamp_min.default: lambda make: (make(), 0.25),
    aten.threshold_backward.default: lambda make: (make(), make(), 0),
    aten.hardtanh_backward.default: lambda make: (make(), make(), 0.0, 1.5),
    aten.elu_backward.default: lambda make: (make(), 1.0, 1.0, 1.0, False, make()),
    aten.leaky_relu_backward.default: lambda make: (make(), make(), 0.01, False),
    aten._softmax.default: lambda make: (make(), -1, False),
    aten._log_softmax.default: lambda make: (make(), -1, False),
    aten._softmax_backward_data.default: lambda make: (make(), (y := make()).softmax(-1), -1, y.dtype),
    aten._log_softmax_backward_data.default: lambda make: (make(), (y := make()).log_softmax(-1), -1, y.dtype),
}
BINARY = ("add", "sub", "mul", "div", "tanh_backward", "sigmoid_backward", "silu_backward", "gelu_backward")
SHAPES = ((1,), (5,), (3, 1, 7), (2, 3, 5, 7), (4, 16, 8, 8), (3, 1000), (70, 1031))
MATRICES = ((70, 1031), (1536, 384), (32, 32))
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor,
}


def arguments(target: Any, make: Make) -> tuple[Any, ...]:
    if target in ARGUMENTS:
        return ARGUMENTS[target](make)
    binary = target.name().split("::")[1].split(".")[0] in BINARY
    return (make(), make()) if binary else (make(),)


def drawn(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Make:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return lambda: LAYOUTS[layout](torch.randn(shape, generator=generator).mul(2).to(dtype))


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def in_place(target: Any, args: tuple[Any, ...], position: int) -> Tensor:
    """The kernel's result in the buffer of one of its arguments."""
    call = Call(target, tuple(Read(0) if index == position else part for index, part in enumerate(args)))
    made = write_over(call, 0)

    def real(part: Any) -> Any:
        return args[position] if isinstance(part, Read) else part

    return made.target(*map(real, made.args), **{key: real(part) for key, part in made.kwargs})


EVERY = [
    pytest.param(target, kernel, position, id=f"{getattr(target, '__name__', target)}[{position}]")
    for target, kernel in KERNELS.items()
    for position in kernel.over
]


@pytest.mark.parametrize(("target", "kernel", "position"), EVERY)
def test_bits_are_the_functional_kernels_in_every_layout(target: Any, kernel: InplaceKernel, position: int):
    for layout in ("contiguous",) if kernel.by_rows or target is aten.addmm.default else LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for shape in SHAPES if target is not aten.addmm.default else MATRICES:
                args = arguments(target, drawn(shape, layout, dtype))
                expected, place = bits(target(*args)), args[position].data_ptr()
                others = [bits(part) for index, part in enumerate(args) if _is_other(part, index, position)]
                made = in_place(target, args, position)
                assert made.data_ptr() == place
                assert bits(made) == expected, (shape, layout, dtype)
                assert others == [bits(part) for index, part in enumerate(args) if _is_other(part, index, position)]


def _is_other(part: Any, index: int, position: int) -> bool:
    return isinstance(part, Tensor) and index != position and part.is_floating_point()


@pytest.mark.parametrize(("target", "kernel", "position"), EVERY)
def test_nothing_is_allocated_beyond_what_the_functional_kernel_takes_beside_its_output(
    target: Any, kernel: InplaceKernel, position: int
):
    del kernel
    args = arguments(target, drawn((70, 1031), "contiguous", torch.float32))
    peaks = []
    for run in (lambda: target(*args), lambda: in_place(target, args, position)):
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded,
            torch.profiler.record_function("autotune kernel"),
        ):
            run()
        begin, end = read_allocations(recorded)[0]["autotune kernel"]
        live = highest = 0
        for at, nbytes in read_allocations(recorded)[1]:
            live += nbytes if begin <= at <= end else 0
            highest = max(highest, live)
        peaks.append(highest)
    assert peaks[0] - peaks[1] == args[position].nbytes


class Several(nn.Module):
    """Residuals, a scale by itself, an expanded addend, a softmax over rows and one over columns."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = F.gelu(self.entry(inputs))
        hidden = hidden + torch.tanh(hidden) * self.scale
        hidden = hidden * hidden + hidden.t().softmax(0).t() + hidden.softmax(-1)
        return self.last(F.silu(hidden.unflatten(1, (2, 8)).flatten(1)))


@pytest.mark.parametrize("shape", [(6, 8), (1, 8)])
def test_steps_in_place_equal_eager_bit_for_bit(shape: tuple[int, ...]):
    workload, other = make(Several, shape), make(Several, shape)
    graph = capture(workload).graph
    plan = make_plan(graph, {"inplace": {"planner": "greedy"}}, 0, Costs.unit(graph))
    assert len(plan.inplace) >= 4
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan) as step:
        for _ in range(3):
            assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def test_what_may_be_overwritten_is_as_large_as_the_output_and_never_the_users_own():
    graph = capture(make(Several)).graph
    for op in graph.ops:
        for value in op.inplace:
            assert graph.values[value].nbytes == graph.values[op.outputs[0]].nbytes
            assert value not in graph.static
    kinds = {op.target.split(".")[1] for op in graph.ops if op.inplace}
    assert {"tanh", "mul", "add", "silu", "_softmax", "gelu_backward", "tanh_backward"} <= kinds
    softmaxes = [op for op in graph.ops if op.target == "aten._softmax.default"]
    assert sorted(len(op.inplace) for op in softmaxes) == [0, 1]  # the one over columns makes its own


class Mixed(nn.Module):
    """Its first gradient lies as images do, what it is multiplied with as channels_last does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 64, 1))
        self.last = nn.Sequential(nn.BatchNorm2d(64), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(64, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.last(self.body(images)))


def test_a_buffer_that_lies_otherwise_than_the_output_would_is_not_taken():
    workload, other = make(Mixed, (4, 3, 8, 8)), make(Mixed, (4, 3, 8, 8))
    for each in (workload, other):
        each.model.to(memory_format=torch.channels_last)
        each.batch = (each.batch[0].to(memory_format=torch.channels_last), each.batch[1])
    graph = capture(workload).graph
    first = next(op for op in graph.ops if op.target == "aten.hardtanh_backward.default")
    assert first.inplace == ()
    plan = make_plan(graph, {"inplace": {"planner": "greedy"}}, 0, Costs.unit(graph))
    assert plan.inplace
    with TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan) as step:
        for _ in range(2):
            assert torch.equal(step(workload.batch), eager_step(other)[0])
    assert worst_difference(tensors(workload), tensors(other)) == 0.0


def double(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    hidden = model(inputs)
    return F.cross_entropy(hidden + hidden, labels)


def test_a_value_that_is_read_twice_by_one_op_is_not_overwritten():
    graph = capture(make(lambda: nn.Linear(8, 4), loss_fn=double)).graph
    sums = [op for op in graph.ops if op.target == "aten.add.Tensor"]
    assert [(len(op.inputs), op.inplace) for op in sums] == [(1, ())] * 2  # forward, and the sum of its gradients


def test_accumulated_gradients_are_whole_when_the_plan_runs_in_place():
    images = (2, 3, 8, 8)
    workload, other = make(normalized, images), make(normalized, images)
    graph = capture(workload).graph
    settings = {"update": {"planner": "with_gradient"}, "recompute": {"planner": "segments", "count": 3}}
    plan = make_plan(graph, settings, 0, Costs.unit(graph))
    assert plan.inplace
    assert plan != Plan(plan.order)
    step = TrainStep(workload.model, workload.loss_fn, workload.optimizer, workload.batch, plan, accumulate=2)
    for _ in range(2):
        step(workload.batch)
        other.loss_fn(other.model, other.batch).backward()
    other.optimizer.step()
    assert worst_difference(tensors(workload), tensors(other)) == 0.0
