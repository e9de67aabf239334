"""Run a training step under a plan: the object that a training loop calls."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from autotune.capture.capture_checks import refuse_gradients_of_the_batch, refuse_parameter_hooks
from autotune.capture.loop_checks import refuse_fork, refuse_modes, refuse_unreduced
from autotune.capture.optimizers.loop_updates import LoopUpdates
from autotune.capture.optimizers.optimizer_copy import get_replaced_step
from autotune.capture.optimizers.wrapped_optimizer import Bookkeeping, unwrap_optimizer
from autotune.capture.program import Program
from autotune.capture.python.step_module import flatten_for_step
from autotune.capture.signature import Signature, make_signature, read_model_state
from autotune.errors import ConfigError
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.kernels.region_program import list_regions
from autotune.records.measurement import TransferTrace
from autotune.records.plan_file import PlanFile
from autotune.runtime.executor import Executor, RangeFactory, seed_gradient
from autotune.runtime.gpu.cuda_recorder import CudaRecorder
from autotune.runtime.gpu.graphed_step import GraphRecorder
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
from autotune.runtime.update_cycle import EagerStep, UpdateCycle
from autotune.runtime.verification.region_gate import RegionGate, one_by_one
from autotune.runtime.verification.verify import DEFAULT_STEPS, GradientCallback, RegionRuns, Verifier
from autotune.workloads.batch import FlatBatch
from autotune.workloads.loop import Loop
from autotune.workloads.memory_format import convert_batch, convert_model, keep_in_format
from autotune.workloads.workload import LossFn, Workload, check_workload


class TrainStep:
    """One training step under a plan: `loss = step(batch)` replaces forward, backward, update and `zero_grad`.

    The step is captured once, with the Python values that it reads: a dropout's p, an attribute, a number in a closure, a
    hook. Later steps run the captured graph in the order of the plan, with eager's results. Parameters, optimizer state
    and buffers remain the caller's own objects, all of them in memory between steps. After a step `.grad` is None, except
    for gradients that `accumulate` keeps. `on_gradient`, if set, is called with each parameter's name and gradient.

    Python code of the model and the loss function does not run again in later steps. Buffers may change in place. A
    change that the next step would read, such as a buffer that is assigned, is refused; other changes, such as a counter
    for a log, cause a warning.

    Args:
        model: The model; its parameters are updated in place.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss, or a tuple of the loss and any nested extras. None for
            inference, which returns the model's output.
        optimizer: The optimizer of the model's parameters; None for inference or evaluation of a loss.
        batch: A first batch. Its shapes, strides and dtypes are captured; its numbers are not used.
        plan: Path of a plan file that `autotune tune` wrote, a `PlanFile`, or a `Plan`. None runs the step as traced. A plan
            in `channels_last` converts the model permanently, and each batch that does not have that format. An `AutoPlan`
            tunes before the first step.
        stores: Directory of each store that the plan offloads to, such as `{"ssd": "/mnt/nvme"}`.
        accumulate: Number of steps per update; at least 1.
        before_update: Called without arguments when all gradients of an update are complete and unscaled, as for clipping.
        scaler: Gradient scaler of mixed-precision training. `accumulate`, `before_update`, `scaler` and hooks before the
            optimizer's step need every gradient at once: all updates then wait for the end of the step, and a warning
            states the bytes.
        other_shapes: Action for a batch of another shape, or after a change of a captured Python value. "replan" captures
            the step again, for a new shape with a new plan by the same settings; captures are kept, and a float becomes an
            input of the step if possible. "background" does this for a new shape in another process, with a copy of the
            model. Steps run in plain eager until the plan is there. A change of a value is captured in this process, and so
            is every shape of a plan on compiled regions. "eager" runs the step in plain eager. "error" raises PlanError, which names
            the value and the line that reads it. A value that needs another capture twice within ten steps is refused; a number or a word of the
            batch may need eight.
        buckets: Sizes to pad batches to, each captured and planned before the first step; the plan belongs to the largest. The
            model and the loss function then get padded batches. None pads nothing.
        adapt: Let a plan that offloads change its window between steps, within its budget, as transfers stall the step.
        verify: Compare the first two steps of each captured program, or this many, with eager steps from the same state:
            bit by bit, else relative to eager's own rounding error. It needs eager's memory and a copy of all state. It
            runs `loss_fn` once beside the plan, and `before_update` twice, so training on several ranks is refused.
            Where bits differ, it runs `loss_fn` five times and `before_update` six times, or up to eight on compiled
            regions. Some of these runs are in float64 or with moved weights.
        ranges: Opens a named range around each op for a profiler: `torch.profiler.record_function`, or
            `torch.cuda.nvtx.range` for Nsight Systems. Names hold phase, op and layer; recomputed ops begin with `recompute`.
        cuda_graphs: Run the step as CUDA graphs on a GPU: one launch for all kernels between two updates or transfers. Updates
            stay outside, in groups, and read learning rates in every step. A step that cannot be captured runs without
            graphs, with a warning. The graphs keep their memory between steps, so it is off by default.

    Raises:
        ConfigError: An argument is invalid, or the loop does something that a step cannot support.
        CaptureError: The step cannot be captured, for example if it changes Python state that it reads.
        PlanError: The plan is for another graph, or `other_shapes="error"` applies.
        StoreError: A store cannot be opened or read back from. Weights are restored first; updates placed beside
            their gradients may be complete. A failed write only keeps its value in memory, with a warning.
        NumericsError: A verified step differs from eager beyond rounding. Model and optimizer then hold eager's results.

    After any error no `.grad` is left, and an accumulation starts again.

    Warns of gradients that are there before a step: it discards them, as `zero_grad` does.

    Examples:
        >>> import torch, autotune
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.ones(16, 4), torch.zeros(16, 1)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> step = autotune.TrainStep(model, loss_fn, optimizer, batch)
        >>> losses = [step(batch).item() for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
        >>> step.close()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        batch: Any,
        plan: PlanSource | None = None,
        *,
        stores: Mapping[str, str | Path] | None = None,
        accumulate: int = 1,
        before_update: Callable[[], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        other_shapes: OtherShapes = "replan",
        buckets: Buckets | None = None,
        adapt: bool = False,
        verify: bool | int = False,
        ranges: RangeFactory | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        Loop(accumulate=accumulate)  # refuses a number below 1
        check_other_shapes(other_shapes)
        if buckets is not None and loss_fn is None:
            raise ConfigError("buckets need a loss function, whose value padding must not change; pass buckets=None")
        check_workload(Workload(model, loss_fn if optimizer is not None else None, optimizer, batch), "TrainStep")
        self._bookkeeping = Bookkeeping(optimizer)
        optimizer = unwrap_optimizer(optimizer) if optimizer is not None else None
        if optimizer is not None:
            refuse_unreduced(model, reduces=before_update is not None, verifies=bool(verify))
        self.model, self.optimizer = model, optimizer
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        """Called, if set, with each parameter's name and gradient before its update. Offloaded weights are away."""
        self._loss_fn, self._other_shapes = loss_fn, other_shapes
        self._cycle = UpdateCycle(optimizer, accumulate, before_update, scaler)
        self._eager_step = EagerStep(model, loss_fn, self._cycle)
        self._verifier = Verifier(model, optimizer, scaler, DEFAULT_STEPS if verify is True else int(verify), loss_fn)
        source = read_plan(plan)
        if optimizer is None and loss_fn is not None and not isinstance(source, PlanFile | Plan | None):
            raise ConfigError("AutoPlan cannot tune a loss without an optimizer; pass an optimizer, or use PlannedLoss")
        preparer = StepPreparer(
            source,
            store_directories(stores, source),
            adapts=adapt,
            range_of=ranges,
            make_recorder=_choose_recorder(model, cuda_graphs=cuda_graphs),
        )
        self._memory_format = preparer.memory_format
        self._selector = StepSelector(
            self._make_workload,
            preparer,
            other_shapes,
            trains=optimizer is not None,
            gradients=False,
            maker="TrainStep",
        )
        self._pid = os.getpid()
        self._refuse_loop()
        warn_of_environment(preparer.file)
        if self._memory_format:
            convert_model(model, optimizer, self._memory_format)
            keep_in_format(model, self._memory_format)
            batch = convert_batch(batch, self._memory_format)
        self._last_executor: Executor | None = None
        self._padding = BatchPadding(buckets, model, loss_fn)
        self._selector.start(
            batch,
            self._padding,
            lambda batch: self._signature(flatten_for_step(batch, loss_fn))[0],
            self._cycle.gradient_users,
        )

    @property
    def graph(self) -> TrainGraph:
        """Graph that was captured for the first batch."""
        return self._selector.first.graph

    @property
    def plan(self) -> Plan:
        """Plan for the last step's batch."""
        return self._selector.last.plan

    @property
    def is_eager(self) -> bool:
        """True if the last step ran in plain eager, as for a shape that `other_shapes` leaves without a plan."""
        return self._last_executor is None

    @property
    def stall_seconds(self) -> float:
        """Seconds that the last step waited for a store."""
        return self.transfer_trace.stall_seconds

    @property
    def transfer_bytes(self) -> int:
        """Bytes that the last step wrote to a store and read back."""
        return self._last_executor.transfer_bytes if self._last_executor is not None else 0

    @property
    def verified(self) -> str:
        """Method by which the last verified step was compared with eager; empty if none was."""
        return self._verifier.comparison

    @property
    def transfer_trace(self) -> TransferTrace:
        """Transfers of the last step, and the times at which the step waited for them."""
        return self._last_executor.transfer_trace if self._last_executor is not None else TransferTrace()

    def __call__(self, batch: Any) -> Any:
        """Run one step; return what the loss function returns, with every tensor detached."""
        with self._cycle.clear_on_failure():
            self._refuse_loop()
            self._cycle.start_step()
            updates = self._cycle.ends_with_next_step
            self._bookkeeping.begin(updates=updates)
            results = self._run_step(batch)
            self._bookkeeping.end(updated=updates)
        return results

    def prepare(self, batch: Any) -> None:
        """Capture and plan the step for a batch of another shape now, which takes seconds, so that no later step waits for it.

        Prepared shapes run under their plans with every `other_shapes`. Nothing is trained.

        Raises:
            CaptureError: The step cannot be captured.
            ConfigError: The loop does something that a step cannot support.
            StoreError: A store cannot be opened.
        """
        self._refuse_loop()
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        batch = self._padding.pad(batch)
        self._selector.prepare(batch, self._signature(flatten_for_step(batch, self._loss_fn))[0])

    def flush(self) -> None:
        """Update with the gradients accumulated so far, as at the end of an epoch; do nothing if there are none."""
        if self.optimizer is None:
            return
        self._cycle.restart_if_cleared()
        if self._cycle.is_pending:
            with self._cycle.clear_on_failure():
                self._cycle.update()
            self._cycle.steps = 0
            self._bookkeeping.end(updated=True)

    def release_memory(self) -> None:
        """Free the memory that a plan keeps reserved between two steps; the next step reserves it again.

        Call it before an evaluation that needs much memory of its own.
        """
        self._selector.release_memory()

    def close(self) -> None:
        """Release the stores' space and the arenas. The model and the optimizer stay as they are."""
        self._selector.close()

    def __reduce__(self) -> NoReturn:
        """Refuse a copy or a pickle, whose model and optimizer would be those of another step."""
        raise ConfigError(
            "a TrainStep cannot be copied or pickled; copy model and optimizer, and make a TrainStep of them"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_step(self, batch: Any) -> Any:
        """Run one step by the capture whose guards hold, or in eager."""
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        unpadded, batch = batch, self._padding.pad(batch)
        parts = flatten_for_step(batch, self._loss_fn)
        call, has_hooks = self._signature(parts)
        if self._loss_fn is not None and has_hooks:
            if self._other_shapes == "eager":
                self._last_executor = None
                return self._run_eager(unpadded)
            refuse_parameter_hooks(self.model, self._loss_fn)
        tensors = parts.tensors
        if self._loss_fn is not None:
            refuse_gradients_of_the_batch(tensors)
        step = self._selector.select(batch, call, parts)
        if step is None:
            self._last_executor = None
            return self._run_eager(unpadded)
        self._last_executor = step.executor
        run = partial(self._run_planned, step, step.executor, tensors)
        results = self._run_verified(step, batch, tensors, run) if self._verifier.is_due(step.number) else run()
        step.adapt()
        return results

    def _run_planned(self, step: PreparedStep, executor: Executor, tensors: list[torch.Tensor]) -> Any:
        updates = step.program.updates
        if self._cycle.scaler is not None:
            seed = seed_gradient(step.program)
            executor.tangent = self._cycle.scaler.scale(seed).to(seed.dtype)
        if updates is None:
            return executor(tensors)
        updates.on_gradient = self.on_gradient
        if isinstance(updates, LoopUpdates):
            updates.on_complete = self._cycle.count_step
            self._cycle.restart_if_cleared()
            executor.is_whole = self._cycle.ends_with_next_step
            with updates.step():
                return executor(tensors)
        with updates.step():
            return executor(tensors)

    def _run_verified(self, step: PreparedStep, batch: Any, tensors: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        callback, steps = self.on_gradient, self._cycle.steps

        def observed(run: Callable[[], Any], observe: GradientCallback, *, calls_user: bool) -> Any:
            def on_gradient(name: str, gradient: torch.Tensor) -> None:
                observe(name, gradient)
                if calls_user and callback is not None:
                    callback(name, gradient)

            self.on_gradient, self._cycle.steps = on_gradient, steps
            try:
                return run()
            finally:
                self.on_gradient = callback

        def traced(program: Program) -> Callable[[GradientCallback], Any]:
            schedule = lower(program.graph, Plan.traced(program.graph))
            executor = Executor(program, schedule, threads=step.plan.threads)
            return lambda observe: observed(
                partial(self._run_planned, step, executor, tensors), observe, calls_user=False
            )

        regions = None
        if list_regions(step.program):
            gate = RegionGate()
            regions = RegionRuns(traced(one_by_one(step.program)), traced(gate.watch(step.program)), gate)
        return self._verifier.run_step(
            step.number,
            batch,
            lambda batch, observe: observed(partial(self._run_eager, batch), observe, calls_user=False),
            lambda observe: observed(run, observe, calls_user=True),
            regions,
        )

    def _run_eager(self, batch: Any) -> Any:
        return self._eager_step.run(batch, None if self.on_gradient is None else self._call_on_gradient)

    def _call_on_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)

    def _signature(self, batch: FlatBatch) -> tuple[Signature, bool]:
        """Return the signature of a call, and True if a parameter has a hook."""
        state = read_model_state(
            self.model, self._cycle.parameter_ids, self._loss_fn, get_replaced_step(self.optimizer)
        )
        return make_signature(batch, state, self._cycle.gradient_users), state.has_parameter_hooks

    def _make_workload(self, batch: Any) -> Workload:
        loop = self._cycle.loop if self.optimizer is not None else Loop()
        return Workload(self.model, self._loss_fn, self.optimizer, batch, loop)

    def _refuse_loop(self) -> None:
        refuse_modes(trains=self.optimizer is not None)
        if self._selector.cache.offloads:
            refuse_fork(self._pid, "TrainStep")


def _choose_recorder(model: torch.nn.Module, *, cuda_graphs: bool) -> Callable[[torch.device], GraphRecorder] | None:
    """Return the recorder of graphs, if there shall be one; raise ConfigError for a model that is not on a GPU."""
    if not cuda_graphs:
        return None
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds != {"cuda"}:
        raise ConfigError(
            f"cuda_graphs=True needs a model on a GPU; this one is on {', '.join(sorted(kinds)) or 'no device'}: move it "
            "with model.cuda(), or leave cuda_graphs out"
        )
    return CudaRecorder
