"""Compute a loss and its gradients under a plan, inside a training loop that does everything else."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.capture.capture_checks import refuse_gradients_of_the_batch
from autotune.capture.loop_checks import refuse_anomaly_mode, refuse_fork, refuse_wrapped
from autotune.capture.python.step_module import flatten_for_step, like_tuple
from autotune.capture.signature import Signature, make_signature, read_model_state
from autotune.errors import ConfigError
from autotune.ir.graph import TrainGraph
from autotune.runtime.gradient_handover import (
    LossGradient,
    PlannedCall,
    Tangents,
    hand_over,
    refuse_gradients,
)
from autotune.runtime.prepared_step import (
    PlanSource,
    PreparedStep,
    StepPreparer,
    read_plan,
    store_directories,
    warn_of_environment,
)
from autotune.runtime.shapes.batch_padding import BatchPadding
from autotune.runtime.shapes.buckets import Buckets
from autotune.runtime.step_selector import OtherShapes, StepSelector, check_other_shapes
from autotune.runtime.verification.gradients import run_eager_gradients, without_gradients_and_hooks
from autotune.runtime.verification.snapshot import named_parameters
from autotune.runtime.verification.verify import DEFAULT_STEPS, GradientCallback, Verifier
from autotune.workloads.batch import FlatBatch
from autotune.workloads.memory_format import convert_batch, convert_model, keep_in_format
from autotune.workloads.workload import LossFn, Workload

Autocast = tuple[str, torch.dtype, bool]
"""Kind of device, dtype and `cache_enabled` of `torch.autocast` around a call."""


class PlannedLoss(torch.nn.Module):
    """A loss under a plan: `planned(batch).backward()` replaces `loss_fn(model, batch).backward()`.

    The call runs forward and backward under the plan. `backward()` hands the gradients to autograd, which adds them to
    `.grad` as ever. Clipping, loss scaling, accumulation, gradient hooks, loggers, DistributedDataParallel and the
    optimizer see what they see without a plan.

    The optimizer's update is not part of the plan, so every gradient is in memory at the end of the backward pass, as in
    plain PyTorch. Where the loop allows it, `TrainStep` saves more: its updates may run beside their gradients.

    Without gradients (`torch.no_grad()`), a call is `loss_fn(model, batch)`. `torch.autocast` around a call applies to it
    as in plain PyTorch. A loss that is multiplied or divided before `backward()` is exact: the gradient of the loss is an
    input of the plan. A constant factor and a pattern that repeats are expected. Where another one comes, as when a gradient
    scaler changes its scale, that one call runs twice.

    Args:
        model: The model, whose parameters require gradients.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or a tuple of the loss and any nested extras.
        plan: Path of a plan file, a `PlanFile`, or a `Plan`, tuned with `--loop gradients` or for a workload without an
            optimizer; or an `AutoPlan`, which tunes at the first call. None runs the step as traced. A plan in
            `channels_last` converts the model permanently.
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        other_shapes: Action for a batch of another shape, or after a change of a captured Python value; see `TrainStep`.
        buckets: Sizes to pad batches to, each captured and planned at the first call; the plan belongs to the largest. Calls
            without gradients are not padded. None pads nothing.
        loss_gradient: Function from 1 to the gradient of the loss, in a loop that calls `backward()` of a multiple of it:
            `lambda one: one / 4` for `(planned(batch) / 4).backward()`. It saves the second run; a wrong one costs a run.
        verify: Compare the first two calls of each captured program, or this many, with eager calls from the same state: bit by
            bit, else relative to eager's own rounding error. It needs eager's memory. Beside the plan it
            runs `loss_fn` once, or five times where bits differ, some of them in float64 or with moved weights.

    Raises:
        CaptureError: At the first call: the step cannot be captured.
        ConfigError: An argument is invalid, or autograd's anomaly mode is on.
        PlanError: The plan is for another graph, or `other_shapes="error"` applies.
        StoreError: A store cannot be opened or read back from.
        NumericsError: A verified call differs from eager beyond rounding.

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
        verify: bool | int = False,
    ) -> None:
        super().__init__()
        check_other_shapes(other_shapes)
        if not callable(loss_fn):
            raise ConfigError(f"loss_fn is {type(loss_fn).__name__}; give a function loss_fn(model, batch)")
        refuse_wrapped(model)
        self.model = model
        self._loss_fn, self._other_shapes = loss_fn, other_shapes
        self._plan = read_plan(plan)
        self._stores = store_directories(stores, self._plan)
        self._selectors: dict[Autocast | None, tuple[StepSelector, BatchPadding, LossFn]] = {}
        self._buckets = buckets
        self._tangents = Tangents(loss_gradient)
        self._verifier = Verifier(model, None, None, DEFAULT_STEPS if verify is True else int(verify), loss_fn)
        self._pid, self._lock = os.getpid(), threading.RLock()
        preparer = self._make_preparer()
        warn_of_environment(preparer.file)
        self._memory_format = preparer.memory_format
        if self._memory_format:
            convert_model(model, None, self._memory_format)
            keep_in_format(model, self._memory_format)

    @property
    def graph(self) -> TrainGraph | None:
        """Graph that was captured for the first batch; None before the first call."""
        return next((selector.first.graph for selector, *_ in self._selectors.values()), None)

    @property
    def verified(self) -> str:
        """Method by which the last verified call was compared with eager; empty if none was."""
        return self._verifier.comparison

    def forward(self, batch: Any) -> Any:
        """Return the loss, ready for `backward()`, with the extras if the loss function has any.

        `backward()` through an extra, which has no gradient under a plan, raises ConfigError.
        """
        if not torch.is_grad_enabled():
            self.release_memory()
            return self._loss_fn(self.model, batch)
        refuse_anomaly_mode()
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        with self._lock, _outside_autocast() as mode:
            selector, padding, loss_fn = self._selector_for(mode, batch)
            padded = padding.pad(batch)
            parts = flatten_for_step(padded, self._loss_fn)
            refuse_gradients_of_the_batch(parts.tensors)
            step = selector.select(padded, self._signature(parts), parts)
            if step is not None:
                return self._run(selector, step, loss_fn, padded, parts.tensors)
        return self._loss_fn(self.model, batch)

    def prepare(self, batch: Any) -> None:
        """Capture and plan the loss for a batch of another shape now, which takes seconds, so that no later call waits for it.

        The first prepared batch belongs to the plan. `torch.autocast` around this call counts as around a call.

        Raises:
            CaptureError: The loss cannot be captured.
            PlanError: The plan is for another graph.
            StoreError: A store cannot be opened.
        """
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        with self._lock, torch.enable_grad(), _outside_autocast() as mode:
            selector, padding, _ = self._selector_for(mode, batch)
            padded = padding.pad(batch)
            selector.prepare(padded, self._signature(flatten_for_step(padded, self._loss_fn)))

    def release_memory(self) -> None:
        """Free the memory that a plan keeps reserved between two steps; the next step reserves it again.

        Call it before an evaluation that needs much memory of its own. A call without gradients does so by itself.
        """
        with self._lock:
            for selector, *_ in self._selectors.values():
                selector.release_memory()

    def close(self) -> None:
        """Release the stores' space and the arenas. The model stays as it is."""
        with self._lock:  # another thread may run a step
            for selector, *_ in self._selectors.values():
                selector.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: the model and the arguments, but no captured step and no memory of it."""
        fresh = {"_tangents": self._tangents.restart(), "_verifier": self._verifier.restart()}
        left_out: dict[str, Any] = {"_selectors": {}, "_lock": None, "_pid": 0}
        return vars(self) | fresh | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which captures its own steps."""
        super().__setstate__(state | {"_pid": os.getpid(), "_lock": threading.RLock()})  # type: ignore[no-untyped-call]
        if self._memory_format:
            keep_in_format(self.model, self._memory_format)

    def _selector_for(self, mode: Autocast | None, batch: Any) -> tuple[StepSelector, BatchPadding, LossFn]:
        if mode not in self._selectors:
            self._selectors[mode] = self._start_selector(mode, batch)
        if self._selectors[mode][0].cache.offloads:
            refuse_fork(self._pid, "PlannedLoss")
        return self._selectors[mode]

    def _start_selector(self, mode: Autocast | None, batch: Any) -> tuple[StepSelector, BatchPadding, LossFn]:
        if (
            not self._selectors
        ):  # stores are opened with the first one, perhaps in a child of the process that made this object
            self._pid = os.getpid()
        loss_fn = self._loss_fn if mode is None else _put_in_autocast(self._loss_fn, mode)
        selector = StepSelector(
            partial(Workload, self.model, loss_fn, None),
            self._make_preparer(),
            self._other_shapes,
            trains=True,
            gradients=True,
            maker="PlannedLoss",
        )
        padding = BatchPadding(self._buckets, self.model, loss_fn)
        selector.start(batch, padding, lambda batch: self._signature(flatten_for_step(batch, self._loss_fn)), "")
        return selector, padding, loss_fn

    def _signature(self, batch: FlatBatch) -> Signature:
        trained = {id(parameter) for _, parameter in named_parameters(self.model, self._loss_fn)}
        state = read_model_state(self.model, trained, self._loss_fn)
        return make_signature(batch, state, "")

    def _make_preparer(self) -> StepPreparer:
        replans = self._other_shapes in ("replan", "background")
        return StepPreparer(self._plan, self._stores, adapts=False, replans_first=replans)

    def _run(
        self, selector: StepSelector, step: PreparedStep, loss_fn: LossFn, batch: Any, tensors: list[torch.Tensor]
    ) -> Any:
        """Run forward and backward of one call; return its results, with a loss that hands over the gradients."""
        expected = self._tangents.expect(step.program)
        call = PlannedCall(step.executor, tensors, expected, self._lock, partial(selector.reopen, step))
        key = (id(loss_fn), step.number)
        if self._verifier.is_due(key):
            parameters = dict(named_parameters(self.model, self._loss_fn))
            eager = partial(run_eager_gradients, partial(loss_fn, self.model), parameters, expected.tensor)
            names = {id(parameter): name for name, parameter in parameters.items()}

            def planned(on_gradient: GradientCallback) -> Any:
                return call.run(lambda parameter, gradient: on_gradient(names[id(parameter)], gradient))

            with without_gradients_and_hooks(parameters.values()):
                results = self._verifier.run_step(key, batch, eager, planned)
        else:
            results = call.run()
        trained = [step.program.tensors[value] for value in step.program.gradients]
        if not isinstance(results, tuple):
            return hand_over(call, results, *trained)
        attached = step.program.attached[1:]  # after the loss
        extras = refuse_gradients(results[1:], attached, trained[0])
        return like_tuple(results, (hand_over(call, results[0], *trained), *extras))


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


class _LossInAutocast(torch.nn.Module):
    """A loss that is a module, under autocast. Its parameters and buffers stay visible to captures and comparisons."""

    def __init__(self, loss_fn: torch.nn.Module, mode: Autocast) -> None:
        super().__init__()
        self.loss_fn, self._mode = loss_fn, mode

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """Run `forward` without torch's hooks for every module: they would run once more than in eager."""
        return self.forward(model, batch)

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        return run_in_autocast(self.loss_fn, self._mode, model, batch)


def _put_in_autocast(loss_fn: LossFn, mode: Autocast) -> LossFn:
    """Return a loss that runs under autocast, as a module if `loss_fn` is one."""
    if isinstance(loss_fn, torch.nn.Module):
        return _LossInAutocast(loss_fn, mode)
    return partial(run_in_autocast, loss_fn, mode)
