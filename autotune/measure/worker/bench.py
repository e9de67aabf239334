"""What a child does: runs plain eager steps and plans, and looks at their results, bytes and seconds."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import ConfigError, PlanError, StoreError
from autotune.ir.check import check
from autotune.ir.plan import Plan
from autotune.ir.schedule import Schedule, lower
from autotune.measure.limits import limit_data, limit_fraction
from autotune.measure.messages import FLOAT64, MOVED, Spec
from autotune.measure.meters import Meter, Repeated, best_meter
from autotune.measure.meters.cuda import CudaMeter
from autotune.measure.meters.nvml import NvmlMeter
from autotune.measure.worker.compare import (
    STEPS,
    HookedStep,
    Step,
    compare,
    tell_results,
    witness_directory,
    write_bounds,
)
from autotune.measure.worker.eager import Eager, OnGradient, tensors_of, trim
from autotune.measure.worker.reference import Writer, digest
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Outcome
from autotune.runtime import malloc
from autotune.runtime.arena import Arena
from autotune.runtime.executor import Executor
from autotune.runtime.offload_slots import open_slots
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import SwapStore, measured, open_store
from autotune.runtime.verification.witness import float64, move_weights

UNMEASURED_STEPS, BLOCK_STEPS = 2, 2
"""Steps in a row, of which the first are not measured: while others had their turn the process gave its memory back, and
plain eager's second step is still up to a fifth slower than those that follow."""
_TRIES, _SURE_BYTES = 3, 2**16
"""Readings of a peak, where none is sure to so many bytes."""


@dataclass
class _Timed:
    """What is being timed."""

    plan: Any
    step: Step
    stack: contextlib.ExitStack
    executor: Executor | None = None
    arena: Arena | None = None
    charged: Repeated = field(default_factory=Repeated)


class Bench:
    """One workload in one process, and everything that can be asked of it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._stores = {name: Path(directory) for name, directory in spec.stores.items()}
        self._held = _nothing
        self._timed: _Timed | None = None
        self._nvml = NvmlMeter() if spec.device_kind == "cuda" else None
        self._limit()
        self._own = Eager(spec)

    # What can be asked: each takes and gives what JSON can carry.

    def prepare(self) -> dict[str, Any]:
        """Capture, profile and probe. The floor is this process's own, without the tensors."""
        from autotune.measure.device.this_device import this_device

        cache = Path(self._spec.profile_cache) if self._spec.profile_cache else None
        costs = measured(profile(self._program, cache=cache), self._stores, self._spec.device_kind)
        return {
            "graph": to_json(self._program.graph),
            "costs": to_json(costs),
            "device": to_json(this_device(self._spec.device_kind)),
            "floor_bytes": self._floor_bytes(),
        }

    def baseline_bytes(self, reference: str) -> dict[str, Any]:
        """Run plain eager steps, keep their results in the directory `reference`, and tell peak and floor."""
        with contextlib.closing(Writer(Path(reference))) as writer:
            tell_results(self._own, self._own.step, writer.add)
        with self._own.users_own():
            return self._peak(lambda: _drop(self._own.step())) | {"floor_bytes": self._floor_bytes()}

    def plan_bytes(self, plan: Any, reference: str, tolerance: float) -> dict[str, Any]:
        """Compare a plan's results with `reference` (empty: compare nothing), then tell peak and floor.

        Where the plan names an arena, the peak is of a step that the arena records: malloc would take a tenth more
        for tensors of a few pages, and what its layout takes is the arena's doing, which the charge tells.
        """
        with self._running(plan) as (step, _):
            compared = compare(self._own, self._hooked(step), Path(reference)) if reference else self._warm_up(step)
            if compared.get("max_error", 0.0) > tolerance:
                return compared | {"outcome": Outcome.WRONG_RESULT}
            if (arena := self._arena(plan, replays=False)) is None:
                seen = self._peak(lambda: _drop(step()))
        if arena is not None:
            with self._running(plan, arena=arena) as (step, _):
                _drop(step())
                seen = self._peak(lambda: _drop(step()))
        seen |= {"floor_bytes": self._floor_bytes()}
        self._own.forget()
        return compared | seen

    def trace(self, reference: str) -> dict[str, Any]:
        """Keep the results of the graph as it was traced in the directory `reference`."""
        with (
            contextlib.closing(Writer(Path(reference))) as writer,
            self._running(to_json(Plan.traced(self._program.graph))) as (step, _),
        ):
            tell_results(self._own, self._hooked(step), writer.add)
        return {}

    def witness(self, reference: str, name: str) -> dict[str, Any]:
        """Run plain eager steps as the witness of this name, and keep their results beside the directory `reference`."""
        model, optimizer = self._own.workload.model, self._own.workload.optimizer
        double = name == FLOAT64
        begin = _nothing if double else partial(move_weights, model, MOVED.index(name))
        with (
            contextlib.closing(Writer(witness_directory(Path(reference), name))) as writer,
            float64(model, optimizer) if double else contextlib.nullcontext(),
        ):
            tell_results(self._own, self._own.step, writer.add, begin=begin, double=double)
        return {}

    def bounds(self, reference: str, reasons: dict[str, str]) -> dict[str, Any]:
        """Derive each tensor's bound from the witnesses beside the directory `reference`; `reasons` names missing ones."""
        return {"how": write_bounds(self._own, Path(reference), reasons)}

    def batch_size(self) -> dict[str, Any]:
        """First dimension of the batch's first tensor."""
        return {"batch": next(leaf.shape[0] for leaf in self._own.batch() if leaf.ndim)}

    def wiring(self) -> dict[str, Any]:
        """What a plan depends on: the same for two batch sizes unless the model looks at them."""
        graph = self._program.graph
        return {"wiring": repr([(op.target, op.inputs, op.outputs, op.layer) for op in graph.ops])}

    def begin(self, plan: Any) -> dict[str, Any]:
        """Get a plan, or without one plain eager, ready to be timed in blocks; an arena is laid out."""
        self.stop()
        self._own.restore()
        stack = contextlib.ExitStack()
        timed = self._timed = _Timed(plan, self._own.step, stack)
        if plan is None:
            stack.enter_context(self._own.users_own())
        else:
            timed.arena = self._arena(plan)
            timed.step, timed.executor = stack.enter_context(self._running(plan, arena=timed.arena))
        if timed.arena is not None:
            trim()
            with self._meter(charged=True) as meter:
                _lay_out(timed.step)
            timed.charged.add(meter, same=False)
        return {}

    def block(self, counts: bool = True) -> dict[str, Any]:
        """Time a few steps of what was begun; between blocks another process may have its turn.

        `charged_bytes` is of all blocks so far that count; one does not whose charge holds a compiler's, of this one alone.
        """
        assert self._timed is not None
        timed = self._timed
        trim()
        with self._meter(charged=True) as meter:
            block = self._block(timed.step, timed.executor)
        if counts:
            timed.charged.add(meter)
        # while others have their turn it takes no more than it must; the next block's first step is not timed
        self._own.forget_gradients()
        if timed.arena is not None:
            timed.arena.rest()
        trim()
        return {
            "seconds": [seconds for seconds, _, _ in block],
            "stalls": [stalled for _, stalled, _ in block],
            "page_faults": [faults for _, _, faults in block],
            "transfer_bytes": timed.executor.transfer_bytes if timed.executor is not None else 0,
            "lanes": to_json(timed.executor.lanes) if timed.executor is not None and timed.plan["store"] else None,
            "charged_bytes": timed.charged.peak_bytes if counts else meter.peak_bytes,
            "meter": meter.name,
        }

    def finish(self, verify: bool = True) -> dict[str, Any]:
        """The floor of what was begun, which ends. Steps in an arena are compared with the same on malloc, if asked to."""
        assert self._timed is not None
        timed = self._timed
        timed.stack.close()
        floor = self._floor_bytes()
        self.stop()
        if verify and timed.arena is not None and (differs := self._arena_changes(timed.plan)):
            return {"outcome": Outcome.WRONG_RESULT, "detail": f"{differs} differs between arena and malloc"}
        self._own.forget()
        return {"floor_bytes": floor}

    def digests(self, plan: Any) -> dict[str, Any]:
        """Hashes by name of what a few steps from the start leave behind, with the allocator that the plan names."""
        found = self._digests(plan, self._arena(plan))
        self._own.forget()
        return {"digests": found}

    def stop(self) -> dict[str, Any]:
        """End what was begun, if anything was."""
        if self._timed is not None:
            self._timed.stack.close()
        self._timed = None
        self._own.forget()
        return {}

    # How.

    def _arena_changes(self, plan: Any) -> str:
        """Name of something that four steps leave different in an arena than on malloc; empty if nothing is."""
        in_arena = self._digests(plan, Arena())
        with malloc.returning():  # a limit that the arena keeps must not be broken by what malloc would hold
            on_malloc = self._digests(plan, None)
        return next((name for name in in_arena if in_arena[name] != on_malloc.get(name)), "")

    def _digests(self, plan: Any, arena: Arena | None) -> dict[str, str]:
        with self._running(plan, arena=arena) as (step, _):
            self._own.restore()
            made: list[torch.Tensor] = []
            for _ in range(4):  # in an arena: recorded twice, and replayed twice
                made = step()
            results = ((f"result {index}", tensor) for index, tensor in enumerate(made))
            return {name: digest(tensor) for name, tensor in (*results, *self._own.named_tensors())}

    @cached_property
    def _program(self) -> Program:
        return capture(self._own.workload, self._spec.reference)

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
                made = tensors_of(executor(self._own.batch()))
            if executor.problem:  # the step went right, but not as planned: its bytes say nothing of the plan
                raise StoreError(executor.problem)
            return made

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

    def _hooked(self, step: Step) -> HookedStep:
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

    def _warm_up(self, step: Step) -> dict[str, Any]:
        self._own.restore()
        for _ in range(STEPS):
            _drop(step())
        return {}

    def _peak(self, step: Callable[[], None]) -> dict[str, Any]:
        """Peak over a step once everything is warm."""
        seen = Repeated()
        for _ in range(_TRIES):
            trim()
            with self._meter() as meter:
                step()
            seen.add(meter)
            if meter.unsure_bytes <= _SURE_BYTES:
                break
        return {"peak_bytes": seen.peak_bytes, "meter": meter.name}

    def _floor_bytes(self) -> int:
        self._own.forget_gradients()
        trim()
        return self._meter().now_bytes() - self._own.static_bytes()

    def _arena(self, plan: Any, *, replays: bool = True) -> Arena | None:
        return Arena(replays) if plan["allocator"] == "arena" and self._spec.device_kind == "cpu" else None

    def _block(self, step: Step, executor: Executor | None) -> list[tuple[float, float, int]]:
        """(seconds, stalled seconds, minor page faults) of each measured step of a block."""
        found = []
        for number in range(UNMEASURED_STEPS + BLOCK_STEPS):
            self._synchronize()
            faults, start = _page_faults(), time.perf_counter()
            made = step()
            self._synchronize()
            seconds, faults = time.perf_counter() - start, _page_faults() - faults
            if number >= UNMEASURED_STEPS:
                found.append((seconds, executor.stall_seconds if executor is not None else 0.0, faults))
            del made
        return found

    def _synchronize(self) -> None:
        if self._nvml is not None:
            torch.cuda.synchronize()


def _nothing() -> int:
    return 0


def _page_faults() -> int:
    """Of this process so far, without those that a disk had to answer."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _lay_out(step: Step) -> None:
    """An arena records a plan's first two steps, and replays from the third on."""
    for _ in range(3):
        _drop(step())


def _drop(made: list[torch.Tensor]) -> None:
    made.clear()
