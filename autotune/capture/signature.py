"""Describe what a prepared step depends on beside Python values: the batch's form, and the state of the model's modules."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Signature:
    """Steps with equal signatures run the same graph, as long as the guards of its Python values hold."""

    batch: tuple[Any, ...]
    """Shape, strides, dtype and device of each tensor; other leaves as they are."""
    structure: str
    """The nesting of the batch."""
    tensors: int
    """Hash of the model's parameters and buffers as objects, with dtype, device and whether each is trained."""
    modes: tuple[bool, ...]
    """`training` of each module."""
    keeps_gradients: str
    """What needs every gradient before any update; empty if nothing does."""

    @property
    def shapes(self) -> str:
        """The shapes of the batch's tensors, for messages."""
        return ", ".join("x".join(map(str, part[0])) or "scalar" for part in self.batch if isinstance(part, tuple))


@dataclass(frozen=True, slots=True)
class ModelState:
    """The parts of a model that a step is captured for."""

    tensors: int
    modes: tuple[bool, ...]
    has_parameter_hooks: bool


def model_state(model: torch.nn.Module, trained: set[int]) -> ModelState:
    """Read the state in one walk: it happens before each step. `trained` has ids of the optimizer's parameters."""
    modes: list[bool] = []
    parts: list[Any] = []
    hooked = False
    for module in _modules(model):
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                key = id(parameter)
                trains = parameter.requires_grad and key in trained
                parts.append((key, parameter.dtype, parameter.device, trains))
                hooked = hooked or has_hooks(parameter)
        # a model that goes to another device or dtype and back has other buffers, but the same parameters
        parts.extend(id(buffer) for buffer in module._buffers.values())
    return ModelState(hash(tuple(parts)), tuple(modes), hooked)


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules, each once; `Module.modules` recurses through generators, which takes ten times as long."""
    seen = {id(model)}
    found = [model]
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a hook on its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def signature(batch: Any, state: ModelState, keeps_gradients: str) -> Signature:
    """Describe one call of a step. Raises ConfigError for a batch with a leaf that cannot be compared."""
    leaves, spec = pytree.tree_flatten(batch)
    strange = next((x for x in leaves if not isinstance(x, (torch.Tensor, Hashable))), None)
    if strange is not None:
        raise ConfigError(
            f"the batch holds a {type(strange).__name__}; give tensors, and numbers or strings beside them"
        )
    shown = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves)
    return Signature(shown, str(spec), state.tensors, state.modes, keeps_gradients)
