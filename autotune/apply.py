"""What a training loop calls: one object that runs the whole step under a plan."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.utils import _pytree as pytree

from autotune import planfile
from autotune.adapt import Adapter, variants
from autotune.arena import Arena
from autotune.capture import capture
from autotune.errors import ConfigError, PlanError
from autotune.execute import Executor, open_slots, seed_gradient
from autotune.graph import TrainGraph
from autotune.keep_gradients import gradients_kept
from autotune.measurement import Lanes
from autotune.memory_format import convert_batch, convert_model
from autotune.plan import Plan, check, early_updates
from autotune.planfile import PlanFile
from autotune.planners import make_plan
from autotune.profile import profile
from autotune.program import Program
from autotune.schedule import lower
from autotune.simulate import peak_bytes
from autotune.stores import SwapStore, measured, open_store
from autotune.units import fmt_bytes
from autotune.workload import LossFn, Workload, infer

OtherShapes = Literal["replan", "eager", "error"]


@dataclass(slots=True)
class _Ready:
    """One batch signature's program, and its executors by plan: more than one where the window adapts."""

    program: Program
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
    returns them detached. Nothing else that it does in Python is repeated in a step: no `self.count += 1`, no list's
    `append`, no buffer assigned anew; a buffer changed in place is. Without a plan the step runs as it was traced;
    without loss and optimizer it is inference.

    `before_update()` is called when all gradients are there, unscaled, for clipping; it and `scaler` and `accumulate`,
    and a hook before the optimizer's step, need every gradient at once: the user's optimizer then steps at the end,
    whatever the plan says of updates, and a warning tells what that takes.
    A plan in `channels_last` puts the model's weights, and what the optimizer holds for them, into that format, as
    `model.to(memory_format=torch.channels_last)` does, and leaves them so; each batch's images are converted for the
    step unless they come so, which saves a copy.

    `accumulate` steps make one update. A batch of another shape is planned anew with the same settings ("replan"), run
    in plain eager ("eager") or refused ("error"). `on_gradient(name, gradient)` sees each gradient before its update.

    `adapt` lets a plan that offloads change its window between steps, within its budget, by what the steps wait for.
    A write that fails leaves its value in memory, with a warning. A read that fails ends the step with a StoreError, and
    weights are brought back first; updates that stand beside their gradients may have been made by then. Whatever stops a
    step, no `.grad` is left: a sum of `accumulate` begins anew.
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
    ) -> None:
        if accumulate < 1:
            raise ConfigError(
                f"accumulate is {accumulate}; it counts the steps that make one update, so it is at least 1"
            )
        if other_shapes not in ("replan", "eager", "error"):
            raise ConfigError(f"other_shapes is {other_shapes!r}; known: replan, eager, error")
        self.model, self.optimizer = model, optimizer
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        self._loss_fn = loss_fn
        self._stores = dict(stores or {})
        self._accumulate, self._taken = accumulate, 0
        self._before_update, self._scaler = before_update, scaler
        self._other_shapes, self._adapt = other_shapes, adapt
        self._warned = self._told = False
        self._file = (
            planfile.read(Path(plan)) if isinstance(plan, (str, Path)) else plan if isinstance(plan, PlanFile) else None
        )
        chosen = self._file.plan if self._file is not None else plan
        self._memory_format = chosen.memory_format if isinstance(chosen, Plan) else ""
        self._allocator = chosen.allocator if isinstance(chosen, Plan) else "system"
        _refuse_autocast()
        if self._memory_format:
            convert_model(model, optimizer, self._memory_format)
            batch = convert_batch(batch, self._memory_format)
        self._last_run: Executor | None = None
        self._first = self._signature(batch)
        self._ready = {self._first: self._prepare(batch, plan if isinstance(plan, Plan) else None)}
        self._last = self._ready[self._first]

    @property
    def graph(self) -> TrainGraph:
        """The step that was captured for the first batch."""
        return self._ready[self._first].program.graph

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
    def lanes(self) -> Lanes:
        """Of the last step: what the store read and wrote beside it, and when the step waited for that."""
        return self._last_run.lanes if self._last_run is not None else Lanes()

    def __call__(self, batch: Any) -> Any:
        """Run one step."""
        _refuse_autocast()
        if self._memory_format:
            batch = convert_batch(batch, self._memory_format)
        signature = self._signature(batch)
        ready = self._ready.get(signature)
        if ready is None and self._other_shapes == "error":
            raise PlanError(
                f"this step was made for a batch of {_shapes(self._first)}; this is {self._what(signature)}. "
                "Pass other_shapes='replan' or make a TrainStep for it"
            )
        if ready is not self._last:
            self._last.rest()  # else shapes that take turns would hold a block and a store each
        if ready is None:
            self._warn(signature)
            if self._other_shapes == "eager":
                self._last_run = None
                return self._eager(batch)
            ready = self._ready[signature] = self._prepare(batch, None)
        ready.wake()
        self._last = ready
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._last_run = self._last.run
        results = self._planned(self._last, self._last_run, tensors)
        self._last.adapt()
        return results

    def close(self) -> None:
        """Give the stores' space back. The model and the optimizer stay as they are."""
        for ready in self._ready.values():
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
            and bool(self.optimizer._optimizer_step_pre_hooks),
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
            with self._all_or_none():
                results = run(tensors)
                self._taken += 1
                if self._taken % self._accumulate == 0:
                    self._update_all()
            return results
        with updates.step():
            return run(tensors)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Around what makes gradients and updates with all of them: none are left by a failure."""
        assert self.optimizer is not None
        try:
            yield
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
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
        self.optimizer.zero_grad(set_to_none=True)

    def _eager(self, batch: Any) -> Any:
        if self._loss_fn is None or self.optimizer is None:
            with torch.no_grad():
                return infer(self.model, batch) if self._loss_fn is None else self._loss_fn(self.model, batch)
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
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]} if self.optimizer else set()

    def _signature(self, batch: Any) -> tuple[Any, ...]:
        leaves, spec = pytree.tree_flatten(batch)
        strange = next((x for x in leaves if not isinstance(x, (torch.Tensor, Hashable))), None)
        if strange is not None:
            raise ConfigError(
                f"the batch holds a {type(strange).__name__}; give tensors, and numbers or strings beside them"
            )
        shown = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in leaves
        )
        trained = self._trained
        weights = tuple(
            (id(p), p.dtype, p.device, p.requires_grad and id(p) in trained) for p in self.model.parameters()
        )
        # a model that goes to another device or dtype and back has other buffers, but the same parameters
        buffers = tuple(map(id, self.model.buffers()))
        modes = tuple(module.training for module in self.model.modules())
        return shown, str(spec), hash((weights, buffers)), modes, self._keeps_gradients

    def _warn(self, signature: tuple[Any, ...]) -> None:
        if not self._warned:
            how = "runs as it is traced" if self._file is None else "is planned anew with the same settings"
            how = "runs in plain eager" if self._other_shapes == "eager" else how
            made_for = _shapes(self._first)
            warnings.warn(f"{self._what(signature)} {how}; the plan is for a batch of {made_for}", stacklevel=3)
        self._warned = True

    def _what(self, signature: tuple[Any, ...]) -> str:
        if signature[:2] != self._first[:2]:
            return f"a batch of {_shapes(signature)}"
        if signature[-1] != self._first[-1]:
            return f"the step with {signature[-1] or 'nothing'} that needs every gradient at once"
        return "the model in another mode, or with other buffers or parameters to train,"

    def _prepare(self, batch: Any, given: Plan | None) -> _Ready:
        program = capture(Workload(self.model, self._loss_fn, self.optimizer, batch))
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
        return _Ready(program, plan, runs, store, reopen, adapter)

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


def _shapes(signature: tuple[Any, ...]) -> str:
    return ", ".join("x".join(map(str, part[0])) or "scalar" for part in signature[0] if isinstance(part, tuple))


def _refuse_autocast() -> None:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "torch.autocast is on around the step, whose backward and update would run under it too; enter it in the loss "
            "function, without one in the model's forward"
        )
