"""The user's own step in plain PyTorch, and the way back to where the factory left everything."""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer_copy import held_tensors
from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot
from autotune.errors import ConfigError
from autotune.measure.messages import Spec
from autotune.measure.worker.reference import Reference, Writer
from autotune.runtime import malloc
from autotune.workloads.factory import load
from autotune.workloads.memory_format import choices, convert_batch, convert_model
from autotune.workloads.workload import Workload, infer

OnGradient = Callable[[str, torch.Tensor], None]


class Eager:
    """A workload in this process: its plain step, its tensors by name, and what it must forget between measurements."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._seed()
        self.workload = _on_device(load(spec.reference, spec.arguments), spec.device_kind)
        if spec.memory_format not in choices(self.workload.model):
            raise ConfigError(
                f"{spec.reference} leaves no choice of a memory format: no contiguous weights of four dimensions; "
                "leave --memory-format out"
            )
        self._lie_in(spec.memory_format)
        self._initial = self._save_initial()
        optimizer = self.workload.optimizer
        self._optimizer_start = None if optimizer is None else OptimizerSnapshot(optimizer)

    def step(self, on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
        """One plain step, as anyone writes it."""
        model, loss_fn, optimizer, batch = (
            self.workload.model, self.workload.loss_fn, self.workload.optimizer, self.workload.batch,
        )  # fmt: skip
        if loss_fn is None:
            with torch.no_grad():
                return tensors_of(infer(model, batch))
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        made = loss_fn(model, batch)
        loss = made[0] if isinstance(made, tuple) else made
        loss.backward()
        if optimizer is not None:
            if on_gradient is not None:
                self._tell_gradients(optimizer, on_gradient)
            optimizer.step()
        return tensors_of(made)

    @contextlib.contextmanager
    def users_own(self) -> Iterator[None]:
        """Everything as the factory made it, whatever format plans run in."""
        self._lie_in("")
        try:
            yield
        finally:
            self._lie_in(self._spec.memory_format)

    def batch(self) -> list[torch.Tensor]:
        """Its tensors."""
        return [leaf for leaf in pytree.tree_leaves(self.workload.batch) if isinstance(leaf, torch.Tensor)]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, buffers and the optimizer's state."""
        yield from self._own_tensors()
        if self.workload.optimizer is None:
            return
        state = self.workload.optimizer.state
        for name, parameter in self.workload.model.named_parameters():
            leaves = pytree.tree_flatten_with_path(state[parameter])[0] if parameter in state else ()
            for path, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    yield f"state.{name}{pytree.keystr(path)}", leaf

    def static_bytes(self) -> int:
        """Of all that stands between two steps."""
        tensors = [*(tensor for _, tensor in self.named_tensors()), *self.batch()]
        if self.workload.optimizer is not None:  # inner optimizers and slow weights, too
            tensors += held_tensors(self.workload.optimizer)
        kind = self._spec.device_kind
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == kind}
        return sum(storage.nbytes() for storage in storages.values())

    def restore(self) -> None:
        """Bring parameters, buffers, optimizer and generators back to where the factory left them."""
        self.forget()
        with torch.no_grad():
            for name, tensor in self._own_tensors():
                tensor.copy_(self._initial.load(name))
        self._seed()

    def forget(self) -> None:
        """Hold no more memory than the factory's own, while others are measured."""
        if self._optimizer_start is not None:
            self._optimizer_start.restore()
        self.forget_gradients()
        trim()

    def forget_gradients(self) -> None:
        self.workload.model.zero_grad(set_to_none=True)

    def _lie_in(self, memory_format: str) -> None:
        if self._spec.memory_format:
            convert_model(self.workload.model, self.workload.optimizer, memory_format)
            self.workload.batch = convert_batch(self.workload.batch, memory_format)

    def _seed(self) -> None:
        random.seed(self._spec.seed)
        np.random.seed(self._spec.seed)
        torch.manual_seed(self._spec.seed)

    def _save_initial(self) -> Reference:
        directory = Path(self._spec.scratch) / f"initial-{os.getpid()}"
        with contextlib.closing(Writer(directory)) as writer:
            for name, tensor in self._own_tensors():
                writer.add(name, tensor)
        return Reference(directory)

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.workload.model.named_parameters():
            yield f"parameter.{name}", parameter
        for name, buffer in self.workload.model.named_buffers():
            yield f"buffer.{name}", buffer

    def _tell_gradients(self, optimizer: torch.optim.Optimizer, tell: OnGradient) -> None:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.workload.model.named_parameters():
            if parameter.grad is not None and id(parameter) in owned:
                tell(name, parameter.grad)


def tensors_of(made: Any) -> list[torch.Tensor]:
    """What a step returned, without the graph behind it."""
    return [leaf.detach() for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def trim() -> None:
    """Collect garbage and give back what allocators keep."""
    gc.collect()
    malloc.trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _on_device(workload: Workload, kind: str) -> Workload:
    """Modules move in place, so that the optimizer's parameters stay the model's."""
    if kind == "cpu":
        return workload
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {kind}: torch {torch.__version__} sees no GPU here; autotune doctor says why, or use --device cpu"
        )
    workload.model.to(kind)
    moved = pytree.tree_map(lambda leaf: leaf.to(kind) if isinstance(leaf, torch.Tensor) else leaf, workload.batch)
    return replace(workload, batch=moved)
