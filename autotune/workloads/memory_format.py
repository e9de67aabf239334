"""Put a model's weights and a batch's images into another memory format, as `model.to(memory_format=...)` does."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.errors import PlanError

FORMATS = {"": torch.contiguous_format, "channels_last": torch.channels_last}
"""By the name that a plan has for it; a plan without a name leaves everything as the user has it."""


def choices(model: torch.nn.Module) -> tuple[str, ...]:
    """Formats between which a model leaves a choice: none without weights of four dimensions, or where they have one."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    return tuple(FORMATS) if weights and all(weight.is_contiguous() for weight in weights) else ("",)


def convert_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, memory_format: str) -> None:
    """In place: parameters, buffers and what the optimizer holds for them stay the same objects."""
    if memory_format not in FORMATS:
        raise PlanError(f"memory_format is {memory_format!r}; known: channels_last, or empty for the user's own")
    for tensor in _own(model, optimizer):
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=FORMATS[memory_format])


def convert_batch(batch: Any, memory_format: str) -> Any:
    """The batch with its tensors of four dimensions converted; those that lie so already are not copied."""

    def converted(leaf: Any) -> Any:
        images = isinstance(leaf, torch.Tensor) and leaf.ndim == 4
        return leaf.to(memory_format=FORMATS[memory_format]) if images else leaf

    return pytree.tree_map(converted, batch)


def _own(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        yield from (leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor))
