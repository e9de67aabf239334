"""Fake tensors have the strides of the kernels: with others the trace loses copies that a backward kernel depends on."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.capture.eager_kernels import eager_kernels
from autotune.capture.fake.kernel_strides import ITERATED, ON_CPU
from autotune.capture.tracer import capture
from autotune.workloads.workload import Workload
from tests.support.eager import assert_equals_eager
from tests.support.random_chains import Chain

aten = torch.ops.aten
SHAPES = ((2, 3, 4, 5), (1, 1, 6, 6), (1, 3, 4, 4), (2, 1, 4, 4), (2, 4, 4, 1))


def mask_like(tensor: Tensor) -> Tensor:
    """Mask of the same strides, or contiguous: a dropout never makes a mask with gaps."""
    dense = aten.is_non_overlapping_and_dense(tensor)
    strides = tensor.stride() if dense else torch.empty(tensor.shape).stride()
    return torch.empty_strided(tensor.shape, strides, dtype=torch.bool).fill_(True)


def per_channel(tensor: Tensor, count: int) -> list[Tensor]:
    """Weight, bias and statistics of a batch norm."""
    return [torch.ones(tensor.shape[1]) for _ in range(count)]


CALLS: dict[torch._ops.OpOverload, Callable[[Tensor, Tensor], Any]] = {
    aten.add.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.native_dropout_backward.default: lambda x, y: aten.native_dropout_backward(x, mask_like(y), 2.0),
    aten.hardtanh_backward.default: lambda x, y: aten.hardtanh_backward(x, y, 0.0, 6.0),
    aten.elu_backward.default: lambda x, y: aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    aten.leaky_relu_backward.default: lambda x, y: aten.leaky_relu_backward(x, y, 0.1, False),
    aten.threshold_backward.default: lambda x, y: aten.threshold_backward(x, y, 0),
    aten.softplus_backward.default: lambda x, y: aten.softplus_backward(x, y, 1, 20),
    aten.hardswish_backward.default: aten.hardswish_backward,
    aten.hardsigmoid_backward.default: aten.hardsigmoid_backward,
    aten.logit_backward.default: lambda x, y: aten.logit_backward(x, y, 0.1),
    aten.copysign.Tensor: aten.copysign,
    aten.logaddexp.default: aten.logaddexp,
    aten.xlogy.Tensor: aten.xlogy,
    aten.heaviside.default: aten.heaviside,
    aten.log_sigmoid_forward.default: lambda x, y: aten.log_sigmoid_forward(x)[0],
    aten.log_sigmoid_backward.default: lambda x, y: aten.log_sigmoid_backward(x, y, torch.zeros(y.shape)),
    aten.binary_cross_entropy_backward.default: lambda x, y: aten.binary_cross_entropy_backward(x, x, y),
    aten.mse_loss_backward.default: lambda x, y: aten.mse_loss_backward(x.sum(), x, y, 1),
    aten.smooth_l1_loss_backward.default: lambda x, y: aten.smooth_l1_loss_backward(x.sum(), x, y, 1, 1.0),
    aten.huber_loss_backward.default: lambda x, y: aten.huber_loss_backward(x.sum(), x, y, 1, 1.0),
    aten._log_softmax_backward_data.default: lambda x, y: aten._log_softmax_backward_data(x, y, 1, torch.float32),
    aten.glu_backward.default: lambda x, y: aten.glu_backward(x.narrow(2, 0, 2).clone(), y.narrow(2, 0, 4).clone(), 2),
    aten.native_layer_norm.default: lambda x, y: aten.native_layer_norm(x, x.shape[3:], None, None, 1e-5),
    aten.native_layer_norm_backward.default: lambda x, y: aten.native_layer_norm_backward(
        x, y, x.shape[3:], torch.zeros(*x.shape[:3], 1), torch.ones(*x.shape[:3], 1), None, None, [True, False, False]
    ),
    aten.reflection_pad2d_backward.default: lambda x, y: aten.reflection_pad2d_backward(
        x, y.narrow(2, 0, x.shape[2] - 2), [0, 0, 1, 1]
    ),
    aten.native_batch_norm.default: lambda x, y: aten.native_batch_norm(x, *per_channel(x, 4), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: lambda x, y: aten._native_batch_norm_legit(
        x, *per_channel(x, 4), True, 0.1, 1e-5
    ),
    aten._native_batch_norm_legit.no_stats: lambda x, y: aten._native_batch_norm_legit(
        x, *per_channel(x, 2), True, 0.1, 1e-5
    ),
    aten._native_batch_norm_legit_functional.default: lambda x, y: aten._native_batch_norm_legit_functional(
        x, *per_channel(x, 4), True, 0.1, 1e-5
    ),
    aten.native_batch_norm_backward.default: lambda x, y: aten.native_batch_norm_backward(
        x, y, *per_channel(x, 5), True, 1e-5, [True, True, True]
    ),
}  # fmt: skip


def layouts(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Strides in which a value may lie: permuted, a slice of channels or of the last dimension, or expanded."""
    whole = torch.empty(shape)
    for order in ((0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 3, 1)):
        permuted = torch.empty([shape[dim] for dim in order])
        yield permuted.permute([order.index(dim) for dim in range(4)]).stride()
    yield torch.cat([whole, whole], 1)[:, : shape[1]].stride()
    yield torch.cat([whole, whole], 3)[..., ::2].stride()
    yield whole[:, :1].expand(shape).stride()


def strides_of(result: Any) -> tuple[int, ...]:
    first = result if isinstance(result, Tensor) else result[0]
    return first.stride()


@pytest.mark.parametrize("op", [*ITERATED, *ON_CPU], ids=str)
def test_a_fake_result_has_the_strides_of_the_kernels(op: torch._ops.OpOverload):
    different, fake = [], FakeTensorMode()
    with torch.no_grad(), eager_kernels():
        for shape in SHAPES:
            all_strides = list(dict.fromkeys(layouts(shape)))  # some are equal where a dimension is 1
            real = [[torch.empty_strided(shape, strides).fill_(0.5) for strides in all_strides] for _ in range(2)]
            with fake:
                blank = [[torch.empty_strided(shape, strides) for strides in all_strides] for _ in range(2)]
            for one, other in product(range(len(all_strides)), repeat=2):
                eager = strides_of(CALLS[op](real[0][one], real[1][other]))
                with fake:
                    traced = strides_of(CALLS[op](blank[0][one], blank[1][other]))
                if traced != eager:
                    different.append((all_strides[one], all_strides[other], eager, traced))
    assert different == []


def test_a_norm_over_channels_of_one_pixel_before_a_pool_equals_eager():
    # of images of one pixel, only the strides tell whether they are contiguous or channels_last
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.norm = nn.Conv2d(3, 16, 4, stride=4), nn.LayerNorm(16)
            self.mix = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())

        def forward(self, images: Tensor) -> Tensor:
            return self.mix(self.norm(self.down(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    def make() -> Workload:
        torch.manual_seed(0)
        model = Pixels()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return Workload(model, lambda model, batch: model(batch).sin().mean(), optimizer, torch.randn(4, 3, 4, 4))

    assert any("as_strided_scatter" in op.name for op in capture(make()).graph.ops)
    assert_equals_eager(make(), make())


def test_attention_behind_a_batch_norm_over_features_equals_eager():
    # the norm returns contiguous data, so eager's linear layer reads a transposed view and multiplies in another order
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 1)
            self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, words: Tensor) -> Tensor:
            normal = self.norm(words.transpose(1, 2)).transpose(1, 2)
            parts = [project(normal).view(*words.shape[:2], 4, 8).transpose(1, 2) for project in self.projections]
            mixed = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1)
            return self.head(mixed.transpose(1, 2).flatten(2) + words)

    def make() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(Attention())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return Workload(model, lambda model, batch: model(batch).square().mean(), optimizer, torch.randn(8, 4, 32))

    assert_equals_eager(make(), make())


def test_a_group_norm_behind_a_transposed_gradient_equals_eager():
    # the kernel ignores strides: autograd copies the gradient before, but only if it knows that it is transposed
    inner = ("branches", (), (("dropout", True, 1.0), ("depthwise", True), ("conv", 2)))
    norm = ("branches", (("norm", "group"), inner, ("residual", ())), ())
    pooled = ("branches", (("pool", None), ("activation", "sigmoid")), (("twice", None), ("dropout", False, 0.0)))
    chain = Chain((norm, ("activation", "relu6"), pooled), 1, 1, "sgd", 0.0)
    one, other = chain.make(), chain.make()
    for workload in (one, other):
        loss_fn = workload.loss_fn
        workload.loss_fn = lambda model, batch, loss_fn=loss_fn: loss_fn(model, batch)[0]
    assert_equals_eager(one, other)
