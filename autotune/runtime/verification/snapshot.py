"""Copy everything that a training step changes, and restore it: values are copied back into the user's own tensors."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot


class Snapshot:
    """The state of a model, its optimizer, a gradient scaler and all generators at one moment."""

    @torch.no_grad()
    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        self._buffers = [dict(module._buffers) for module in model.modules()]
        self._optimizer_snapshot = None if optimizer is None else OptimizerSnapshot(optimizer)
        self._values = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
        tensors = tuple(tensor for tensor, _ in self._values)
        self._versions = tensors, tuple(tensor._version for tensor in tensors)
        self._named = dict(zip((name for name, _ in named_tensors(model, optimizer)), self._copies(), strict=True))
        self._scale = None if scaler is None else scaler.state_dict()
        self._generators = (random.getstate(), np.random.get_state(), torch.get_rng_state(), _cuda_generators())

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Copies by the names of `named_tensors`."""
        return self._named

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, versions included: autograd's graphs of before stay valid. It may be called several times."""
        for module, buffers in zip(self._model.modules(), self._buffers, strict=True):
            module._buffers.clear()
            module._buffers.update(buffers)
        if self._optimizer_snapshot is not None:
            self._optimizer_snapshot.restore()
        for tensor, value in self._values:
            tensor.copy_(value)
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
        for _, tensor in named_tensors(self._model, self._optimizer):
            copy = copies.get(id(tensor), gradients.get(id(tensor)))
            yield tensor if copy is None else copy


def named_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, kept gradients, buffers, optimizer state and the main generator by name."""
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
        if parameter.grad is not None:
            yield f"kept gradient {name}", parameter.grad
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for path, leaf in pytree.tree_flatten_with_path(state)[0]:
            if isinstance(leaf, torch.Tensor):
                yield f"state {name}{pytree.keystr(path)}", leaf
    yield "generator", torch.get_rng_state()


def _cuda_generators() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
