"""Convert a model's weights and a batch's images to another memory format, as `model.to(memory_format=...)` does."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from autotune.errors import PlanError
from autotune.workloads.batch import map_batch
from autotune.workloads.workload import Workload

MEMORY_FORMATS = {"": torch.contiguous_format, "channels_last": torch.channels_last}
"""Memory formats by their names in plans. The empty name keeps the format of the user's tensors."""

_CONVERTED: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()
"""Models that were converted for good, with their format."""


def available_formats(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the formats that a model can run in: only the user's format without contiguous 4-D weights."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    return tuple(MEMORY_FORMATS) if weights and all(weight.is_contiguous() for weight in weights) else ("",)


def convert_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, memory_format: str) -> None:
    """Convert parameters, buffers and optimizer state in place; all stay the same objects.

    Raises:
        PlanError: The format is unknown.
    """
    if memory_format not in MEMORY_FORMATS:
        raise PlanError(f"memory_format is {memory_format!r}; known: channels_last, or empty for the user's own")
    _convert_in_place(_tensors(model, optimizer), memory_format)


def keep_in_format(model: torch.nn.Module, memory_format: str) -> None:
    """Convert optimizer state to the format of this model's parameters before each step of any optimizer.

    State that is loaded from a checkpoint may be contiguous. Fused kernels of torch read a parameter and its state in the
    order of their memory, so they would apply contiguous state to other elements of the parameter.
    """
    if convert_state not in _global_optimizer_pre_hooks.values():
        register_optimizer_step_pre_hook(convert_state)
    _CONVERTED[model] = memory_format


def convert_state(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Let an optimizer's state lie as its parameters do, for the models of `keep_in_format`; torch calls it before each step."""
    del arguments
    for model in list(_CONVERTED):
        for parameter in model.parameters():
            if parameter.ndim == 4 and parameter in optimizer.state:
                for part in _state_tensors(optimizer, parameter):
                    # the loop may have given the parameter another layout since
                    if part.shape == parameter.shape and part.stride() != parameter.stride():
                        image = torch.empty_like(parameter, dtype=part.dtype, device=part.device, requires_grad=False)
                        part.data = image.copy_(part)


@contextlib.contextmanager
def in_format(workload: Workload, memory_format: str) -> Iterator[Workload]:
    """Convert a workload inside the context only; afterwards its tensors lie in the memory that they had.

    Raises:
        PlanError: The format is unknown.
    """
    if not memory_format:
        yield workload
        return
    originals = [(tensor, tensor.data) for tensor in _tensors(workload.model, workload.optimizer)]
    try:
        convert_model(workload.model, workload.optimizer, memory_format)
        yield replace(workload, batch=convert_batch(workload.batch, memory_format))
    finally:
        for tensor, data in originals:
            tensor.data = data


def convert_batch(batch: Any, memory_format: str) -> Any:
    """Return the batch with its 4-D tensors converted. Tensors in the format already are not copied."""

    def convert(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(memory_format=MEMORY_FORMATS[memory_format]) if leaf.ndim == 4 else leaf

    return map_batch(convert, batch)


def _convert_in_place(tensors: Iterable[torch.Tensor], memory_format: str) -> None:
    for tensor in tensors:
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=MEMORY_FORMATS[memory_format])


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    # backward would add into a gradient's own layout, and a fused optimizer reads it in the parameter's
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    yield from model.buffers()
    if optimizer is not None:
        for parameter in model.parameters():
            yield from _state_tensors(optimizer, parameter)


def _state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(optimizer.state.get(parameter, {}))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
