"""Compute a loss and its gradients under a plan, inside a training loop that does everything else."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.loop_checks import refuse_anomaly_mode, refuse_fork
from autotune.capture.program import Program
from autotune.capture.signature import Signature, make_signature, read_model_state
from autotune.errors import ConfigError
from autotune.ir.graph import TrainGraph
from autotune.runtime.executor import Executor, seed_gradient
from autotune.runtime.prepared_step import PlanSource, PreparedStep, StepPreparer, read_plan, store_directories
from autotune.runtime.shapes.batch_padding import BatchPadding
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_selector import OtherShapes, StepSelector
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.workload import LossFn, Workload

Autocast = tuple[str, torch.dtype, bool]
"""Kind of device, dtype and `cache_enabled` of `torch.autocast` around a call."""
LossGradient = Callable[[torch.Tensor], torch.Tensor]
"""Function from the gradient that `backward()` starts with, 1, to the gradient of the loss."""


class PlannedLoss(torch.nn.Module):
    """A loss under a plan: `planned(batch).backward()` replaces `loss_fn(model, batch).backward()`.

    The call runs forward and backward under the plan. `backward()` hands the gradients to autograd, which adds them to
    `.grad` as ever. Clipping, loss scaling, accumulation, gradient hooks, loggers, DistributedDataParallel and the
    optimizer see what they see without a plan.

    The optimizer's update is not part of the plan, so every gradient is in memory at the end of the backward pass, as in
    plain PyTorch. Where the loop allows it, `TrainStep` saves more: its updates may run beside their gradients.

    Without gradients (`torch.no_grad()`), a call is `loss_fn(model, batch)`. `torch.autocast` around a call applies to it
    as in plain PyTorch. A loss that is multiplied or divided before `backward()` is exact: the gradient of the loss is an
    input of the plan. When it changes, as with a gradient scaler's factor, that one call runs twice.

    Args:
        model: The model, whose parameters require gradients.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or a tuple of the loss and any nested extras.
        plan: Path of a plan file, a `PlanFile`, or a `Plan`, for the graph of a workload with a loss and without an
            optimizer; or an `AutoPlan`, which tunes at the first call. None runs the step as traced. A plan in
            `channels_last` converts the model permanently.
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        other_shapes: Action for a batch of another shape, or after a change of a captured Python value; see `TrainStep`.
        buckets: Sizes to pad batches to, each captured and planned at the first call; the plan belongs to the largest. Calls
            without gradients are not padded. None pads nothing.
        loss_gradient: Function from 1 to the gradient of the loss, in a loop that calls `backward()` of a multiple of it:
            `lambda one: one / 4` for `(planned(batch) / 4).backward()`. It saves the second run; a wrong one costs a run.

    Raises:
        CaptureError: At the first call: the step cannot be captured.
        ConfigError: An argument is invalid, or autograd's anomaly mode is on.
        PlanError: The plan is for another graph, or `other_shapes="error"` applies.
        StoreError: A store cannot be opened or read back from.

    Examples:
        >>> import torch, autotune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> planned = autotune.PlannedLoss(model, loss_fn)
        >>> batch = torch.ones(16, 4), torch.zeros(16, 1)
        >>> for _ in range(3):
        ...     loss = planned(batch)
        ...     loss.backward()
        ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> torch.equal(planned(batch), loss_fn(model, batch))
        True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        plan: PlanSource | None = None,
        *,
        stores: Mapping[str, str | Path] | None = None,
        other_shapes: OtherShapes = "replan",
        buckets: Buckets | None = None,
        loss_gradient: LossGradient | None = None,
    ) -> None:
        super().__init__()
        if other_shapes not in ("replan", "eager", "error"):
            raise ConfigError(f"other_shapes is {other_shapes!r}; known: replan, eager, error")
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn is {type(loss_fn).__name__}; give a function loss_fn(model, batch)")
        self.model = model
        self._loss_fn, self._other_shapes = loss_fn, other_shapes
        self._plan = read_plan(plan)
        self._stores = store_directories(stores, self._plan)
        self._selectors: dict[Autocast | None, tuple[StepSelector, BatchPadding]] = {}
        self._buckets = buckets
        self._tangents = _Tangents(loss_gradient)
        self._pid = os.getpid()
        self._memory_format = self._make_preparer().memory_format
        if self._memory_format:
            convert_model(model, None, self._memory_format)

    @property
    def graph(self) -> TrainGraph | None:
        """Graph that was captured for the first batch; None before the first call."""
        return next((selector.first.graph for selector, _ in self._selectors.values()), None)

    def forward(self, batch: Any) -> Any:
        """Return the loss, ready for `backward()`, with the detached extras if the loss function has any."""
        if not torch.is_grad_enabled():
            return self._loss_fn(self.model, batch)
        refuse_anomaly_mode()
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        with _outside_autocast() as mode:
            if mode not in self._selectors:
                self._selectors[mode] = self._start_selector(mode, batch)
            selector, padding = self._selectors[mode]
            if selector.cache.offloads:
                refuse_fork(self._pid)
            padded = padding.pad(batch)
            tensors = [leaf for leaf in pytree.tree_leaves(padded) if isinstance(leaf, torch.Tensor)]
            step = selector.select(padded, self._signature(padded), tensors, "")
            if step is not None:
                return self._run(step, tensors)
        return self._loss_fn(self.model, batch)

    def close(self) -> None:
        """Release the stores' space and the arenas. The model stays as it is."""
        for selector, _ in self._selectors.values():
            selector.cache.close()

    def _start_selector(self, mode: Autocast | None, batch: Any) -> tuple[StepSelector, BatchPadding]:
        loss_fn = self._loss_fn if mode is None else partial(run_in_autocast, self._loss_fn, mode)
        selector = StepSelector(
            partial(Workload, self.model, loss_fn, None),
            self._make_preparer(),
            self._other_shapes,
            trains=True,
            gradients=True,
            maker="PlannedLoss",
        )
        padding = BatchPadding(self._buckets, self.model, loss_fn)
        selector.start(batch, padding, self._signature, "")
        return selector, padding

    def _signature(self, batch: Any) -> Signature:
        state = read_model_state(self.model, {id(parameter) for parameter in self.model.parameters()})
        return make_signature(batch, state, "")

    def _make_preparer(self) -> StepPreparer:
        return StepPreparer(self._plan, self._stores, accumulates=False, adapts=False)

    def _run(self, step: PreparedStep, tensors: list[torch.Tensor]) -> Any:
        """Run forward and backward of one call; return its results, with a loss that hands over the gradients."""
        self._tangents.predict(step.executor)
        call = _Call(step.executor, tensors, self._tangents)
        results = call.run()
        parameters = [step.program.tensors[value] for value in step.program.gradients]
        if not isinstance(results, tuple):
            return _hand_over(call, results, *parameters)
        return _hand_over(call, results[0], *parameters), *results[1:]


class _Call:
    """One call of a planned loss: its gradients, and the state from which it can run once more."""

    def __init__(self, executor: Executor, tensors: list[torch.Tensor], tangents: "_Tangents") -> None:
        program, self._tangents = executor.program, tangents
        written = {value for op in program.graph.ops for value in op.writes}
        self._executor, self._inputs = executor, executor.inputs(tensors)
        self._state = _State([program.tensors[value] for value in written], program)
        self._before = self._state.copy()
        self._versions = self._read_versions()
        self._tangent = executor.tangent
        self._gradients: tuple[torch.Tensor, ...] | None = None

    def run(self) -> Any:
        """Run forward and backward; return the results."""
        results, self._gradients = self._executor.run(self._inputs)
        return results

    def take_gradients(self, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients for a gradient of the loss, once."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            raise RuntimeError(
                "backward() ran a second time through a planned loss, whose gradients are handed over once; call the planned "
                "loss again"
            )
        if torch.equal(tangent, self._tangent):
            return gradients
        del gradients
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "a parameter or an input of the planned loss changed in place between the call and backward(); call the "
                "planned loss again after the change"
            )
        current = self._state.copy()
        self._state.restore(self._before)
        self._executor.tangent = self._tangents.last = tangent.detach().to(self._tangent.dtype, copy=True)
        try:
            return self._executor.run(self._inputs)[1]
        finally:
            self._state.restore(current)

    def _read_versions(self) -> list[int]:
        tensors = self._executor.program.tensors
        trained = [tensors[value] for value in self._executor.program.gradients]
        return [tensor._version for tensor in (*trained, *self._inputs)]


class _Tangents:
    """Prediction of the gradient of the loss that the next `backward()` passes; all executors share it."""

    def __init__(self, loss_gradient: LossGradient | None) -> None:
        self._loss_gradient = loss_gradient
        self._predicted: torch.Tensor | None = None
        self.last: torch.Tensor | None = None
        """Gradient of the last `backward()`, or the prediction if that changed since."""

    def predict(self, executor: Executor) -> None:
        """Set the gradient that the executor's next run starts its backward pass with."""
        seed = seed_gradient(executor.program)
        if self._loss_gradient is not None:
            predicted = self._loss_gradient(seed).detach().to(seed.dtype)
            if self._predicted is None or not torch.equal(predicted, self._predicted.to(predicted)):
                self._predicted = self.last = predicted
        if self.last is not None and self.last.shape == seed.shape:
            executor.tangent = self.last.to(seed)


class _State:
    """What a call changes: buffers of the model, and the random number generator."""

    def __init__(self, buffers: Sequence[torch.Tensor], program: Program) -> None:
        self._buffers = buffers
        self._draws = any(op.random for op in program.graph.ops)
        self._device = program.device

    def copy(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return copies of the state."""
        return [buffer.detach().clone() for buffer in self._buffers], self._generator() if self._draws else None

    def restore(self, state: tuple[list[torch.Tensor], torch.Tensor | None]) -> None:
        """Write copies back into the state."""
        buffers, generator = state
        for buffer, copy in zip(self._buffers, buffers, strict=True):
            buffer.detach().copy_(copy)
        if generator is None:
            return
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(generator, self._device)
        else:
            torch.set_rng_state(generator)

    def _generator(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


class _HandOver(torch.autograd.Function):
    """A loss as autograd sees it: its backward returns gradients that exist already."""

    @staticmethod
    def forward(ctx: Any, call: _Call, loss: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        del parameters  # they are arguments so that autograd asks for their gradients
        ctx.call = call
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.call.take_gradients(tangent)


_hand_over: Callable[..., torch.Tensor] = _HandOver.apply


@contextmanager
def _outside_autocast() -> Iterator[Autocast | None]:
    """Leave `torch.autocast` for the block, and yield its device, dtype and cache; None where it is off.

    Raises ConfigError where it is on for several kinds of devices.
    """
    caches = torch.is_autocast_cache_enabled()
    modes = [
        (kind, torch.get_autocast_dtype(kind), caches) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    if len(modes) > 1:
        raise ConfigError("torch.autocast is on for CPU and GPU at once; use it for the model's device alone")
    with ExitStack() as stack:
        for kind, *_ in modes:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield modes[0] if modes else None


def run_in_autocast(loss_fn: LossFn, mode: Autocast, model: torch.nn.Module, batch: Any) -> Any:
    """Return `loss_fn(model, batch)` under autocast."""
    kind, dtype, caches = mode
    with torch.autocast(kind, dtype, cache_enabled=caches):
        return loss_fn(model, batch)
