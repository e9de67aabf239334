"""What a training loop calls: one object that runs the whole step under a plan."""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.utils import _pytree as pytree

from autotune.capture.capture_checks import refuse_parameter_hooks
from autotune.capture.loop_checks import refuse_fork, refuse_modes, refuse_unreduced
from autotune.capture.optimizers.optimizer_copy import clear_gradients, inner_optimizers, parameters_of
from autotune.capture.optimizers.wrapped_optimizer import Bookkeeping, unwrapped
from autotune.capture.program import Program
from autotune.capture.python.guards import Change
from autotune.capture.signature import Signature, model_state, signature
from autotune.capture.tracer import capture, unaliased
from autotune.errors import ConfigError, PlanError
from autotune.ir.check import check
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan, early_updates
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.predict.simulate import peak_bytes
from autotune.records import plan_file as planfile
from autotune.records.measurement import Lanes
from autotune.records.plan_file import PlanFile
from autotune.runtime.arena import Arena
from autotune.runtime.executor import Executor, seed_gradient
from autotune.runtime.keep_gradients import gradients_kept
from autotune.runtime.offload_slots import open_slots
from autotune.runtime.op_profiler import profile
from autotune.runtime.recapture import Recaptures, transferred
from autotune.runtime.stores import SwapStore, measured, open_store
from autotune.runtime.verification.verify import STEPS, See, Verifier
from autotune.runtime.window_adapter import Adapter, variants
from autotune.units import fmt_bytes
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.workload import LossFn, Workload, infer
from autotune.workloads.workload import check as check_workload

OtherShapes = Literal["replan", "eager", "error"]

CAPTURES = 8
"""Captures with other Python values that are kept for one kind of batch; the oldest is dropped first."""


@dataclass(slots=True)
class _Ready:
    """One batch signature's program, and its executors by plan: more than one where the window adapts."""

    number: int
    """Counts the captures of one step."""
    program: Program
    planned: Plan
    """The plan for the captured graph; `plan` may keep its gradients or have another window."""
    plan: Plan
    runs: Mapping[Plan, tuple[Executor, Arena | None]]
    store: SwapStore | None
    """None also while it rests."""
    reopen: Callable[[], SwapStore] | None
    adapter: Adapter | None

    @property
    def run(self) -> Executor:
        return self.runs[self.plan][0]

    @property
    def arena(self) -> Arena | None:
        return self.runs[self.plan][1]

    def rest(self) -> None:
        """Give the arena's memory and the store's space back until the next step."""
        if self.arena is not None:
            self.arena.rest()
        if self.store is not None:
            self.store.close()
            self.store = None

    def wake(self) -> None:
        """Open the store again after a rest."""
        if self.store is None and self.reopen is not None:
            self.store = self.reopen()
            for run, _ in self.runs.values():
                run.use(self.store)

    def adapt(self) -> None:
        """Take the window for the next step."""
        if self.adapter is None:
            return
        self.adapter.saw(self.run.lanes)
        if self.adapter.now.plan != self.plan:
            if self.arena is not None:
                self.arena.rest()
            self.plan = self.adapter.now.plan

    def close(self) -> None:
        """Give the store's space and the arenas back for good."""
        self.reopen = None
        if self.store is not None:
            self.store.close()
        for _, arena in self.runs.values():
            if arena is not None:
                arena.close()


class TrainStep:
    """One training step under a plan: `loss = step(batch)`.

    Parameters, optimizer state and buffers are the caller's own objects, all in memory between steps. `.grad` is None
    after a step, unless `accumulate` keeps it. `loss_fn(model, batch)` gives the loss, or the loss and extras; the step
    returns them detached. Nothing else that it does in Python is repeated in a step: a change that the next step would read,
    such as a buffer assigned anew, is refused; others, such as a counter for a log, give a warning. A buffer may change in
    place. Without a plan the step runs as it was traced;
    without loss and optimizer it is inference.

    `before_update()` is called when all gradients are there, unscaled, for clipping; it and `scaler` and `accumulate`,
    and a hook before the optimizer's step, need every gradient at once: the user's optimizer then steps at the end,
    whatever the plan says of updates, and a warning tells what that takes.
    A plan in `channels_last` puts the model's weights, and what the optimizer holds for them, into that format, as
    `model.to(memory_format=torch.channels_last)` does, and leaves them so; each batch's images are converted for the
    step unless they come so, which saves a copy.

    `accumulate` steps make one update. A batch of another shape is planned anew with the same settings ("replan"), run
    in plain eager ("eager") or refused ("error"). `on_gradient(name, gradient)` sees each gradient before its update.

    The step is captured once, with the Python values that it reads: a dropout's p, an attribute, a number in a closure, a
    hook. When one of them changes, `other_shapes` decides, too: the step is captured again under the same plan ("replan";
    captures are kept by their values, and a float becomes an input where the tracer can make it one), the step runs in
    plain eager, or an error names the value and the line that reads it. A value that needs another capture twice within
    ten steps is refused.

    `adapt` lets a plan that offloads change its window between steps, within its budget, by what the steps wait for.
    A write that fails leaves its value in memory, with a warning. A read that fails ends the step with a StoreError, and
    weights are brought back first; updates that stand beside their gradients may have been made by then. Whatever stops a
    step, no `.grad` is left: a sum of `accumulate` begins anew.

    `verify` compares the first steps of each captured program, two or as many as it says, with the eager step from the
    same state: bit by bit, else relative to eager's own rounding error. A step that differs raises a NumericsError and
    leaves eager's results in model and optimizer. It needs eager's memory and copies of all state beside that; the loss
    function and `before_update` run once more for each verified step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        batch: Any,
        plan: str | Path | PlanFile | Plan | None = None,
        *,
        stores: Mapping[str, str | Path] | None = None,
        accumulate: int = 1,
        before_update: Callable[[], Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        other_shapes: OtherShapes = "replan",
        adapt: bool = False,
        verify: bool | int = False,
    ) -> None:
        if accumulate < 1:
            raise ConfigError(
                f"accumulate is {accumulate}; it counts the steps that make one update, so it is at least 1"
            )
        if other_shapes not in ("replan", "eager", "error"):
            raise ConfigError(f"other_shapes is {other_shapes!r}; known: replan, eager, error")
        check_workload(Workload(model, loss_fn if optimizer is not None else None, optimizer, batch), "TrainStep")
        self._bookkeeping = Bookkeeping(optimizer)
        optimizer = unwrapped(optimizer) if optimizer is not None else None
        if optimizer is not None:
            refuse_unreduced(model, reduces=before_update is not None)
        self.model, self.optimizer = model, optimizer
        self._optimizers = [] if optimizer is None else [optimizer, *inner_optimizers(optimizer)]
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        self._loss_fn = loss_fn
        self._stores = {name: Path(directory).absolute() for name, directory in (stores or {}).items()}
        self._accumulate, self._taken = accumulate, 0
        self._before_update, self._scaler = before_update, scaler
        self._other_shapes, self._adapt = other_shapes, adapt
        self._verifier = Verifier(model, optimizer, scaler, STEPS if verify is True else int(verify))
        self._warned = self._told = False
        self._recaptures = Recaptures()
        self._numbers = itertools.count()
        self._file = (
            planfile.read(Path(plan)) if isinstance(plan, (str, Path)) else plan if isinstance(plan, PlanFile) else None
        )
        chosen = self._file.plan if self._file is not None else plan
        self._memory_format = chosen.memory_format if isinstance(chosen, Plan) else ""
        self._allocator = chosen.allocator if isinstance(chosen, Plan) else "system"
        self._pid = os.getpid()
        self._refuse_loop()
        if self._memory_format:
            convert_model(model, optimizer, self._memory_format)
            batch = convert_batch(batch, self._memory_format)
        self._last_run: Executor | None = None
        self._first, _ = self._signature(batch)
        self._last = self._prepare(self._capture(batch), plan if isinstance(plan, Plan) else None)
        self._ready = {self._first: [self._last]}
        self._graph = self._last.program.graph

    @property
    def graph(self) -> TrainGraph:
        """The step that was captured for the first batch."""
        return self._graph

    @property
    def plan(self) -> Plan:
        """The plan of the last step's batch."""
        return self._last.plan

    @property
    def stall_seconds(self) -> float:
        """Of the last step: waited for a store."""
        return self.lanes.stall_seconds

    @property
    def transfer_bytes(self) -> int:
        """Of the last step: written to a store and read back."""
        return self._last_run.transfer_bytes if self._last_run is not None else 0

    @property
    def verified(self) -> str:
        """How the last verified step was compared with eager; empty if none was."""
        return self._verifier.how

    @property
    def lanes(self) -> Lanes:
        """Of the last step: what the store read and wrote beside it, and when the step waited for that."""
        return self._last_run.lanes if self._last_run is not None else Lanes()

    def __call__(self, batch: Any) -> Any:
        """Run one step."""
        self._refuse_loop()
        self._count_anew()
        updates = (self._taken + 1) % self._accumulate == 0
        self._bookkeeping.begin(updates=updates)
        results = self._one(batch)
        self._bookkeeping.end(updated=updates)
        return results

    def _one(self, batch: Any) -> Any:
        """Run one step by the capture that holds for it, or in eager."""
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        called, hooked = self._signature(batch)
        if self._loss_fn is not None and hooked:
            if self._other_shapes == "eager":
                return self._eager(batch)
            refuse_parameter_hooks(self.model)
        self._recaptures.steps += 1
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        ready, change = self._find(called, tensors)
        if ready is None and self._other_shapes == "error":
            raise PlanError(
                f"this step was made for a batch of {self._first.shapes}; this is {self._what(called)}. "
                "Pass other_shapes='replan' or make a TrainStep for it"
                if change is None
                else f"{change}. Pass other_shapes='replan' or make a TrainStep for it"
            )
        if ready is not self._last:
            self._last.rest()  # else shapes that take turns would hold a block and a store each
        if ready is None:
            self._warn(called, change)
            if self._other_shapes == "eager":
                self._last_run = None
                return self._eager(batch)
            ready = self._prepare(self._capture(batch), None) if change is None else self._recapture(batch, change)
            self._keep(called, ready)
        ready.wake()
        self._last = ready
        self._last_run = self._last.run
        run = partial(self._planned, self._last, self._last_run, tensors)
        results = self._verified(ready.number, batch, run) if self._verifier.due(ready.number) else run()
        self._last.adapt()
        return results

    def _find(self, called: Signature, tensors: list[torch.Tensor]) -> tuple[_Ready | None, Change | None]:
        """The capture that holds for this step, or the value that changed since the last one of this signature."""
        change = None
        distinct = unaliased(tensors)
        with nullcontext() if self._loss_fn is not None else torch.no_grad():
            for ready in reversed(self._ready.get(called, ())):
                if ready.program.guards.hold(distinct):
                    return ready, None
                change = change or ready.program.guards.change(distinct)
        return None, change

    def _keep(self, called: Signature, ready: _Ready) -> None:
        known = self._ready.setdefault(called, [])
        known.append(ready)
        while len(known) > CAPTURES:
            known.pop(0).close()

    def flush(self) -> None:
        """Update with the gradients of the steps since the last update: those that `accumulate` leaves at an epoch's end."""
        if self.optimizer is None:
            return
        self._count_anew()
        if self._taken % self._accumulate:
            with self._all_or_none():
                self._update_all()
            self._taken = 0
            self._bookkeeping.end(updated=True)

    def close(self) -> None:
        """Give the stores' space back. The model and the optimizer stay as they are."""
        for ready in itertools.chain.from_iterable(self._ready.values()):
            ready.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _keeps_gradients(self) -> str:
        """What needs every gradient before any update; empty if nothing does."""
        asked = {
            "accumulate": self._accumulate > 1,
            "before_update": self._before_update is not None,
            "scaler": self._scaler is not None,
            "a hook before the optimizer's step": self.optimizer is not None
            and bool(getattr(self.optimizer, "_optimizer_step_pre_hooks", None)),
        }
        return " and ".join(name for name, asks in asked.items() if asks)

    def _planned(self, ready: _Ready, run: Executor, tensors: list[torch.Tensor]) -> Any:
        updates = ready.program.updates
        if self._scaler is not None:
            one = seed_gradient(ready.program)
            run.tangent = self._scaler.scale(one).to(one.dtype)
        if updates is None:
            return run(tensors)
        updates.on_gradient = self.on_gradient
        if self._keeps_gradients:
            self._count_anew()
            with self._all_or_none():
                results = run(tensors)
                self._taken += 1
                if self._taken % self._accumulate == 0:
                    self._update_all()
            return results
        with updates.step():
            return run(tensors)

    def _verified(self, number: int, batch: Any, run: Callable[[], Any]) -> Any:
        own, taken = self.on_gradient, self._taken

        def seen(run: Callable[[], Any], see: See, *, told: bool) -> Any:
            def both(name: str, gradient: torch.Tensor) -> None:
                see(name, gradient)
                if told and own is not None:
                    own(name, gradient)

            self.on_gradient, self._taken = both, taken
            try:
                return run()
            finally:
                self.on_gradient = own

        return self._verifier.step(
            number,
            batch,
            lambda batch, see: seen(partial(self._eager, batch), see, told=False),
            lambda see: seen(run, see, told=True),
        )

    def _count_anew(self) -> None:
        """Begin a new sum where the loop has cleared every gradient of the last, as after an update of its own."""
        if self._taken % self._accumulate and all(p.grad is None for p in self._owned()):
            self._taken = 0

    def _owned(self) -> list[torch.Tensor]:
        return parameters_of(self._optimizers)

    def _refuse_loop(self) -> None:
        refuse_modes(trains=self.optimizer is not None)
        if hasattr(self, "_last") and any(
            ready.plan.offload for ready in itertools.chain.from_iterable(self._ready.values())
        ):
            refuse_fork(self._pid)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Around what makes gradients and updates with all of them: none are left by a failure."""
        assert self.optimizer is not None
        try:
            yield
        except BaseException:
            clear_gradients(self.optimizer)
            self._taken -= self._taken % self._accumulate
            raise

    def _update_all(self) -> None:
        assert self.optimizer is not None
        try:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            if self._before_update is not None:
                self._before_update()
            if self._scaler is not None:
                self._scaler.step(self.optimizer)
                self._scaler.update()
            else:
                self.optimizer.step()
        except BaseException:
            if self._scaler is not None:  # it remembers what it unscaled until it is updated
                self._scaler.update(self._scaler.get_scale())
            raise
        clear_gradients(self.optimizer)

    def _eager(self, batch: Any) -> Any:
        if self._loss_fn is None or self.optimizer is None:
            with torch.no_grad():
                return infer(self.model, batch) if self._loss_fn is None else self._loss_fn(self.model, batch)
        self._count_anew()
        with self._all_or_none():
            made = self._loss_fn(self.model, batch)
            loss = made[0] if isinstance(made, tuple) else made
            with self._watched():
                (self._scaler.scale(loss) if self._scaler is not None else loss).backward()
            self._taken += 1
            if self._taken % self._accumulate == 0:
                self._update_all()
        return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, made)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around autograd's own backward: `on_gradient` sees each gradient before it is added to `.grad`."""
        with ExitStack() as hooks:
            if self.on_gradient is not None:
                trained = self._trained
                for name, parameter in self.model.named_parameters():
                    if parameter.requires_grad and id(parameter) in trained:
                        hooks.enter_context(parameter.register_hook(partial(self._tell, name)))  # type: ignore[no-untyped-call]
            yield

    def _tell(self, name: str, gradient: torch.Tensor) -> None:
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)

    @property
    def _trained(self) -> set[int]:
        """Ids of the optimizer's parameters."""
        return {id(parameter) for parameter in self._owned()}

    def _signature(self, batch: Any) -> tuple[Signature, bool]:
        """Describe this call, and say whether a parameter has a hook."""
        state = model_state(self.model, self._trained)
        return signature(batch, state, self._keeps_gradients), state.has_parameter_hooks

    def _warn(self, called: Signature, change: Change | None) -> None:
        eager = self._other_shapes == "eager"
        if change is not None:
            if self._recaptures.first_time(change):
                how = "runs in plain eager" if eager else "is captured again"
                warnings.warn(f"{change}; the step {how} whenever it changes", stacklevel=4)
            return
        if not self._warned:
            how = "runs as it is traced" if self._file is None else "is planned anew with the same settings"
            how = "runs in plain eager" if eager else how
            warnings.warn(f"{self._what(called)} {how}; the plan is for a batch of {self._first.shapes}", stacklevel=4)
        self._warned = True

    def _what(self, called: Signature) -> str:
        if (called.batch, called.structure) != (self._first.batch, self._first.structure):
            return f"a batch of {called.shapes}"
        if called.keeps_gradients != self._first.keeps_gradients:
            return f"the step with {called.keeps_gradients or 'nothing'} that needs every gradient at once"
        return "the model in another mode, or with other buffers or parameters to train,"

    def _capture(self, batch: Any, inputs: frozenset[str] | None = None) -> Program:
        numbers = self._recaptures.inputs if inputs is None else inputs
        return capture(Workload(self.model, self._loss_fn, self.optimizer, batch), dynamic=numbers)

    def _recapture(self, batch: Any, change: Change) -> _Ready:
        """Capture the step with its new Python values; the plan stays where only constants differ."""
        self._recaptures.refuse_what_changes_often(change)
        program = self._recaptures.capture(change, partial(self._capture, batch))
        plan = transferred(self._last.planned, self._last.program, program)
        return self._prepare(program, plan)

    def _prepare(self, program: Program, given: Plan | None) -> _Ready:
        if given is not None:
            plan = given
        elif self._file is not None and not hasattr(self, "_ready"):
            _match(self._file, program.graph)
            plan = self._file.plan
        elif self._file is not None:
            plan = self._replan(self._file, program)
        else:
            traced = Plan.traced(program.graph)
            plan = replace(traced, memory_format=self._memory_format, allocator=self._allocator)
        check(program.graph, plan)
        planned = plan
        if self._keeps_gradients and program.updates is not None:
            self._tell_of_veto(program.graph, plan)
            program, plan = gradients_kept(program, plan)
        adapter = self._adapter(program, plan) if self._adapt and plan.offload else None
        plans = [one.plan for one in adapter.known] if adapter is not None else [plan]
        schedules = [lower(program.graph, one) for one in plans]
        reopen = None
        if plan.offload:
            reopen = partial(open_store, plan.store, self._directory(plan.store), open_slots(program, *schedules))
        store = reopen() if reopen is not None else None
        # gradients that add up over several steps live longer than any one step's places
        places = plan.allocator == "arena" and program.device.type == "cpu" and self._accumulate == 1
        runs: dict[Plan, tuple[Executor, Arena | None]] = {}
        for one, schedule in zip(plans, schedules, strict=True):
            arena = Arena() if places else None
            runs[one] = Executor(program, schedule, store, arena=arena), arena
        return _Ready(next(self._numbers), program, planned, plan, runs, store, reopen, adapter)

    def _adapter(self, program: Program, plan: Plan) -> Adapter:
        costs = measured(profile(program), {plan.store: self._directory(plan.store)}, program.device.type)
        budget = self._file.budget_bytes if self._file is not None else peak_bytes(program.graph, plan, costs)
        return Adapter(variants(program.graph, plan, budget, costs), budget)

    def _tell_of_veto(self, graph: TrainGraph, plan: Plan) -> None:
        early = [graph.ops[op] for op in early_updates(graph, plan.order)]
        if early and not self._told:
            gradients = {value for op in early for value in op.inputs if value not in graph.static}
            nbytes = sum(graph.values[value].nbytes for value in gradients)
            warnings.warn(
                f"{self._keeps_gradients}: all gradients are needed at once, so {len(early)} updates that the plan places "
                f"beside their gradients wait for the end of the step, and {fmt_bytes(nbytes)} of gradients with them; "
                "tune with planners: {update: [at_end]} to plan for that",
                stacklevel=4,
            )
        self._told |= bool(early)

    def _replan(self, file: PlanFile, program: Program) -> Plan:
        directories = {name: Path(directory) for name, directory in self._stores.items()}
        settings = file.settings
        if self._keeps_gradients:
            settings = {**settings, "update": {"planner": "at_end"}}
        costs = measured(profile(program), directories, program.device.type)
        plan = make_plan(program.graph, settings, file.budget_bytes, costs)
        return replace(plan, memory_format=self._memory_format)

    def _directory(self, name: str) -> Path:
        if name not in self._stores:
            raise ConfigError(f"the plan offloads to {name!r}; pass stores={{{name!r}: DIR}}")
        return Path(self._stores[name])


def _match(file: PlanFile, graph: TrainGraph) -> None:
    if file.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for {file.workload} (graph {file.graph_digest[:8]}, {1 + max(file.plan.order, default=-1)} ops); this step is another graph"
            f" ({graph.digest[:8]}, {len(graph.ops)} ops): check model, batch shape, dtype and optimizer, or tune it"
        )
