"""Steps of the workload under a plan, with the plan's store open."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from autotune.capture.optimizers.loop_updates import LoopUpdates
from autotune.capture.program import Program
from autotune.capture.tracer import capture
from autotune.errors import ConfigError, StoreError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.plan import Plan
from autotune.ir.schedule import Schedule, lower
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import compile_regions, load_variants, overwrite, with_kernels
from autotune.measure.messages import Comparison, RegionComparison, WorkProgress
from autotune.measure.spec import Spec
from autotune.measure.worker.compare import Step, compare, record_results
from autotune.measure.worker.eager import EagerWorkload, OnGradient, detached_tensors, exclude_from_collections
from autotune.measure.worker.planned_cycle import run_planned_cycle
from autotune.planners.inplace.greedy import GreedyInPlace
from autotune.runtime.arena import SharedBlock, StepArena
from autotune.runtime.executor import Executor
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.stores import SwapStore, open_store
from autotune.runtime.verification.region_gate import RegionGate, one_by_one


class PlannedSteps:
    """The captured step of a workload in this process; `running` makes a plan of it ready to step."""

    def __init__(self, spec: Spec, eager: EagerWorkload, report: Callable[[WorkProgress], None]) -> None:
        self._spec, self._eager, self._report = spec, eager, report
        self._store: SwapStore | None = None
        self._block = SharedBlock()

    @cached_property
    def program(self) -> Program:
        """The captured step."""
        captured = capture(self._eager.workload, self._spec.workload.reference)
        program = with_kernels(captured, self._spec.kernels, self._spec.rebuild_price)
        compile_regions(program, lambda done, total: self._report(WorkProgress("compiling regions", done, total)))
        exclude_from_collections()
        return program

    def compile_variants(self) -> None:
        """Compile the regions that write over an input in a plan in traced order, beside those of the captured step."""
        graph = self.program.graph
        plan = GreedyInPlace().plan(graph, Plan.traced(graph), 0, Costs.unit(graph))
        reuses = [(self.program.calls[plan.order[reuse.position]], reuse.value) for reuse in plan.inplace]
        load_variants(
            [overwrite(call, value).target for call, value in reuses if isinstance(call.target, CompiledRegion)],
            lambda done, total: self._report(WorkProgress("compiling regions that reuse memory", done, total)),
        )

    def compare_regions(self, plan: Plan, reference: Path, traced: Path | None) -> RegionComparison:
        """Compare the step whose regions run one by one with eager, and each compiled region with float64."""
        with self.running(plan, program=one_by_one(self.program)) as (step, _):
            whole = compare(self._eager, step, reference)
        gate, differs = RegionGate(), ""
        with self.running(plan, program=gate.watch(self.program)) as (step, _):
            if traced is not None:
                differs = compare(self._eager, step, traced).detail
            else:
                record_results(self._eager, step, lambda *_: None)
        return RegionComparison(whole, Comparison(gate.max_share, gate.detail), differs)

    def captured_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the captured step reads from outside; none before the capture."""
        captured: Program | None = self.__dict__.get("program")
        return list(captured.tensors.values()) if captured is not None else []

    def store_bytes(self) -> int:
        """Return the bytes that the open store holds in memory; 0 without one."""
        store = self._store  # a meter's thread reads it while a step ends
        return store.held_bytes() if store is not None else 0

    def arena(self, plan: Plan, *, replays: bool = True) -> StepArena | None:
        """Return a new arena where the plan names one and the device has arenas; only one may be in use.

        A block stays mapped until the process ends, so one serves all plans. A step that offloads releases pages one by
        one, for which the block must be its own.
        """
        if plan.allocator != "arena" or self._spec.device_kind != "cpu":
            return None
        return StepArena(replays, block=SharedBlock() if plan.offload else self._block)

    @contextlib.contextmanager
    def running(
        self, plan: Plan, *, arena: StepArena | None = None, program: Program | None = None
    ) -> Iterator[tuple[Step, Executor]]:
        """Make a plan ready to step, with its store open; on malloc unless an arena is passed.

        `program` is the captured step with other callables behind its ops.
        """
        graph = self.program.graph
        self._spec.refuse_other_capture(plan)
        check(graph, plan)
        schedule = lower(graph, plan)
        store = self._store = self._open(schedule) if schedule.store else None
        executor = Executor(program or self.program, schedule, store, arena=arena, threads=plan.threads)
        updates = self.program.updates

        def step(on_gradient: OnGradient | None = None) -> list[torch.Tensor]:
            if isinstance(updates, LoopUpdates):
                return run_planned_cycle(self._eager, executor, updates, on_gradient)
            if updates is not None:
                updates.on_gradient = on_gradient
            with updates.step() if updates is not None else contextlib.nullcontext():
                results, gradients = executor.run(executor.inputs(self._eager.batch()))
            outputs = detached_tensors(results)
            if on_gradient is not None:
                for parameter, gradient in zip(self.program.gradients, gradients, strict=True):
                    on_gradient(graph.values[parameter].name, gradient)
            if (
                executor.problem
            ):  # the results are right, but the step did not run as planned, so its bytes are not the plan's
                raise StoreError(executor.problem)
            return outputs

        try:
            yield step, executor
        finally:
            self._store = None
            if arena is not None:
                arena.close()
            if store is not None:
                store.close()

    def _open(self, schedule: Schedule) -> SwapStore:
        name = schedule.store
        if name not in self._spec.stores:
            raise ConfigError(f"the plan offloads to the store {name!r}, which was not given; add --store {name}=DIR")
        return open_store(name, self._spec.stores[name], slot_sizes(self.program, schedule), self._spec.device_kind)
