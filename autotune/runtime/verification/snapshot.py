"""Copy everything that a training step changes, and restore it: values are copied back into the user's own tensors."""

import random
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot

LOSS_PREFIX = "loss_fn."
"""Prefix of the names of tensors that belong to the loss module and not to the model."""


class Snapshot:
    """The state of a model, a loss that is a module, the optimizer, a gradient scaler and all generators at one moment."""

    @torch.no_grad()
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        loss_fn: object = None,
    ) -> None:
        self._model, self._optimizer, self._scaler, self._loss_fn = model, optimizer, scaler, loss_fn
        parameters = [parameter for _, parameter in named_parameters(model, loss_fn)]
        buffers = [buffer for _, buffer in named_buffers(model, loss_fn)]
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
        self._buffers = [(module, dict(module._buffers)) for module in list_modules(model, loss_fn)]
        self._optimizer_snapshot = None if optimizer is None else OptimizerSnapshot(optimizer)
        self._values = [(tensor, tensor.detach().clone()) for tensor in (*parameters, *buffers)]
        tensors = tuple(tensor for tensor, _ in self._values if not tensor.is_inference())  # those have no version
        self._versions = tensors, tuple(tensor._version for tensor in tensors)
        names = (name for name, _ in named_tensors(model, optimizer, loss_fn))
        self._named = dict(zip(names, self._copies(), strict=True))
        self._scale = None if scaler is None else scaler.state_dict()
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state(), _cuda_generators())

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Copies by the names of `named_tensors`."""
        return self._named

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, versions included: autograd's graphs of before stay valid. It may be called several times."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        if self._optimizer_snapshot is not None:
            self._optimizer_snapshot.restore()
        for tensor, value in self._values:
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                restore_tensor(tensor, value)
        torch._C._autograd._unsafe_set_version_counter(*self._versions)
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        if self._scaler is not None and self._scale is not None:
            self._scaler.load_state_dict(self._scale)
        python_state, numpy_state, cpu_state, cuda_states = self._generators
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    def _copies(self) -> Iterator[torch.Tensor]:
        """Yield the copy of each of `named_tensors`, without copying twice."""
        state = [] if self._optimizer_snapshot is None else self._optimizer_snapshot.values
        copies = {id(tensor): value for tensor, value in (*self._values, *state)}
        gradients = {id(parameter.grad): gradient for parameter, gradient in self._gradients if gradient is not None}
        for _, tensor in named_tensors(self._model, self._optimizer, self._loss_fn):
            copy = copies.get(id(tensor), gradients.get(id(tensor)))
            yield tensor if copy is None else copy


def restore_tensor(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value back into a tensor, also into an expanded one, whose elements share memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def list_modules(model: torch.nn.Module, loss_fn: object) -> list[torch.nn.Module]:
    """Return the modules of a model and of a loss that is a module, each once."""
    roots = [root for root in (model, loss_fn) if isinstance(root, torch.nn.Module)]
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def named_parameters(model: torch.nn.Module, loss_fn: object) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a model and of a loss that is a module, each once; the loss's names begin with `LOSS_PREFIX`."""
    yield from model.named_parameters()
    if isinstance(loss_fn, torch.nn.Module):
        ids = set(map(id, model.parameters()))
        yield from ((LOSS_PREFIX + name, part) for name, part in loss_fn.named_parameters() if id(part) not in ids)


def named_buffers(model: torch.nn.Module, loss_fn: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model and of a loss that is a module, each once; the loss's names begin with `LOSS_PREFIX`."""
    yield from model.named_buffers()
    if isinstance(loss_fn, torch.nn.Module):
        ids = set(map(id, model.buffers()))
        yield from ((LOSS_PREFIX + name, part) for name, part in loss_fn.named_buffers() if id(part) not in ids)


def named_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, loss_fn: object = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, kept gradients of the model, buffers, optimizer state and the main generator by name."""
    for name, parameter in named_parameters(model, loss_fn):
        yield f"parameter {name}", parameter
        # an optimizer's step trains the model alone: gradients of the loss's own parameters are not part of it
        if parameter.grad is not None and not name.startswith(LOSS_PREFIX):
            yield f"kept gradient {name}", parameter.grad
    for name, buffer in named_buffers(model, loss_fn):
        yield f"buffer {name}", buffer
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for path, leaf in pytree.tree_flatten_with_path(state)[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"state {name}{pytree.keystr(path)}", leaf
    yield "generator", torch.get_rng_state()


def _cuda_generators() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
