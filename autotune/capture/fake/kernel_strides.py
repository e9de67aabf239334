"""Correct the strides that fake tensors get from shape functions in Python to those that the kernels return.

Autograd's formulas copy a tensor only where it is not contiguous yet: with other strides than in eager, the trace loses
copies that a kernel depends on. The backward of a group norm ignores strides, so its gradients would be wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
Strides = tuple[int, ...]
Rule = Callable[[tuple[Any, ...]], Strides | None]
"""Return the strides of a kernel's first output from the arguments, which are tensors of the device `meta`; None if unknown."""


def _iterated(first: int, second: int) -> Rule:
    """Follow `TensorIterator` over the arguments at these positions, in the order in which the kernel adds them."""

    def rule(args: tuple[Any, ...]) -> Strides | None:
        left, right = args[first], args[second]
        return _iterate(left, right) if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) else None

    return rule


def _iterate(left: torch.Tensor, right: torch.Tensor) -> Strides:
    if left.shape == right.shape:
        # the iterator skips this fast path for tensors of the device meta; it decides strides of dimensions of size 1
        for layout in (torch.contiguous_format, torch.channels_last):
            if left.is_contiguous(memory_format=layout) and right.is_contiguous(memory_format=layout):
                return _empty(left, layout)
    strides: Strides = torch.mul(left, right).stride()
    return strides


def _contiguous(args: tuple[Any, ...]) -> Strides | None:
    """Return contiguous strides of the largest argument's shape."""
    tensors = [part for part in args if isinstance(part, torch.Tensor)]
    return _empty(max(tensors, key=torch.Tensor.numel), torch.contiguous_format)


def _suggested(position: int) -> Rule:
    """Follow the memory format that torch suggests for the argument at this position."""
    return lambda args: _empty(args[position], suggest_memory_format(args[position]))


def _normalized(data: int, *operands: int) -> Rule:
    """Follow batch norm: the memory format that torch suggests for the data, but contiguous where all arguments are.

    A tensor of one channel is contiguous in both formats. If the gradient's strides then differ from the data's, the kernel
    uses the format suggested for the data.
    """

    def rule(args: tuple[Any, ...]) -> Strides | None:
        read = [args[position] for position in (data, *operands)]
        alike = all(part.is_contiguous() and part.stride() == read[0].stride() for part in read)
        return _empty(args[data], torch.contiguous_format) if alike else _suggested(data)(args)

    return rule


def _like(position: int) -> Rule:
    """Follow the argument at this position, as `empty_like` does."""

    def rule(args: tuple[Any, ...]) -> Strides | None:
        # as for the iterator, `empty_like` of the device meta has other strides in dimensions of size 1
        dense = aten.is_non_overlapping_and_dense(args[position])
        return args[position].stride() if dense else _empty(args[position], torch.preserve_format)

    return rule


def _empty(tensor: torch.Tensor, layout: torch.memory_format) -> Strides:
    strides: Strides = torch.empty_like(tensor, memory_format=layout).stride()
    return strides


ITERATED: dict[torch._ops.OpOverload, Rule] = {
    aten.add.Tensor: _iterated(0, 1),
    aten.mul.Tensor: _iterated(0, 1),
    aten.native_dropout_backward.default: _iterated(0, 1),
    aten.hardtanh_backward.default: _iterated(0, 1),
    aten.elu_backward.default: _iterated(0, 5),
    aten.leaky_relu_backward.default: _iterated(1, 0),
    aten.threshold_backward.default: _iterated(1, 0),
    aten.softplus_backward.default: _iterated(0, 1),
    aten.hardswish_backward.default: _iterated(0, 1),
    aten.hardsigmoid_backward.default: _iterated(0, 1),
    aten.logit_backward.default: _iterated(0, 1),
    aten.copysign.Tensor: _iterated(0, 1),
    aten.logaddexp.default: _iterated(0, 1),
    aten.xlogy.Tensor: _iterated(0, 1),
    aten.heaviside.default: _iterated(0, 1),
}
"""Kernels over `TensorIterator`, which lays its result out on every device in the same way."""

ON_CPU: dict[torch._ops.OpOverload, Rule] = {
    aten.log_sigmoid_forward.default: _contiguous,
    aten.log_sigmoid_backward.default: _like(0),
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.mse_loss_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.huber_loss_backward.default: _contiguous,
    aten._log_softmax_backward_data.default: _contiguous,
    aten.glu_backward.default: _contiguous,
    aten.native_layer_norm.default: _contiguous,
    aten.native_layer_norm_backward.default: _contiguous,
    aten.reflection_pad2d_backward.default: _suggested(1),
    aten.native_batch_norm.default: _normalized(0),
    aten._native_batch_norm_legit.default: _normalized(0),
    aten._native_batch_norm_legit.no_stats: _normalized(0),
    aten._native_batch_norm_legit_functional.default: _normalized(0),
    aten.native_batch_norm_backward.default: _normalized(1, 0),
}
"""Kernels of a CPU that allocate their result themselves."""


@contextmanager
def kernel_strides() -> Iterator[None]:
    """Give fake tensors the strides of the kernels in these tables; other threads of the process must not trace meanwhile."""
    dispatch = FakeTensorMode.dispatch

    def corrected(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(mode, func, types, args, kwargs)
        rule = ITERATED.get(func) or ON_CPU.get(func)
        return result if rule is None else _restrided(mode, rule, func in ON_CPU, args, result)

    FakeTensorMode.dispatch = corrected  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _restrided(mode: FakeTensorMode, rule: Rule, on_cpu: bool, args: tuple[Any, ...], result: Any) -> Any:
    """Return the result with the strides of a rule for its first output."""
    if isinstance(result, (tuple, list)):
        return _restrided(mode, rule, on_cpu, args, result[0]), *result[1:]
    if not isinstance(result, FakeTensor) or (on_cpu and result.device.type != "cpu"):
        return result
    tensors = [part for part in (*args, result) if isinstance(part, torch.Tensor)]
    if not all(type(size) is int for part in tensors for size in (*part.shape, *part.stride())):
        return result  # symbolic: unknown until a step runs
    blank = [_blank(part) if isinstance(part, torch.Tensor) else part for part in args]
    with in_kernel_invocation_manager(mode):
        strides = rule(tuple(blank))
        if strides is None or strides == result.stride() or len(strides) != result.dim():
            return result
        laid_out = torch.empty_strided(result.shape, strides, dtype=result.dtype, device="meta")
    return FakeTensor(mode, laid_out, result.device)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device `meta` of the same shape, strides and dtype, outside of any mode."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
