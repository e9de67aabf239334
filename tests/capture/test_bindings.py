"""A faster callable dispatches the very op with the very arguments, or the op itself is called."""

import pytest
import torch

from autotune.capture.bindings import Bindings
from autotune.capture.program import Meta, Read, View

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Meta:
    return Meta(shape, torch.empty(shape).stride(), dtype, torch.device("cpu"))


METAS = (meta(4, 4), meta(4, 4), None)
BOUND = {
    "mul": (aten.mul.Tensor, (Read(0), Read(1)), torch.mul),
    "mul by a number": (aten.mul.Tensor, (Read(0), 0.5), torch.mul),
    "a product of a view": (aten.mm.default, (Read(0), View(aten.t.default, (Read(1),))), torch.mm),
    "cat": (aten.cat.default, ([Read(0), Read(1)], 1), torch.cat),
    "in place": (aten.mul_.Tensor, (Read(0), Read(1)), torch.Tensor.mul_),
    "reshape": (aten.reshape.default, (Read(0), [16]), torch.reshape),
}
LEFT = {
    "another overload": (aten.mul.Scalar, (Read(0), 0.5)),
    "a draw": (aten.bernoulli.p, (Read(0), 0.5)),
    "a value of unknown form": (aten.mul.Tensor, (Read(0), Read(2))),
    "no tensor": (aten.zeros.default, ([2, 2],)),
    "no function of that name": (aten.gelu_backward.default, (Read(0), Read(1))),
}


@pytest.mark.parametrize("case", BOUND)
def test_a_function_that_dispatches_the_op_is_taken(case: str):
    target, args, function = BOUND[case]
    bound = Bindings(METAS).bind(target, args, ())
    assert bound is not target
    assert bound.__name__ == function.__name__


@pytest.mark.parametrize("case", LEFT)
def test_an_op_that_no_function_stands_for_is_called_itself(case: str):
    target, args = LEFT[case]
    assert Bindings(METAS).bind(target, args, ()) is target


def test_nothing_but_aten_is_replaced():
    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert Bindings(METAS).bind(own, (Read(0),), ()) is own
