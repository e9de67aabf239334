"""Set up witnesses of a step's rounding error, for `gates`: the step in float64, or from weights moved by one rounding.

Both change the user's objects in place, temporarily: a loss function may hold the model in its closure, and an optimizer
cannot be copied in general.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.runtime.verification.snapshot import list_modules, named_parameters


class Witness(StrEnum):
    """Kind of a further eager step, which shows eager's own rounding error."""

    FLOAT64 = "float64"
    """In float64 throughout."""
    MOVED_0 = "moved 0"
    """From weights moved by one rounding, with random signs."""
    MOVED_1 = "moved 1"
    """From weights moved by one rounding, with other signs."""
    CARRIED = "carried"
    """With each gradient moved by its admitted error."""


def in_double(tree: Any) -> Any:
    """Copy a tree with its floating-point tensors in float64."""
    return pytree.tree_map(lambda leaf: to_double(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


@contextmanager
def float64(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: object = None) -> Iterator[None]:
    """Hold model, loss, gradients and the optimizer's state in float64; afterwards everything is as before."""
    modules = list_modules(model, loss_fn)
    with torch.no_grad():
        parameters = [parameter for _, parameter in named_parameters(model, loss_fn)]
        data = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
        buffers = [dict(module._buffers) for module in modules]
        state = {} if optimizer is None else {key: dict(parts) for key, parts in optimizer.state.items()}
    try:
        for parameter, values, gradient in data:
            parameter.grad = None
            parameter.data = to_double(values)
            parameter.grad = None if gradient is None else to_double(gradient)
        for module in modules:
            module._buffers.update(in_double(module._buffers))
        if optimizer is not None:
            for key, parts in state.items():
                optimizer.state[key] = in_double(parts)
        yield
    finally:
        for parameter, values, gradient in data:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient
        for module, named in zip(modules, buffers, strict=True):
            module._buffers.clear()
            module._buffers.update(named)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)


@torch.no_grad()
def move_weights(model: torch.nn.Module, draw: int, loss_fn: object = None) -> None:
    """Multiply each weight by 1 + eps or 1 - eps of its dtype, in place; equal `draw` means equal signs."""
    for number, (_, parameter) in enumerate(named_parameters(model, loss_fn)):
        if parameter.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(2**20 * draw + number)
            signs = torch.randint(2, parameter.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter.device, torch.float64))


def to_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy of a tensor, in float64 if it is a floating-point tensor."""
    dtype = torch.float64 if tensor.dtype.is_floating_point else tensor.dtype
    return tensor.detach().to(dtype, copy=True)
