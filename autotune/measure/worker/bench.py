"""Execution of the coordinator's requests: run plain eager steps and plans, and measure results, bytes and seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from autotune.capture.optimizers.loop_updates import LoopUpdates
from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import ConfigError, StoreError
from autotune.ir.check import check
from autotune.ir.plan import Plan
from autotune.ir.schedule import Schedule, lower
from autotune.kernels.region_program import compile_regions, with_kernels
from autotune.measure.limits import limit_data
from autotune.measure.machine_counters import count_page_faults
from autotune.measure.messages import (
    BLOCK_STEPS,
    UNMEASURED_STEPS,
    BatchSize,
    Digests,
    Done,
    GateDescription,
    MemoryPeak,
    PlanCheck,
    RoundingWitness,
    TimedBlock,
    TimingEnd,
    Wiring,
    WorkProgress,
    ignore_progress,
)
from autotune.measure.meters import Meter, Repeated, best_meter
from autotune.measure.spec import Spec
from autotune.measure.survey import WorkloadSurvey
from autotune.measure.worker.compare import (
    COMPARED_STEPS,
    Step,
    compare,
    record_results,
    witness_directory,
    write_bounds,
)
from autotune.measure.worker.eager import (
    EagerWorkload,
    OnGradient,
    detached_tensors,
    exclude_from_collections,
    release_memory,
)
from autotune.measure.worker.gpu_process import GpuProcess
from autotune.measure.worker.planned_cycle import run_planned_cycle
from autotune.measure.worker.reference import Writer, digest
from autotune.records.speed_environment import read_speed_environment
from autotune.runtime import malloc
from autotune.runtime.arena import StepArena
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import SwapStore, measure_stores, open_store
from autotune.runtime.verification.witness import float64, move_weights

_PEAK_READINGS = 3
"""Number of readings of a peak, unless an earlier one is certain."""
_CERTAIN_BYTES = 2**16
"""Uncertainty in bytes below which a reading is certain."""
_DIGEST_STEPS = 4
"""Steps before results are hashed: an arena records two of them and replays two."""


@dataclass
class _Timing:
    """State of a plan, or of plain eager (no plan), that is being timed."""

    plan: Plan | None
    step: Step
    stack: contextlib.ExitStack
    executor: Executor | None = None
    arena: StepArena | None = None
    charged: Repeated = field(default_factory=Repeated)


class Bench:
    """One workload in one process; each public method executes one request of the coordinator."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.report: Callable[[WorkProgress], None] = ignore_progress
        self._store_bytes = _no_bytes
        self._timing: _Timing | None = None
        self._gpu = GpuProcess() if spec.device_kind == "cuda" else None
        self._apply_limit()
        self._eager = EagerWorkload(spec)
        exclude_from_collections()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the workload's tensors on a GPU inside the context only: meanwhile other processes may need all of it."""
        if self._gpu is None:
            yield
            return
        self._gpu.parking.unpark()
        self._gpu.limit(self._spec.limit_bytes)  # the last request may have loaded kernels into the context
        try:
            yield
        finally:
            captured = self.__dict__.get("_program")
            self._gpu.parking.park([*self._eager.static_tensors(), *(captured.tensors.values() if captured else ())])
            release_memory()

    def survey(self) -> WorkloadSurvey:
        """Capture the step, profile its ops, and measure the stores; the floor is this process's idle bytes."""
        from autotune.measure.device.this_device import this_device

        self.report(WorkProgress("capturing the step"))
        program, listen = self._program, lambda done, total: self.report(WorkProgress("profiling ops", done, total))
        op_costs = profile(program, cache=self._spec.profile_cache, listen=listen)
        costs = measure_stores(op_costs, self._spec.stores, self._spec.device_kind)
        environment = read_speed_environment(torch.get_num_threads(), torch.get_num_interop_threads())
        device = replace(this_device(self._spec.device_kind), environment=environment)
        loop = str(self._eager.workload.loop)
        return WorkloadSurvey(self._program.graph, costs, device, self._floor_bytes(), loop)

    def write_eager_results(self, results: Path) -> Done:
        """Run plain eager steps and write their results to a directory."""
        with contextlib.closing(Writer(results)) as writer:
            record_results(self._eager, self._eager.step, writer.add)
        return Done()

    def measure_eager_peak(self, results: Path) -> MemoryPeak:
        """Run plain eager steps, write their results to a directory, and measure peak and floor."""
        self.write_eager_results(results)
        with self._eager.factory_format():
            peak_bytes, meter = self._peak(lambda: self._eager.step().clear())
            return MemoryPeak(peak_bytes, self._floor_bytes(), meter)

    def check_plan(self, plan: Plan, reference: Path | None, tolerance: float) -> PlanCheck:
        """Compare a plan's results with a reference, then measure peak and floor unless the error exceeds the tolerance.

        Where the plan names an arena, the peak is of a step that the arena records. malloc would take a tenth more for
        tensors of a few pages. The size of the arena's layout shows in the charge instead.
        """
        comparison = None
        with self._running(plan) as (step, _):
            if reference is not None:
                comparison = compare(self._eager, step, reference)
                if comparison.max_error > tolerance:
                    return PlanCheck(comparison)
            else:
                self._warm_up(step)
            if (arena := self._arena(plan, replays=False)) is None:
                peak_bytes, meter = self._peak(lambda: step().clear())
        if arena is not None:
            with self._running(plan, arena=arena) as (step, _):
                step().clear()
                peak_bytes, meter = self._peak(lambda: step().clear())
        memory = MemoryPeak(peak_bytes, self._floor_bytes(), meter)
        self._eager.forget()
        return PlanCheck(comparison, memory)

    def write_traced_results(self, results: Path) -> Done:
        """Run the graph as it was traced and write its results to a directory."""
        with (
            contextlib.closing(Writer(results)) as writer,
            self._running(Plan.traced(self._program.graph)) as (step, _),
        ):
            record_results(self._eager, step, writer.add)
        return Done()

    def write_witness(self, reference: Path, witness: RoundingWitness) -> Done:
        """Run plain eager steps as a witness and write their results beside the reference."""
        model, optimizer = self._eager.workload.model, self._eager.workload.optimizer
        double = witness is RoundingWitness.FLOAT64
        moves = (RoundingWitness.MOVED_0, RoundingWitness.MOVED_1)
        begin = (lambda: None) if double else partial(move_weights, model, moves.index(witness))
        with (
            contextlib.closing(Writer(witness_directory(reference, witness))) as writer,
            float64(model, optimizer) if double else contextlib.nullcontext(),
        ):
            record_results(self._eager, self._eager.step, writer.add, begin=begin, double=double)
        return Done()

    def derive_bounds(self, reference: Path, reasons: dict[str, str]) -> GateDescription:
        """Derive each tensor's bound from the witnesses beside the reference; `reasons` explains missing ones."""
        return GateDescription(write_bounds(self._eager, reference, dict(reasons)))

    def batch_size(self) -> BatchSize:
        """Return the first dimension of the batch's first tensor."""
        return BatchSize(next(leaf.shape[0] for leaf in self._eager.batch() if leaf.ndim))

    def wiring(self) -> Wiring:
        """Describe everything of the graph that a plan depends on."""
        graph = self._program.graph
        return Wiring(repr([(op.target, op.inputs, op.outputs, op.layer) for op in graph.ops]))

    def begin_timing(self, plan: Plan | None) -> Done:
        """Make a plan, or without one plain eager, ready to be timed in blocks; lay out its arena."""
        self.stop_timing()
        self._eager.restore()
        stack = contextlib.ExitStack()
        timing = self._timing = _Timing(plan, self._eager.step, stack)
        if plan is None:
            stack.enter_context(self._eager.factory_format())
        else:
            timing.arena = self._arena(plan)
            timing.step, timing.executor = stack.enter_context(self._running(plan, arena=timing.arena))
        if timing.arena is not None:
            release_memory()
            with self._meter(charged=True) as meter:
                _lay_out(timing.step)
            timing.charged.add(meter, same=False)
        return Done()

    def time_block(self, *, counts: bool) -> TimedBlock:
        """Time a few steps of the begun plan; between blocks another process may run."""
        assert self._timing is not None
        timing, executor = self._timing, self._timing.executor
        release_memory()
        with self._meter(charged=True) as meter:
            steps = self._time_steps(timing.step, executor)
        if counts:
            timing.charged.add(meter)
        # it holds no more memory than it must while other processes run; the next block's first step is not timed
        self._eager.drop_gradients()
        if timing.arena is not None:
            timing.arena.release()
        release_memory()
        return TimedBlock(
            seconds=tuple(seconds for seconds, _, _ in steps),
            stalls=tuple(stall for _, stall, _ in steps),
            page_faults=tuple(faults for _, _, faults in steps),
            transfer_bytes=executor.transfer_bytes if executor is not None else 0,
            lanes=executor.transfer_trace
            if executor is not None and timing.plan is not None and timing.plan.store
            else None,
            charged_bytes=timing.charged.peak_bytes if counts else meter.peak_bytes,
            meter=meter.name,
        )

    def finish_timing(self, *, verify: bool) -> TimingEnd:
        """End the timing, measure the floor, and with `verify` compare steps in an arena with the same on malloc."""
        assert self._timing is not None
        timing = self._timing
        timing.stack.close()
        floor_bytes = self._floor_bytes()
        self.stop_timing()
        if verify and timing.arena is not None:
            assert timing.plan is not None
            if mismatch := self._arena_mismatch(timing.plan):
                return TimingEnd(floor_bytes, mismatch)
        self._eager.forget()
        return TimingEnd(floor_bytes)

    def digests(self, plan: Plan) -> Digests:
        """Hash what a few steps from the initial state leave, with the allocator that the plan names."""
        digests = self._digests(plan, self._arena(plan))
        self._eager.forget()
        return Digests(digests)

    def stop_timing(self) -> Done:
        """End the timing if it was begun."""
        if self._timing is not None:
            self._timing.stack.close()
        self._timing = None
        self._eager.forget()
        return Done()

    def _arena_mismatch(self, plan: Plan) -> str:
        """Return the name of a result that differs between arena and malloc after four steps; empty if none does."""
        in_arena = self._digests(plan, StepArena())
        with malloc.eager_release():  # a limit that the arena keeps must not be exceeded by memory that malloc retains
            on_malloc = self._digests(plan, None)
        return next((name for name in in_arena if in_arena[name] != on_malloc.get(name)), "")

    def _digests(self, plan: Plan, arena: StepArena | None) -> dict[str, str]:
        with self._running(plan, arena=arena) as (step, _):
            self._eager.restore()
            outputs: list[torch.Tensor] = []
            for _ in range(_DIGEST_STEPS):
                outputs = step()
            results = ((f"result {index}", tensor) for index, tensor in enumerate(outputs))
            return {name: digest(tensor) for name, tensor in (*results, *self._eager.named_tensors())}

    @cached_property
    def _program(self) -> Program:
        program = with_kernels(capture(self._eager.workload, self._spec.workload.reference), self._spec.kernels)
        compile_regions(program, lambda done, total: self.report(WorkProgress("compiling regions", done, total)))
        exclude_from_collections()
        return program

    def _apply_limit(self) -> None:
        if self._gpu is not None:
            self._gpu.limit(self._spec.limit_bytes)
        elif self._spec.limit_bytes is not None:
            limit_data(self._spec.limit_bytes, self._meter().now_bytes())

    def _meter(self, *, charged: bool = False) -> Meter:
        return self._gpu.meter(charged=charged) if self._gpu else best_meter(self._spec.device_kind, self._store_bytes)

    @contextlib.contextmanager
    def _running(self, plan: Plan, *, arena: StepArena | None = None) -> Iterator[tuple[Step, Executor]]:
        """Make a plan ready to step, with its store open; on malloc unless an arena is passed."""
        graph = self._program.graph
        self._spec.refuse_other_capture(plan)
        check(graph, plan)
        schedule = lower(graph, plan)
        store = self._open(schedule) if schedule.store else None
        executor = Executor(self._program, schedule, store, arena=arena)
        updates = self._program.updates
        self._store_bytes = store.held_bytes if store is not None else _no_bytes

        def step(on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
            if isinstance(updates, LoopUpdates):
                return run_planned_cycle(self._eager, executor, updates, on_gradient)
            if updates is not None:
                updates.on_gradient = on_gradient
            with updates.step() if updates is not None else contextlib.nullcontext():
                results, gradients = executor.run(executor.inputs(self._eager.batch()))
            outputs = detached_tensors(results)
            if on_gradient is not None:
                for parameter, gradient in zip(self._program.gradients, gradients, strict=True):
                    on_gradient(graph.values[parameter].name, gradient)
            if (
                executor.problem
            ):  # the results are right, but the step did not run as planned, so its bytes are not the plan's
                raise StoreError(executor.problem)
            return outputs

        try:
            yield step, executor
        finally:
            self._store_bytes = _no_bytes
            if arena is not None:
                arena.close()
            if store is not None:
                store.close()

    def _open(self, schedule: Schedule) -> SwapStore:
        name = schedule.store
        if name not in self._spec.stores:
            raise ConfigError(f"the plan offloads to the store {name!r}, which was not given; add --store {name}=DIR")
        return open_store(name, self._spec.stores[name], slot_sizes(self._program, schedule))

    def _warm_up(self, step: Step) -> None:
        self._eager.restore()
        for _ in range(COMPARED_STEPS):
            step().clear()

    def _peak(self, step: Callable[[], None]) -> tuple[int, str]:
        """Measure the peak bytes of a step that is warm; return the meter's name, too."""
        repeated = Repeated()
        for _ in range(_PEAK_READINGS):
            release_memory()
            with self._meter() as meter:
                step()
            repeated.add(meter)
            if meter.unsure_bytes <= _CERTAIN_BYTES:
                break
        return repeated.peak_bytes, meter.name

    def _floor_bytes(self) -> int:
        self._eager.drop_gradients()
        release_memory()
        return self._meter().now_bytes() - self._eager.static_bytes()

    def _arena(self, plan: Plan, *, replays: bool = True) -> StepArena | None:
        return StepArena(replays) if plan.allocator == "arena" and self._spec.device_kind == "cpu" else None

    def _time_steps(self, step: Step, executor: Executor | None) -> list[tuple[float, float, int]]:
        """Return (seconds, stalled seconds, minor page faults) of each measured step of a block."""
        steps, share = [], self._eager.workload.loop.accumulate
        for number in range(UNMEASURED_STEPS + BLOCK_STEPS):
            self._synchronize()
            faults, start = count_page_faults(), time.perf_counter()
            outputs = step()
            self._synchronize()
            seconds, faults = (time.perf_counter() - start) / share, (count_page_faults() - faults) // share
            if number >= UNMEASURED_STEPS:
                steps.append((seconds, executor.stall_seconds if executor is not None else 0.0, faults))
            del outputs
        return steps

    def _synchronize(self) -> None:
        if self._gpu is not None:
            torch.cuda.synchronize()


def _no_bytes() -> int:
    return 0


def _lay_out(step: Step) -> None:
    """Run three steps: an arena records a plan's first two and replays from the third on."""
    for _ in range(3):
        step().clear()
