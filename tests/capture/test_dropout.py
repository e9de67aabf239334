import pytest
import torch
import torch.nn.functional as F

from autotune.capture.rewrites import dropout
from autotune.capture.tracer import capture
from tests.support.small import make, mlp


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1)])
def test_the_two_ops_equal_eager_bit_for_bit_in_both_directions(p: float, dtype: torch.dtype, axes: tuple[int, ...]):
    data = torch.randn(3, 17, 65).to(dtype).permute(axes).requires_grad_()
    gradient = torch.randn(3, 17, 65).to(dtype).permute(axes)
    torch.manual_seed(7)
    eager = F.dropout(data, p)
    eager.backward(gradient)
    torch.manual_seed(7)
    mask = dropout.draw_mask(tuple(data.shape), data.stride(), data.device, p)
    product = dropout.keep(data.detach(), mask, p)
    assert torch.equal(product, eager)
    assert product.stride() == eager.stride()
    assert torch.equal(dropout.keep(gradient, mask, p), data.grad)


def test_atens_own_backward_kernel_is_not_eagers_in_half_precision():
    gradient, mask = torch.randn(4000).bfloat16(), torch.rand(4000) > 0.1
    aten = torch.ops.aten.native_dropout_backward(gradient, mask, 1 / 0.9)
    assert not torch.equal(aten, dropout.keep(gradient, mask, 0.1))


def test_only_the_mask_is_random_and_the_product_can_be_computed_again():
    graph = capture(make(lambda: mlp(0.5))).graph
    (mask,) = [op for op in graph.ops if op.random]
    assert mask.target == "autotune.dropout.draw_mask"
    assert mask.inputs == ()
    products = [op for op in graph.ops if op.target == "autotune.dropout.keep"]
    assert len(products) == 2  # forward and backward
    assert all(op.repeatable and set(mask.outputs) <= set(op.inputs) for op in products)
