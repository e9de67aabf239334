"""Describe the batch and the model state that a prepared step depends on, beside Python values."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Signature:
    """Key of a prepared step. Steps with equal signatures run the same graph while the guards of its Python values hold."""

    batch: tuple[Any, ...]
    """Shape, strides, dtype and device of each tensor; other leaves unchanged."""
    structure: str
    """Nesting of the batch."""
    tensors: int
    """Hash of the model's parameters and buffers as objects, with dtype, device and whether each is trained."""
    modes: tuple[bool, ...]
    """`training` of each module."""
    keeps_gradients: str
    """Feature that needs every gradient before any update; empty if none does."""

    @property
    def shapes(self) -> str:
        """Shapes of the batch's tensors, for messages."""
        return ", ".join("x".join(map(str, part[0])) or "scalar" for part in self.batch if isinstance(part, tuple))


@dataclass(frozen=True, slots=True)
class ModelState:
    """State of a model that a step is captured for."""

    tensors: int
    modes: tuple[bool, ...]
    has_parameter_hooks: bool


def read_model_state(model: torch.nn.Module, trained: set[int]) -> ModelState:
    """Return the state of a model, in one walk, as it is read before each step. `trained` has ids of the optimizer's parameters."""
    modes: list[bool] = []
    parts: list[Any] = []
    has_any_hook = False
    for module in _modules(model):
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                key = id(parameter)
                trains = parameter.requires_grad and key in trained
                parts.append((key, parameter.dtype, parameter.device, trains))
                has_any_hook = has_any_hook or has_hooks(parameter)
        # a model that goes to another device or dtype and back has other buffers, but the same parameters
        parts.extend(id(buffer) for buffer in module._buffers.values())
    return ModelState(hash(tuple(parts)), tuple(modes), has_any_hook)


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules, each once; `Module.modules` recurses through generators, which is ten times as slow."""
    ids = {id(model)}
    modules = [model]
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in ids:
                ids.add(id(child))
                modules.append(child)
    return modules


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a hook on its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def make_signature(batch: Any, state: ModelState, keeps_gradients: str) -> Signature:
    """Return the signature of one call of a step.

    Raises:
        ConfigError: if a leaf of the batch is neither a tensor nor hashable.
    """
    leaves, spec = pytree.tree_flatten(batch)
    unhashable = next((x for x in leaves if not isinstance(x, (torch.Tensor, Hashable))), None)
    if unhashable is not None:
        raise ConfigError(
            f"the batch contains a {type(unhashable).__name__}, which cannot be compared between steps; pass tensors, numbers and "
            "strings"
        )
    described = tuple(
        (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves
    )
    return Signature(described, str(spec), state.tensors, state.modes, keeps_gradients)
