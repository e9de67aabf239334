"""Kernels that may make their output in the buffer of an input, bit for bit what they make in a buffer of their own.

They are named one by one: that a kernel has an overload for it says nothing of its bits, nor that it takes no second
buffer on the way (PyTorch generates `out=` overloads that compute apart and copy).
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
class Kernel:
    """The overload that writes over an argument."""

    target: Any
    out: str = ""
    """Keyword of the tensor that it writes to; empty where it overwrites its first argument."""
    over: tuple[int, ...] = (0,)
    """Positions of the arguments that may be written over."""
    by_rows: bool = False
    """Reads a row whole before it writes it: known of the CPU's kernels, and for rows that lie in one piece."""


KERNELS: dict[Any, Kernel] = {
    slices.write_part: Kernel(slices.write_part_),
    aten.relu.default: Kernel(aten.relu_.default),
    aten.hardtanh.default: Kernel(aten.hardtanh_.default),
    aten.hardswish.default: Kernel(aten.hardswish_.default),
    aten.masked_fill.Scalar: Kernel(aten.masked_fill_.Scalar),
    aten.masked_fill.Tensor: Kernel(aten.masked_fill_.Tensor),
    aten.add.Tensor: Kernel(aten.add.out, "out", (0, 1)),
    aten.sub.Tensor: Kernel(aten.sub.out, "out", (0, 1)),
    aten.mul.Tensor: Kernel(aten.mul.out, "out", (0, 1)),
    aten.div.Tensor: Kernel(aten.div.out, "out", (0, 1)),
    aten.where.self: Kernel(aten.where.self_out, "out", (1, 2)),
    aten.pow.Tensor_Scalar: Kernel(aten.pow.Tensor_Scalar_out, "out"),
    aten.clamp.default: Kernel(aten.clamp.out, "out"),
    aten.clamp_min.default: Kernel(aten.clamp_min.out, "out"),
    aten.neg.default: Kernel(aten.neg.out, "out"),
    aten.exp.default: Kernel(aten.exp.out, "out"),
    aten.sqrt.default: Kernel(aten.sqrt.out, "out"),
    aten.rsqrt.default: Kernel(aten.rsqrt.out, "out"),
    aten.reciprocal.default: Kernel(aten.reciprocal.out, "out"),
    aten.tanh.default: Kernel(aten.tanh.out, "out"),
    aten.sigmoid.default: Kernel(aten.sigmoid.out, "out"),
    aten.silu.default: Kernel(aten.silu.out, "out"),
    aten.gelu.default: Kernel(aten.gelu.out, "out"),
    aten.elu.default: Kernel(aten.elu.out, "out"),
    aten.leaky_relu.default: Kernel(aten.leaky_relu.out, "out"),
    aten.threshold_backward.default: Kernel(aten.threshold_backward.grad_input, "grad_input", (0, 1)),
    aten.hardtanh_backward.default: Kernel(aten.hardtanh_backward.grad_input, "grad_input", (0, 1)),
    aten.tanh_backward.default: Kernel(aten.tanh_backward.grad_input, "grad_input", (0, 1)),
    aten.sigmoid_backward.default: Kernel(aten.sigmoid_backward.grad_input, "grad_input", (0, 1)),
    aten.silu_backward.default: Kernel(aten.silu_backward.grad_input, "grad_input", (0, 1)),
    aten.gelu_backward.default: Kernel(aten.gelu_backward.grad_input, "grad_input", (0, 1)),
    aten.elu_backward.default: Kernel(aten.elu_backward.grad_input, "grad_input", (0, 5)),
    aten.leaky_relu_backward.default: Kernel(aten.leaky_relu_backward.grad_input, "grad_input", (0, 1)),
    aten._softmax.default: Kernel(aten._softmax.out, "out", by_rows=True),
    aten._log_softmax.default: Kernel(aten._log_softmax.out, "out", by_rows=True),
    aten._softmax_backward_data.default: Kernel(aten._softmax_backward_data.out, "grad_input", (0, 1), by_rows=True),
    aten._log_softmax_backward_data.default: Kernel(aten._log_softmax_backward_data.out, "out", (0, 1), by_rows=True),
}
"""By the overload that makes its output in a buffer of its own, as a trace has it."""


def overwritable(node: fx.Node, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Values in whose buffer a traced call may make its output; `args` are its arguments as the call has them."""
    kernel, made = KERNELS.get(node.target), node.meta["val"]
    if kernel is None or (kernel.by_rows and not _whole_rows(node, made)):
        return ()
    everything = list(reads(args))
    sources = [source.meta["val"] for source in node.all_input_nodes if isinstance(source.meta["val"], torch.Tensor)]
    full = [source for source in sources if source.shape == made.shape]
    if any(source.stride() != made.stride() for source in full):
        return ()  # the first of them decides how the output lies, and later kernels by that how they add up
    # of images a fake tensor may not know the layout that the real one has: there the first alone is sure to decide
    return tuple(
        value
        for position in (kernel.over if made.ndim < 4 else kernel.over[:1])
        if position < len(args)
        and isinstance(source := node.args[position], fx.Node)
        and _same_place(source.meta["val"], made)
        for value in reads(args[position])
        if everything.count(value) == 1
    )


def overwriting(call: Call, value: int) -> Call:
    """The same call, with its output in the buffer of `value`, which must be overwritable."""
    kernel = KERNELS[call.target]
    if not kernel.out:
        return replace(call, target=kernel.target)
    argument = next(call.args[position] for position in kernel.over if value in _read_at(call, position))
    return replace(call, target=kernel.target, kwargs=(*call.kwargs, (kernel.out, argument)))


def _read_at(call: Call, position: int) -> Iterator[int]:
    return reads(call.args[position]) if position < len(call.args) else iter(())


def _same_place(source: Any, made: torch.Tensor) -> bool:
    """Whether every element of the output would lie where that element of the source lies, and nothing else does."""
    return (
        isinstance(source, torch.Tensor)
        and (source.shape, source.stride(), source.dtype) == (made.shape, made.stride(), made.dtype)
        and (source.device, source.storage_offset()) == (made.device, 0)
        and source.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    )


def _whole_rows(node: fx.Node, made: torch.Tensor) -> bool:
    """Over the last dimension of a contiguous tensor on the CPU, in its own dtype."""
    dim: Any = node.args[2 if "backward" in str(node.target) else 1]
    return made.device.type == "cpu" and made.is_contiguous() and dim % max(1, made.ndim) == made.ndim - 1
