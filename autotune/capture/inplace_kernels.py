"""List the kernels that can write their output to the buffer of an input, with the same bits as in a new buffer.

They are listed one by one. An in-place overload need not give the same bits, and it may allocate a second buffer: PyTorch
generates `out=` overloads that compute elsewhere and copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autotune.capture.program import Call, reads
from autotune.capture.rewrites import slices

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InplaceKernel:
    """Overload that overwrites an argument."""

    target: Any
    out: str = ""
    """Keyword of the tensor that the kernel writes to; empty where it overwrites its first argument."""
    over: tuple[int, ...] = (0,)
    """Positions of the arguments that may be overwritten."""
    by_rows: bool = False
    """The kernel reads a whole row before it writes it, which holds for CPU kernels on contiguous rows."""


KERNELS: dict[Any, InplaceKernel] = {
    slices.write_part: InplaceKernel(slices.write_part_),
    aten.addmm.default: InplaceKernel(aten.addmm_.default),
    aten.relu.default: InplaceKernel(aten.relu_.default),
    aten.hardtanh.default: InplaceKernel(aten.hardtanh_.default),
    aten.hardswish.default: InplaceKernel(aten.hardswish_.default),
    aten.masked_fill.Scalar: InplaceKernel(aten.masked_fill_.Scalar),
    aten.masked_fill.Tensor: InplaceKernel(aten.masked_fill_.Tensor),
    aten.add.Tensor: InplaceKernel(aten.add.out, "out", (0, 1)),
    aten.sub.Tensor: InplaceKernel(aten.sub.out, "out", (0, 1)),
    aten.mul.Tensor: InplaceKernel(aten.mul.out, "out", (0, 1)),
    aten.div.Tensor: InplaceKernel(aten.div.out, "out", (0, 1)),
    aten.where.self: InplaceKernel(aten.where.self_out, "out", (1, 2)),
    aten.pow.Tensor_Scalar: InplaceKernel(aten.pow.Tensor_Scalar_out, "out"),
    aten.clamp.default: InplaceKernel(aten.clamp.out, "out"),
    aten.clamp_min.default: InplaceKernel(aten.clamp_min.out, "out"),
    aten.neg.default: InplaceKernel(aten.neg.out, "out"),
    aten.exp.default: InplaceKernel(aten.exp.out, "out"),
    aten.sqrt.default: InplaceKernel(aten.sqrt.out, "out"),
    aten.rsqrt.default: InplaceKernel(aten.rsqrt.out, "out"),
    aten.reciprocal.default: InplaceKernel(aten.reciprocal.out, "out"),
    aten.tanh.default: InplaceKernel(aten.tanh.out, "out"),
    aten.sigmoid.default: InplaceKernel(aten.sigmoid.out, "out"),
    aten.silu.default: InplaceKernel(aten.silu.out, "out"),
    aten.gelu.default: InplaceKernel(aten.gelu.out, "out"),
    aten.elu.default: InplaceKernel(aten.elu.out, "out"),
    aten.leaky_relu.default: InplaceKernel(aten.leaky_relu.out, "out"),
    aten.threshold_backward.default: InplaceKernel(aten.threshold_backward.grad_input, "grad_input", (0, 1)),
    aten.hardtanh_backward.default: InplaceKernel(aten.hardtanh_backward.grad_input, "grad_input", (0, 1)),
    aten.tanh_backward.default: InplaceKernel(aten.tanh_backward.grad_input, "grad_input", (0, 1)),
    aten.sigmoid_backward.default: InplaceKernel(aten.sigmoid_backward.grad_input, "grad_input", (0, 1)),
    aten.silu_backward.default: InplaceKernel(aten.silu_backward.grad_input, "grad_input", (0, 1)),
    aten.gelu_backward.default: InplaceKernel(aten.gelu_backward.grad_input, "grad_input", (0, 1)),
    aten.elu_backward.default: InplaceKernel(aten.elu_backward.grad_input, "grad_input", (0, 5)),
    aten.leaky_relu_backward.default: InplaceKernel(aten.leaky_relu_backward.grad_input, "grad_input", (0, 1)),
    aten._softmax.default: InplaceKernel(aten._softmax.out, "out", by_rows=True),
    aten._log_softmax.default: InplaceKernel(aten._log_softmax.out, "out", by_rows=True),
    aten._softmax_backward_data.default: InplaceKernel(
        aten._softmax_backward_data.out, "grad_input", (0, 1), by_rows=True
    ),
    aten._log_softmax_backward_data.default: InplaceKernel(
        aten._log_softmax_backward_data.out, "out", (0, 1), by_rows=True
    ),
}
"""In-place kernels by the overload that a trace has, which allocates its output."""


def find_overwritable(node: fx.Node, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the values whose buffers a traced call may overwrite with its output; `args` are the arguments of the call."""
    kernel, result = KERNELS.get(node.target), node.meta["val"]
    if kernel is None or (kernel.by_rows and not _has_whole_rows(node, result)):
        return ()
    everything = list(reads(args))
    sources = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta["val"], torch.Tensor)]
    full = [source for source in sources if source.shape == result.shape]
    if any(source.stride() != result.stride() for source in full):
        return ()  # the first of them decides the output's strides, by which later kernels choose their order of summation
    # the layout of a fake image tensor may differ from the real one's: there only the first surely decides
    return tuple(
        value
        for position in (kernel.over if result.ndim < 4 else kernel.over[:1])
        if position < len(args)
        and isinstance(source := node.args[position], fx.Node)
        and _is_same_place(source.meta["val"], result)
        for value in reads(args[position])
        if everything.count(value) == 1
    )


def write_over(call: Call, value: int) -> Call:
    """Return the call with its output in the buffer of `value`, one of those that `find_overwritable` returns."""
    kernel = KERNELS[call.target]
    if not kernel.out:
        return replace(call, target=kernel.target)
    argument = next(call.args[position] for position in kernel.over if value in _read_at(call, position))
    return replace(call, target=kernel.target, kwargs=(*call.kwargs, (kernel.out, argument)))


def _read_at(call: Call, position: int) -> Iterator[int]:
    return reads(call.args[position]) if position < len(call.args) else iter(())


def _is_same_place(source: Any, result: torch.Tensor) -> bool:
    """Return whether output and source have the same strides and bytes, and the source is its whole storage."""
    return (
        isinstance(source, torch.Tensor)
        and (source.shape, source.stride(), source.dtype) == (result.shape, result.stride(), result.dtype)
        and (source.device, source.storage_offset()) == (result.device, 0)
        and source.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _has_whole_rows(node: fx.Node, result: torch.Tensor) -> bool:
    """Return whether a kernel reduces over the last dimension of a contiguous tensor on the CPU."""
    dim: Any = node.args[2 if "backward" in str(node.target) else 1]
    return result.device.type == "cpu" and result.is_contiguous() and dim % max(1, result.ndim) == result.ndim - 1
