"""Execution of the coordinator's requests: run plain eager steps and plans, and measure results, bytes and seconds."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autotune.ir.plan import Plan
from autotune.measure.limits import limit_data, start_threads
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
    RegionComparison,
    RoundingWitness,
    TimedBlock,
    TimingBegin,
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
    write_bounds,
    write_witness,
)
from autotune.measure.worker.eager import EagerWorkload, exclude_from_collections, release_memory
from autotune.measure.worker.gpu_process import GpuProcess
from autotune.measure.worker.planned_steps import PlannedSteps
from autotune.measure.worker.reference import Writer, digest
from autotune.records.speed_environment import read_speed_environment
from autotune.runtime import malloc
from autotune.runtime.arena import StepArena
from autotune.runtime.executor import Executor
from autotune.runtime.op_profiler import profile
from autotune.runtime.stores import measure_stores

_PEAK_READINGS = 3
"""Number of readings of a peak, unless an earlier one is certain."""
_CERTAIN_BYTES = 2**16
"""Uncertainty in bytes below which a reading is certain."""
LAYOUT_STEPS = 3
"""Steps of an arena until it replays: two are recorded, the third is the first replay."""
HASHED_STEPS = 4
"""Steps from the initial state until results are hashed: an arena records two of them and replays two."""


@dataclass
class _Timing:
    """State of a plan, or of plain eager (no plan), that is being timed."""

    plan: Plan | None
    step: Step
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    executor: Executor | None = None
    arena: StepArena | None = None
    charged: Repeated = field(default_factory=Repeated)
    steps: int = 0
    """Number of steps since the initial state."""
    is_rested: bool = True
    """True if the process returned its memory after the last step."""
    unmeasured: int = UNMEASURED_STEPS
    """Number of steps that the next block runs before it measures."""
    rests: bool = True  # the process returns its memory while others run


class Bench:
    """One workload in one process; each public method executes one request of the coordinator."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.report: Callable[[WorkProgress], None] = ignore_progress
        self._timing: _Timing | None = None
        if spec.device_kind != "cuda" and spec.limit_bytes is not None:
            start_threads(spec.threads)
            limit_data(spec.limit_bytes, best_meter(spec.device_kind).now_bytes())
        self._eager = EagerWorkload(spec)
        # after the workload, which may choose one of several GPUs; each request limits the process first
        self._gpu = GpuProcess() if spec.device_kind == "cuda" else None
        self._plans = PlannedSteps(spec, self._eager, self._send_progress)
        exclude_from_collections()

    @contextlib.contextmanager
    def awake(self, *, parks: bool = True) -> Iterator[None]:
        """Hold the workload's tensors on a GPU inside the context; afterwards, too, unless it `parks` them on the host.

        Meanwhile other processes may need all of the GPU.
        """
        if self._gpu is None:
            yield
            return
        self._gpu.parking.unpark()
        self._gpu.limit(self._spec.limit_bytes)  # the last request may have loaded kernels into the context
        try:
            yield
        finally:
            if parks:
                self._gpu.parking.park([*self._eager.static_tensors(), *self._plans.captured_tensors()])
                release_memory()

    def survey(self) -> WorkloadSurvey:
        """Capture the step, profile its ops, and measure the stores; the floor is this process's idle bytes."""
        from autotune.measure.device.this_device import this_device

        self.report(WorkProgress("capturing the step"))
        program, listen = (
            self._plans.program,
            lambda done, total: self.report(WorkProgress("profiling ops", done, total)),
        )
        op_costs = profile(program, cache=self._spec.profile_cache, listen=listen)
        costs = measure_stores(op_costs, self._spec.stores, self._spec.device_kind)
        environment = read_speed_environment(self._eager.own_threads, torch.get_num_interop_threads())
        device = replace(this_device(self._spec.device_kind), environment=environment)
        loop = str(self._eager.workload.loop)
        floor_bytes = self._floor_bytes()
        return WorkloadSurvey(self._plans.program.graph, costs, device, floor_bytes, loop, self._free_bytes())

    def write_eager_results(self, results: Path) -> Done:
        """Run plain eager steps and write their results to a directory."""
        with contextlib.closing(Writer(results)) as writer:
            record_results(self._eager, self._eager.step, writer.add)
        return Done()

    def measure_eager_peak(self, results: Path) -> MemoryPeak:
        """Run plain eager steps, write their results to a directory, and measure peak and floor."""
        self.write_eager_results(results)
        with self._eager.factory_settings():
            peak_bytes, meter = self._peak(lambda: _drop(self._eager.step()))
            return MemoryPeak(peak_bytes, self._floor_bytes(), meter, self._free_bytes())

    def check_plan(self, plan: Plan, reference: Path | None, tolerance: float) -> PlanCheck:
        """Compare a plan's results with a reference, then measure peak and floor unless the error exceeds the tolerance.

        Where the plan names an arena, the peak is of a step that the arena records. malloc would take a tenth more for
        tensors of a few pages. The size of the arena's layout shows in the charge instead.
        """
        comparison = None
        with self._plans.running(plan) as (step, _):
            if reference is not None:
                comparison = compare(self._eager, step, reference)
                if comparison.max_error > tolerance:
                    return PlanCheck(comparison)
            else:
                self._warm_up(step)
            if (arena := self._plans.arena(plan, replays=False)) is None:
                peak_bytes, meter = self._peak(lambda: _drop(step()))
        if arena is not None:
            with self._plans.running(plan, arena=arena) as (step, _):
                _drop(step())
                peak_bytes, meter = self._peak(lambda: _drop(step()))
        memory = MemoryPeak(peak_bytes, self._floor_bytes(), meter)
        self._eager.forget()
        return PlanCheck(comparison, memory)

    def write_traced_results(self, results: Path) -> Done:
        """Run the graph as it was traced and write its results to a directory."""
        with (
            contextlib.closing(Writer(results)) as writer,
            self._plans.running(Plan.traced(self._plans.program.graph)) as (step, _),
        ):
            record_results(self._eager, step, writer.add)
        return Done()

    def compare_regions(self, plan: Plan, reference: Path, traced: Path | None) -> RegionComparison:
        """Compare the step whose regions run one by one with eager, and each compiled region with float64."""
        return self._plans.compare_regions(plan, reference, traced)

    def write_witness(self, reference: Path, witness: RoundingWitness) -> Done:
        """Run plain eager steps as a witness, and write beside the reference how far they are from it."""
        write_witness(self._eager, reference, witness)
        return Done()

    def derive_bounds(self, reference: Path, reasons: dict[str, str]) -> GateDescription:
        """Derive each tensor's bound from the witnesses beside the reference; `reasons` explains missing ones."""
        return GateDescription(write_bounds(self._eager, reference, dict(reasons)))

    def batch_size(self) -> BatchSize:
        """Return the first dimension of the batch's first tensor."""
        return BatchSize(next(leaf.shape[0] for leaf in self._eager.batch() if leaf.ndim))

    def wiring(self) -> Wiring:
        """Describe everything of the graph that a plan depends on."""
        graph = self._plans.program.graph
        return Wiring(repr([(op.target, op.inputs, op.outputs, op.layer) for op in graph.ops]))

    def compile(self) -> Done:
        """Compile the regions of the captured step, and those that write over an input in a plan in traced order."""
        self._plans.compile_variants()
        return Done()

    def begin_timing(self, plan: Plan | None, *, rests: bool = True) -> TimingBegin:
        """Make a plan, or without one plain eager, ready to be timed in blocks; lay out its arena."""
        timing = self._timing
        if plan is None and timing is not None and timing.plan is None and not timing.is_rested:
            self._eager.restore(releases=False)  # eager's heap stays as a training loop's would
            timing.unmeasured = 1
            return TimingBegin()
        self.stop_timing()
        self._eager.restore()
        if self._gpu is None and self._spec.limit_bytes is not None:  # addresses of earlier arenas take no room
            limit_data(self._spec.limit_bytes, self._meter().now_bytes())
        floor_bytes = 0 if plan is None else self._floor_bytes()
        timing = self._timing = _Timing(plan, self._eager.step, rests=rests)
        if plan is None:
            timing.stack.enter_context(self._eager.factory_settings())
        else:
            timing.arena = self._plans.arena(plan)
            timing.step, timing.executor = timing.stack.enter_context(self._plans.running(plan, arena=timing.arena))
        if timing.arena is not None:
            release_memory()
            with self._meter(charged=True) as meter:
                _lay_out(timing.step)
            timing.charged.add(meter, same=False)
            timing.steps = LAYOUT_STEPS
            if rests:
                self._rest()
        return TimingBegin(floor_bytes)

    def hash_timed(self) -> Digests:
        """Run the begun plan to its fourth step, on another batch, and hash what that step computes and leaves."""
        assert self._timing is not None
        timing = self._timing
        digests = self._hash_steps(timing.step, done=timing.steps)
        timing.steps, timing.is_rested = HASHED_STEPS, False
        # malloc returns its memory below, an arena with a layout does not
        timing.unmeasured = 0 if timing.arena is not None and timing.arena.bytes else UNMEASURED_STEPS
        self._eager.drop_gradients()
        release_memory()
        if timing.rests:
            self._rest()
        return Digests(digests)

    def time_block(self, *, counts: bool, rests: bool) -> TimedBlock:
        """Time a few steps of the begun plan; between blocks another process may run."""
        assert self._timing is not None
        timing, executor = self._timing, self._timing.executor
        if timing.is_rested:
            release_memory()
        with self._meter(charged=True) as meter:
            steps = self._time_steps(timing.step, executor, timing.unmeasured, BLOCK_STEPS if rests else 1)
        if counts:
            timing.charged.add(meter)
        timing.is_rested, timing.unmeasured = False, 0
        if rests:
            self._rest()
        return TimedBlock(
            seconds=tuple(seconds for seconds, _, _ in steps),
            stalls=tuple(stall for _, stall, _ in steps),
            page_faults=tuple(faults for _, _, faults in steps),
            transfer_bytes=executor.transfer_bytes if executor is not None else 0,
            lanes=executor.transfer_trace if executor is not None and timing.plan and timing.plan.store else None,
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
        if verify and timing.arena and timing.plan and (mismatch := self._arena_mismatch(timing.plan)):
            return TimingEnd(floor_bytes, mismatch)
        self._eager.forget()
        return TimingEnd(floor_bytes)

    def digests(self, plan: Plan) -> Digests:
        """Hash what a few steps from the initial state leave, with the allocator that the plan names."""
        digests = self._digests(plan, self._plans.arena(plan))
        self._eager.forget()
        return Digests(digests)

    def stop_timing(self) -> Done:
        """End the timing if it was begun."""
        if self._timing is not None:
            self._timing.stack.close()
        self._timing = None
        self._eager.forget()
        return Done()

    def _send_progress(self, progress: WorkProgress) -> None:
        self.report(progress)  # it is set later

    def _rest(self) -> None:
        """Hold no more memory than needed while other processes run; the first steps of the next block are not timed."""
        assert self._timing is not None
        self._eager.drop_gradients()
        if self._timing.arena is not None:
            self._timing.arena.release()
        release_memory()
        self._timing.is_rested, self._timing.unmeasured = True, UNMEASURED_STEPS

    def _arena_mismatch(self, plan: Plan) -> str:
        """Return the name of a result that differs between arena and malloc after four steps; empty if none does."""
        in_arena = self._digests(plan, self._plans.arena(plan))
        with malloc.eager_release():  # a limit that the arena keeps must not be exceeded by memory that malloc retains
            on_malloc = self._digests(plan, None)
        return next((name for name in in_arena if in_arena[name] != on_malloc.get(name)), "")

    def _digests(self, plan: Plan, arena: StepArena | None) -> dict[str, str]:
        with self._plans.running(plan, arena=arena) as (step, _):
            self._eager.restore()
            return self._hash_steps(step)

    def _hash_steps(self, step: Step, done: int = 0) -> dict[str, str]:
        """Run the steps that are left of `HASHED_STEPS`, and hash gradients and results of the last, and the state after it.

        The last step has another batch, so that one which remembers the first one's data is detected.
        """
        for _ in range(done, HASHED_STEPS - 1):
            _drop(step())
        digests: dict[str, str] = {}

        def add(name: str, tensor: torch.Tensor) -> None:
            digests[name] = digest(tensor)

        with self._eager.other_batch(1):
            outputs = step(lambda name, gradient: add(f"gradient {name}", gradient))
        for index, tensor in enumerate(outputs):
            add(f"result {index}", tensor)
        del outputs
        for name, tensor in self._eager.named_tensors():
            add(name, tensor)
        return digests

    def _meter(self, *, charged: bool = False) -> Meter:
        if self._gpu is not None:
            return self._gpu.meter(charged=charged)
        return best_meter(self._spec.device_kind, self._plans.store_bytes)

    def _warm_up(self, step: Step) -> None:
        self._eager.restore()
        for _ in range(COMPARED_STEPS):
            _drop(step())

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

    def _free_bytes(self) -> int | None:
        return None if self._gpu is None else self._gpu.free_bytes()

    def _time_steps(
        self, step: Step, executor: Executor | None, unmeasured: int, count: int
    ) -> list[tuple[float, float, int]]:
        """Return (seconds, stalled seconds, minor page faults) of each measured step of a block."""
        steps, share = [], self._eager.workload.loop.accumulate
        for number in range(unmeasured + count):
            self._synchronize()
            faults, start = count_page_faults(), time.perf_counter()
            outputs = step()
            self._synchronize()
            seconds, faults = (time.perf_counter() - start) / share, (count_page_faults() - faults) // share
            if number >= unmeasured:
                steps.append((seconds, executor.stall_seconds if executor is not None else 0.0, faults))
            del outputs
        return steps

    def _synchronize(self) -> None:
        if self._gpu is not None:
            torch.cuda.synchronize()


def _lay_out(step: Step) -> None:
    for _ in range(LAYOUT_STEPS):
        _drop(step())


def _drop(outputs: list[torch.Tensor]) -> None:
    outputs.clear()
