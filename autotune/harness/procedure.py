"""What a child does: runs plain eager steps and plans, and looks at their results, bytes and seconds."""

import contextlib
import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autotune.arena import Arena, malloc_returns_memory
from autotune.capture import capture
from autotune.errors import ConfigError, PlanError
from autotune.execute import Executor, open_slots
from autotune.harness.limit import limit_data, limit_fraction
from autotune.harness.messages import Spec
from autotune.harness.reference import Reference, Writer, digest
from autotune.measurement import Outcome
from autotune.memory_format import choices, convert_batch, convert_model
from autotune.meters import Meter, best_meter
from autotune.meters.cuda import CudaMeter
from autotune.meters.nvml import NvmlMeter
from autotune.plan import Plan, check
from autotune.profile import profile
from autotune.program import Program
from autotune.records import from_json, to_json
from autotune.schedule import Schedule, lower
from autotune.stores import SwapStore, measured, open_store
from autotune.workload import Workload, infer, load

STEPS = 2
"""Steps whose results are compared: the second runs on what the first wrote."""
BLOCK_STEPS = 2
"""Measured steps in a row; one more before them is not."""

OnGradient = Callable[[str, torch.Tensor], None]
Step = Callable[[], list[torch.Tensor]]


@dataclass
class _Timed:
    """What is being timed."""

    plan: Any
    step: Step
    stack: contextlib.ExitStack
    executor: Executor | None = None
    arena: Arena | None = None


class Bench:
    """One workload in one process, and everything that can be asked of it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._stores = {name: Path(directory) for name, directory in spec.stores.items()}
        self._held = _nothing
        self._timed: _Timed | None = None
        self._nvml = NvmlMeter() if spec.device_kind == "cuda" else None
        self._limit()
        self._seed()
        self._workload = _on_device(load(spec.reference, spec.arguments), spec.device_kind)
        if spec.memory_format not in choices(self._workload.model):
            raise ConfigError(
                f"{spec.reference} leaves no choice of a memory format: no contiguous weights of four dimensions; "
                "leave --memory-format out"
            )
        self._lie_in(spec.memory_format)
        self._initial = self._save_initial()

    # What can be asked: each takes and gives what JSON can carry.

    def prepare(self) -> dict[str, Any]:
        """Capture, profile and probe. The floor is this process's own, without the tensors."""
        from autotune.devices import this_device

        cache = Path(self._spec.profile_cache) if self._spec.profile_cache else None
        costs = measured(profile(self._program, cache=cache), self._stores)
        return {
            "graph": to_json(self._program.graph),
            "costs": to_json(costs),
            "device": to_json(this_device(self._spec.device_kind)),
            "floor_bytes": self._floor_bytes(),
        }

    def baseline_bytes(self, reference: str) -> dict[str, Any]:
        """Run plain eager steps, keep their results in the directory `reference`, and tell peak and floor."""
        with contextlib.closing(Writer(Path(reference))) as writer:
            self._results(self._eager, self._eager, writer.add)
        with self._users_own():
            return self._peak(lambda: _drop(self._eager())) | {"floor_bytes": self._floor_bytes()}

    def plan_bytes(self, plan: Any, reference: str, tolerance: float) -> dict[str, Any]:
        """Compare a plan's results with `reference` (empty: compare nothing), then tell peak and floor."""
        with self._running(plan) as (step, _):
            compared = self._compare(step, Path(reference)) if reference else self._warm_up(step)
            if compared.get("max_error", 0.0) > tolerance:
                return compared | {"outcome": Outcome.WRONG_RESULT}
            seen = self._peak(lambda: _drop(step()))
        seen |= {"floor_bytes": self._floor_bytes()}
        self._forget()
        return compared | seen

    def trace(self, reference: str) -> dict[str, Any]:
        """Keep the results of the graph as it was traced in the directory `reference`."""
        with (
            contextlib.closing(Writer(Path(reference))) as writer,
            self._running(to_json(Plan.traced(self._program.graph))) as (step, _),
        ):
            self._results(step, self._hooked(step), writer.add)
        return {}

    def batch_size(self) -> dict[str, Any]:
        """First dimension of the batch's first tensor."""
        return {"batch": next(leaf.shape[0] for leaf in self._batch() if leaf.ndim)}

    def wiring(self) -> dict[str, Any]:
        """What a plan depends on: the same for two batch sizes unless the model looks at them."""
        graph = self._program.graph
        return {"wiring": repr([(op.target, op.inputs, op.outputs, op.layer) for op in graph.ops])}

    def begin(self, plan: Any) -> dict[str, Any]:
        """Get a plan, or without one plain eager, ready to be timed in blocks; an arena is laid out."""
        self.stop()
        self._restore()
        stack = contextlib.ExitStack()
        timed = self._timed = _Timed(plan, self._eager, stack)
        if plan is None:
            stack.enter_context(self._users_own())
        else:
            timed.arena = self._arena(plan)
            timed.step, timed.executor = stack.enter_context(self._running(plan, arena=timed.arena))
        for _ in range(3 if timed.arena is not None else 0):  # its first two run on malloc: the bytes child sees them
            _drop(timed.step())
        return {}

    def block(self) -> dict[str, Any]:
        """Time and charge a few steps of what was begun; between blocks another process may have its turn."""
        assert self._timed is not None
        timed = self._timed
        trim()
        with self._meter(charged=True) as meter:
            block = self._block(timed.step, timed.executor)
        # while others have their turn it takes no more than it must; the next block's first step is not timed
        self._forget_gradients()
        if timed.arena is not None:
            timed.arena.rest()
        trim()
        return {
            "seconds": [seconds for seconds, _ in block],
            "stalls": [stalled for _, stalled in block],
            "transfer_bytes": timed.executor.transfer_bytes if timed.executor is not None else 0,
            "charged_bytes": meter.peak_bytes,
            "meter": meter.name,
        }

    def finish(self) -> dict[str, Any]:
        """The floor of what was begun, which ends. Steps in an arena are compared with the same on malloc."""
        assert self._timed is not None
        timed = self._timed
        timed.stack.close()
        floor = self._floor_bytes()
        self.stop()
        if timed.arena is not None and (differs := self._arena_changes(timed.plan)):
            return {"outcome": Outcome.WRONG_RESULT, "detail": f"{differs} differs between arena and malloc"}
        self._forget()
        return {"floor_bytes": floor}

    def stop(self) -> dict[str, Any]:
        """End what was begun, if anything was."""
        if self._timed is not None:
            self._timed.stack.close()
        self._timed = None
        self._forget()
        return {}

    # How.

    def _lie_in(self, memory_format: str) -> None:
        if self._spec.memory_format:
            convert_model(self._workload.model, self._workload.optimizer, memory_format)
            self._workload.batch = convert_batch(self._workload.batch, memory_format)

    @contextlib.contextmanager
    def _users_own(self) -> Iterator[None]:
        """Everything as the factory made it, whatever format plans run in."""
        self._lie_in("")
        try:
            yield
        finally:
            self._lie_in(self._spec.memory_format)

    def _arena_changes(self, plan: Any) -> str:
        """Name of something that four steps leave different in an arena than on malloc; empty if nothing is."""
        seen: list[dict[str, str]] = []
        for arena in (Arena(), None):
            # a limit that the arena keeps must not be broken by what malloc would hold
            with self._running(plan, arena=arena) as (step, _), malloc_returns_memory(arena is None):
                self._restore()
                made: list[torch.Tensor] = []
                for _ in range(4):  # in an arena: on malloc, recorded, and replayed twice
                    made = step()
                results = ((f"result {index}", tensor) for index, tensor in enumerate(made))
                named = [*results, *self._own_tensors(), *self._state_tensors()]
                seen.append({name: digest(tensor) for name, tensor in named})
        return next((name for name in seen[0] if seen[0][name] != seen[1].get(name)), "")

    @cached_property
    def _program(self) -> Program:
        return capture(self._workload, self._spec.reference)

    def _limit(self) -> None:
        if self._spec.limit_bytes is None:
            return
        if self._nvml is not None:
            limit_fraction(self._spec.limit_bytes, self._context_bytes())
        else:
            limit_data(self._spec.limit_bytes, self._meter().now_bytes())

    def _meter(self, *, charged: bool = False) -> Meter:
        if self._nvml is not None:
            return CudaMeter(charged=charged, context_bytes=self._context_bytes)
        return best_meter(self._spec.device_kind, self._held)

    def _context_bytes(self) -> int:
        if self._nvml is None or self._nvml.why_not():
            return 0
        return self._nvml.context_bytes(torch.cuda.memory_reserved())

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

    def _restore(self) -> None:
        """Bring parameters, buffers, optimizer and generators back to where the factory left them."""
        self._forget()
        with torch.no_grad():
            for name, tensor in self._own_tensors():
                tensor.copy_(self._initial.load(name))
        self._seed()

    def _own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._workload.model.named_parameters():
            yield f"parameter.{name}", parameter
        for name, buffer in self._workload.model.named_buffers():
            yield f"buffer.{name}", buffer

    def _state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._workload.optimizer is None:
            return
        state = self._workload.optimizer.state
        for name, parameter in self._workload.model.named_parameters():
            leaves = pytree.tree_flatten_with_path(state[parameter])[0] if parameter in state else ()
            for path, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    yield f"state.{name}{pytree.keystr(path)}", leaf

    def _static_bytes(self) -> int:
        tensors = [t for _, t in (*self._own_tensors(), *self._state_tensors())] + self._batch()
        kind = self._spec.device_kind
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == kind}
        return sum(storage.nbytes() for storage in storages.values())

    def _batch(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self._workload.batch) if isinstance(leaf, torch.Tensor)]

    def _forget_gradients(self) -> None:
        self._workload.model.zero_grad(set_to_none=True)

    def _forget(self) -> None:
        """Hold no more memory than the factory's own, while others are measured."""
        if self._workload.optimizer is not None:
            self._workload.optimizer.state.clear()
        self._forget_gradients()
        trim()

    def _eager(self, on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
        """One plain step, as anyone writes it."""
        model, loss_fn, optimizer, batch = (
            self._workload.model, self._workload.loss_fn, self._workload.optimizer, self._workload.batch,
        )  # fmt: skip
        if loss_fn is None:
            with torch.no_grad():
                return _leaves(infer(model, batch))
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        made = loss_fn(model, batch)
        loss = made[0] if isinstance(made, tuple) else made
        loss.backward()
        if optimizer is not None:
            if on_gradient is not None:
                self._tell_gradients(optimizer, on_gradient)
            optimizer.step()
        return _leaves(made)

    def _tell_gradients(self, optimizer: torch.optim.Optimizer, tell: OnGradient) -> None:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._workload.model.named_parameters():
            if parameter.grad is not None and id(parameter) in owned:
                tell(name, parameter.grad)

    @contextlib.contextmanager
    def _running(self, document: Any, *, arena: Arena | None = None) -> Iterator[tuple[Step, Executor]]:
        """A plan ready to step, with its store open; on malloc unless an arena is given."""
        plan = from_json(Plan, document, where="plan")
        graph = self._program.graph
        if plan.memory_format not in ("", self._spec.memory_format):
            raise PlanError(
                f"the plan is in {plan.memory_format}, the workload in {self._spec.memory_format or 'its own format'}; "
                f"prepare it with memory_format={plan.memory_format}"
            )
        check(graph, plan)
        schedule = lower(graph, plan)
        store = self._open(schedule) if schedule.store else None
        executor = Executor(self._program, schedule, store, arena=arena)
        updates = self._program.updates
        self._held = store.held_bytes if store is not None else _nothing

        def step() -> list[torch.Tensor]:
            with updates.step() if updates is not None else contextlib.nullcontext():
                return _leaves(executor(self._batch()))

        try:
            yield step, executor
        finally:
            self._held = _nothing
            if arena is not None:
                arena.close()
            if store is not None:
                store.close()

    def _open(self, schedule: Schedule) -> SwapStore:
        name = schedule.store
        if name not in self._stores:
            raise ConfigError(f"the plan offloads to the store {name!r}, which was not given; add --store {name}=DIR")
        return open_store(name, self._stores[name], open_slots(self._program, schedule))

    def _hooked(self, step: Step) -> Callable[[OnGradient], list[torch.Tensor]]:
        def hooked(on_gradient: OnGradient) -> list[torch.Tensor]:
            updates = self._program.updates
            if updates is None:
                return step()
            updates.on_gradient = on_gradient
            try:
                return step()
            finally:
                updates.on_gradient = None

        return hooked

    def _results(self, step: Step, last: Callable[[OnGradient], list[torch.Tensor]], tell: OnGradient) -> None:
        """Run the compared steps from the initial state, each on another batch, and tell each result by name."""
        self._restore()
        first = self._workload.batch
        for number in range(STEPS):
            self._workload.batch = pytree.tree_map(partial(_shifted, by=number), first)
            made = step() if number < STEPS - 1 else last(lambda name, gradient: tell(f"gradient.{name}", gradient))
            for index, tensor in enumerate(made):
                tell(f"step {number}.result {index}", tensor)
            del made
        self._workload.batch = first
        for name, tensor in (*self._own_tensors(), *self._state_tensors()):
            tell(name, tensor)

    def _compare(self, step: Step, directory: Path) -> dict[str, Any]:
        reference = Reference(directory)
        errors: dict[str, float] = {}

        def tell(name: str, tensor: torch.Tensor) -> None:
            errors[name] = max(errors.get(name, 0.0), reference.error(name, tensor))

        self._results(step, self._hooked(step), tell)
        missing = reference.names - errors.keys()
        errors |= dict.fromkeys(missing, float("inf"))
        worst = max(errors, key=lambda name: errors[name])
        where = f"{worst} {'was never made' if worst in missing else f'is off by {errors[worst]:.3g}'}"
        return {"max_error": errors[worst], "detail": where if errors[worst] else ""}

    def _warm_up(self, step: Step) -> dict[str, Any]:
        self._restore()
        for _ in range(STEPS):
            _drop(step())
        return {}

    def _peak(self, step: Callable[[], None]) -> dict[str, Any]:
        """Peak over a step once everything is warm."""
        trim()
        with self._meter() as meter:
            step()
        return {"peak_bytes": meter.peak_bytes, "meter": meter.name}

    def _floor_bytes(self) -> int:
        self._forget_gradients()
        trim()
        return self._meter().now_bytes() - self._static_bytes()

    def _arena(self, plan: Any) -> Arena | None:
        return Arena() if plan["allocator"] == "arena" and self._spec.device_kind == "cpu" else None

    def _block(self, step: Step, executor: Executor | None) -> list[tuple[float, float]]:
        """(seconds, stalled seconds) of each measured step of a block."""
        found = []
        for number in range(1 + BLOCK_STEPS):
            self._synchronize()
            start = time.perf_counter()
            made = step()
            self._synchronize()
            if number:
                found.append((time.perf_counter() - start, executor.stall_seconds if executor is not None else 0.0))
            del made
        return found

    def _synchronize(self) -> None:
        if self._nvml is not None:
            torch.cuda.synchronize()


def trim() -> None:
    """Collect garbage and give back what allocators keep."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shifted(leaf: Any, by: int) -> Any:
    """Another batch of the same look: a step that remembers the first one's data shows itself."""
    if not isinstance(leaf, torch.Tensor) or not leaf.ndim or not by:
        return leaf
    return torch.empty_like(leaf).copy_(leaf.roll(by, 0))


def _nothing() -> int:
    return 0


def _leaves(made: Any) -> list[torch.Tensor]:
    return [leaf.detach() for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]


def _drop(made: list[torch.Tensor]) -> None:
    made.clear()


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
