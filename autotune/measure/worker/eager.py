"""The user's step in plain PyTorch, and the restoration of the state that the factory left."""

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.loop_updates import MAX_NORM
from autotune.capture.optimizers.optimizer_copy import collect_state_tensors
from autotune.capture.optimizers.optimizer_snapshot import OptimizerSnapshot
from autotune.capture.signature import refuse_uninitialized
from autotune.errors import ConfigError, DeviceRefusedError
from autotune.ir.allocation import allocated_bytes
from autotune.kernels.threads import use_threads
from autotune.measure.spec import Spec
from autotune.measure.worker.reference import Reference, Writer
from autotune.runtime import malloc
from autotune.runtime.update_cycle import UpdateCycle
from autotune.runtime.verification.snapshot import named_buffers, named_parameters
from autotune.workloads.batch import batch_tensors, map_batch, spans_of_storages
from autotune.workloads.factory import load_workload
from autotune.workloads.memory_format import available_formats, convert_batch, convert_model
from autotune.workloads.reference import LIVE_SUFFIX
from autotune.workloads.workload import Workload, infer, select_loss

OnGradient = Callable[[str, torch.Tensor], None]
"""A function called with the name and the value of each gradient."""


class EagerWorkload:
    """A workload in this process: its plain step, its tensors by name, and its initial state."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._seed()
        workload = load_workload(spec.workload.reference, spec.workload.arguments, spec.loop)
        refuse_uninitialized(workload.model, workload.loss_fn)
        self.workload = _on_device(workload, spec.device_kind)
        self.on_gradient: OnGradient | None = None
        """Called with every gradient right before the update of a loop that needs all of them."""
        self.varies = False
        """The micro-batches of an update differ, so that a step which remembers the first one is detected."""
        # a training process converted what it saved
        is_converted = spec.workload.reference.endswith(LIVE_SUFFIX)
        if not is_converted and spec.memory_format not in available_formats(self.workload.model):
            raise ConfigError(
                f"{spec.workload.reference} leaves no choice of a memory format: no contiguous weights of four dimensions; "
                "leave --memory-format out"
            )
        self._convert(spec.memory_format)
        self.own_threads = torch.get_num_threads()
        """Number of torch's threads that this process, or the one that saved the workload, has by itself."""
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self.cycle = self._make_cycle()
        self._initial = self._save_initial()
        optimizer = self.workload.optimizer
        self._optimizer_start = None if optimizer is None else OptimizerSnapshot(optimizer)

    def step(self, on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
        """Run one plain step, or all of one update of a loop, and return the results of the last.

        `on_gradient` is called before the update.
        """
        if self.cycle is not None:
            return self._run_cycle(self.cycle, on_gradient)
        model, loss_fn, optimizer, batch = (
            self.workload.model, self.workload.loss_fn, self.workload.optimizer, self.workload.batch,
        )  # fmt: skip
        if loss_fn is None:
            with torch.no_grad():
                return detached_tensors(infer(model, batch))
        # optimizers may train tensors that are no parameters of the model; without one, the step is gradients alone
        if optimizer is None:
            self.drop_gradients()
        else:
            optimizer.zero_grad(set_to_none=True)
        result = loss_fn(model, batch)
        loss = select_loss(result)
        loss.backward()
        if on_gradient is not None:
            self._report_gradients(on_gradient)
        if optimizer is not None:
            optimizer.step()
        return detached_tensors(result)

    @contextlib.contextmanager
    def factory_settings(self) -> Iterator[None]:
        """Keep model and batch in the factory's memory format and torch's threads at their own number, whatever plans have."""
        self._convert("")
        try:
            with use_threads(self.own_threads):
                yield
        finally:
            self._convert(self._spec.memory_format)

    @contextlib.contextmanager
    def other_batch(self, number: int) -> Iterator[None]:
        """Use another batch of the same shape inside the context, with micro-batches that differ; 0 is the workload's own."""
        first = self.workload.batch
        self.workload.batch, self.varies = map_batch(partial(shifted, by=number), first), True
        try:
            yield
        finally:
            self.workload.batch, self.varies = first, False

    def batch(self, number: int = 0) -> list[torch.Tensor]:
        """Return the tensors of the batch, or of the micro-batch with this number."""
        return batch_tensors(self._micro_batch(number))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters, buffers and the optimizer's state by name, those of a loss that is a module after the model's."""
        yield from self._model_tensors()
        if self.workload.optimizer is None:
            return
        state = self.workload.optimizer.state
        for name, parameter in named_parameters(self.workload.model, self.workload.loss_fn):
            leaves = pytree.tree_flatten_with_path(state[parameter])[0] if parameter in state else ()
            for path, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    yield f"state.{name}{pytree.keystr(path)}", leaf

    def static_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the device that are live between two steps."""
        return self._on_device([*self._state_tensors(), *self.batch()])

    def static_bytes(self) -> int:
        """Return the bytes of the device that are live between two steps.

        Of a batch that is a slice of a data set, the slice counts: the rest is memory of the process, as in the graph.
        """
        spans = spans_of_storages(self._on_device(self.batch()))
        state = [tensor.untyped_storage() for tensor in self._on_device(self._state_tensors())]
        spans |= {storage._cdata: storage.nbytes() for storage in state}
        return sum(allocated_bytes(nbytes, self._spec.device_kind) for nbytes in spans.values())

    def _on_device(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._spec.device_kind]

    def _state_tensors(self) -> list[torch.Tensor]:
        tensors = [tensor for _, tensor in self.named_tensors()]
        if self.workload.optimizer is not None:  # inner optimizers and slow weights, too
            tensors += collect_state_tensors(self.workload.optimizer)
        return tensors

    def restore(self, *, releases: bool = True) -> None:
        """Restore parameters, buffers, optimizer and generators to their state after the factory.

        With `releases=False` the allocators keep the memory that is freed.
        """
        self._drop_state()
        if releases:
            release_memory()
        with torch.no_grad():
            for name, tensor in self._model_tensors():
                tensor.copy_(self._initial.load(name))
        self._initial.evict()
        self._seed()
        self.cycle = self._make_cycle()

    def forget(self) -> None:
        """Drop optimizer state and gradients, so that only the factory's memory stays while others are measured."""
        self._drop_state()
        release_memory()

    def _drop_state(self) -> None:
        if self._optimizer_start is not None:
            self._optimizer_start.restore()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for _, parameter in named_parameters(self.workload.model, self.workload.loss_fn):
            parameter.grad = None

    def _make_cycle(self) -> UpdateCycle | None:
        """Return the updates of a loop that needs all gradients, with a new scaler; None for other loops."""
        loop, optimizer = self.workload.loop, self.workload.optimizer
        if not loop.needs_all_gradients or optimizer is None:
            return None
        scaler = torch.amp.GradScaler(self._spec.device_kind) if loop.scaler else None
        return UpdateCycle(optimizer, loop.accumulate, self._before_update, scaler)

    def _before_update(self) -> None:
        if self.on_gradient is not None:
            self._report_gradients(self.on_gradient)
        if self.workload.loop.clip:
            torch.nn.utils.clip_grad_norm_(self.workload.model.parameters(), MAX_NORM)

    def _run_cycle(self, cycle: UpdateCycle, on_gradient: OnGradient | None) -> list[torch.Tensor]:
        assert self.workload.loss_fn is not None
        self.on_gradient = on_gradient
        self.drop_gradients()
        outputs: list[torch.Tensor] = []
        for number in range(self.workload.loop.accumulate):
            outputs.clear()
            result = self.workload.loss_fn(self.workload.model, self._micro_batch(number))
            loss = select_loss(result)
            (cycle.scaler.scale(loss) if cycle.scaler is not None else loss).backward()
            outputs = detached_tensors(result)
            del result, loss
            cycle.count_step()
        return outputs

    def _micro_batch(self, number: int) -> Any:
        batch = self.workload.batch
        return map_batch(partial(shifted, by=number), batch) if self.varies and number else batch

    def _convert(self, memory_format: str) -> None:
        if self._spec.memory_format:
            convert_model(self.workload.model, self.workload.optimizer, memory_format)
            self.workload.batch = convert_batch(self.workload.batch, memory_format)

    def _seed(self) -> None:
        random.seed(self._spec.seed)
        np.random.seed(self._spec.seed)
        torch.manual_seed(self._spec.seed)

    def _save_initial(self) -> Reference:
        directory = self._spec.scratch / f"initial-{os.getpid()}"
        with contextlib.closing(Writer(directory)) as writer:
            for name, tensor in self._model_tensors():
                writer.add(name, tensor)
        initial = Reference(directory)
        initial.evict()
        return initial

    def _model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named_parameters(self.workload.model, self.workload.loss_fn):
            yield f"parameter.{name}", parameter
        for name, buffer in named_buffers(self.workload.model, self.workload.loss_fn):
            yield f"buffer.{name}", buffer

    def _report_gradients(self, on_gradient: OnGradient) -> None:
        optimizer = self.workload.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in named_parameters(self.workload.model, self.workload.loss_fn):
            if parameter.grad is not None and (optimizer is None or id(parameter) in trained):
                on_gradient(name, parameter.grad)


def shifted(leaf: torch.Tensor, by: int) -> torch.Tensor:
    """Return another batch of the same shape, so that a step which remembers the first one's data is detected.

    Offsets stay as they are: an embedding bag refuses them in another order.
    """
    if not leaf.ndim or not by or _are_offsets(leaf):
        return leaf
    return torch.empty_like(leaf).copy_(leaf.roll(by, 0))


def _are_offsets(leaf: torch.Tensor) -> bool:
    """Return True for rising integers from 0 on, which may be where the parts of another tensor begin."""
    if leaf.ndim != 1 or leaf.dtype not in (torch.int32, torch.int64) or not len(leaf):
        return False
    return not leaf[0].item() and bool((leaf[1:] >= leaf[:-1]).all())


def detached_tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a step's result, detached from the autograd graph."""
    return [leaf.detach() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def exclude_from_collections() -> None:
    """Exclude all present objects from later garbage collections.

    Every measurement collects garbage. Torch alone has half a million objects, which would take 0.3 s each time.
    """
    gc.collect()
    gc.freeze()


def release_memory() -> None:
    """Collect garbage and return memory that allocators cache."""
    gc.collect()
    malloc.trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _on_device(workload: Workload, kind: str) -> Workload:
    """Move the workload to a GPU; modules move in place, so that the optimizer keeps the model's parameters.

    Nothing is moved to the CPU. Raises ConfigError where the factory put the model elsewhere.
    """
    if kind == "cpu":
        elsewhere = next((leaf.device for leaf in workload.model.parameters() if leaf.device.type != "cpu"), None)
        if elsewhere is not None:
            remedy = f"add --device {elsewhere.type}, or make" if elsewhere.type == "cuda" else "make"
            raise ConfigError(
                f"the factory's model is on {elsewhere}, and device is cpu: {remedy} the model on the CPU"
            )
        return workload
    if not torch.cuda.is_available():
        raise DeviceRefusedError(
            f"device {kind}: torch {torch.__version__} sees no GPU here; autotune doctor says why, or use --device cpu"
        )
    workload.model.to(kind)
    if isinstance(workload.loss_fn, torch.nn.Module):
        workload.loss_fn.to(kind)
    return replace(workload, batch=map_batch(lambda leaf: leaf.to(kind), workload.batch))
