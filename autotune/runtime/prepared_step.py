"""Prepare a captured program to run under a plan: executors, arenas, the open store, and the adaptive window."""

import itertools
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from autotune.capture.capture_checks import MemoryCheck
from autotune.capture.optimizers.loop_updates import base_program
from autotune.capture.program import Program
from autotune.capture.signature import Signature
from autotune.errors import ConfigError
from autotune.ir.check import check
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import CaptureSettings, Plan, early_updates
from autotune.ir.schedule import lower
from autotune.kernels.region_program import compile_regions, with_kernels
from autotune.kernels.threads import use_threads
from autotune.planners import make_plan
from autotune.predict.simulate import peak_bytes
from autotune.records import plan_file as planfile
from autotune.records.measurement import TransferTrace
from autotune.records.plan_file import PlanFile
from autotune.records.speed_environment import list_changes, read_speed_environment
from autotune.runtime.arena import SharedBlock, StepArena
from autotune.runtime.executor import Executor, RangeFactory
from autotune.runtime.gpu.current_gpu import use_gpu
from autotune.runtime.gpu.graphed_step import GraphRecorder
from autotune.runtime.gpu.segments import grow_segments
from autotune.runtime.loop_plan import find_planned_form, fits_graph, is_for_another_batch, transfer_to_loop
from autotune.runtime.offload.slots import slot_sizes
from autotune.runtime.offload.window_adapter import WindowAdapter, make_variants
from autotune.runtime.op_profiler import profile
from autotune.runtime.shapes.background import BackgroundShapes
from autotune.runtime.shapes.step_costs import StepCosts
from autotune.runtime.stores import DEVICE_KINDS, SwapStore, measure_stores, open_store
from autotune.units import fmt_bytes
from autotune.workloads.loop import Loop
from autotune.workloads.workload import Workload


class PlanMaker(CaptureSettings, Protocol):
    """Maker of the plan for the first batch's step, such as `autotune.AutoPlan`."""

    @property
    def stores(self) -> Mapping[str, str | Path]:
        """Directories of the stores that plans may offload to."""

    def __call__(self, workload: Workload, graph: TrainGraph) -> PlanFile:
        """Return the plan for a workload and its captured graph."""


PlanSource = str | Path | PlanFile | Plan | PlanMaker
"""Path of a plan file, a plan with or without its provenance, or an `AutoPlan`."""


def read_plan(source: PlanSource | None) -> PlanFile | Plan | PlanMaker | None:
    """Return a plan source with its file read, if it is a path."""
    return planfile.read(Path(source)) if isinstance(source, (str, Path)) else source


def store_directories(
    stores: Mapping[str, str | Path] | None, plan: PlanFile | Plan | PlanMaker | None
) -> dict[str, Path]:
    """Return the absolute directory of each store; those of an `AutoPlan` where none are passed.

    Raises ConfigError for a store that does not exist.
    """
    if stores is None and not isinstance(plan, PlanFile | Plan | None):
        stores = plan.stores
    for name in stores or {}:
        if name not in DEVICE_KINDS:
            raise ConfigError(
                f"stores names {name!r}; known: {', '.join(sorted(DEVICE_KINDS))}. Write stores={{'ssd': DIR}}"
            )
    return {name: Path(directory).absolute() for name, directory in (stores or {}).items()}


@dataclass(slots=True)
class PreparedStep:
    """A program ready to run, with an executor per plan: more than one if the offload window adapts."""

    number: int
    """Number of the capture within its training loop."""
    program: Program
    captured_plan: Plan
    """Plan of the captured graph; `plan` may have other windows."""
    plan: Plan
    """Plan of the next step."""
    executors: Mapping[Plan, tuple[Executor, StepArena | None]]
    store: SwapStore | None
    """Open store; None without offload, and while the step is suspended."""
    open_store: Callable[[], SwapStore] | None
    """Opens the store again; None without offload, and after `close`."""
    adapter: WindowAdapter | None
    memory: MemoryCheck
    """Refuses a call whose tensors share memory that the step writes."""
    earlier_trace: Callable[[], TransferTrace] | None = None
    """Transfers of the step before the last, on a GPU."""

    @property
    def executor(self) -> Executor:
        """Executor of the current plan."""
        return self.executors[self.plan][0]

    @property
    def arena(self) -> StepArena | None:
        """Arena of the current plan."""
        return self.executors[self.plan][1]

    def suspend(self, following: "PreparedStep | None" = None) -> None:
        """Release the arena's memory and the store's space until `resume`; `following` may go on in the same memory."""
        next_arena = following.arena if following is not None else None
        if self.arena is not None and not (next_arena is not None and next_arena.can_follow(self.arena)):
            self.arena.release()
        self._close_store()

    def resume(self) -> None:
        """Open the store again after `suspend`."""
        if self.store is None and self.open_store is not None:
            store = self.open_store()
            for executor, _ in self.executors.values():
                executor.replace_store(store)
            self.store = store

    def _close_store(self) -> None:
        """Close the store, after weights that a failed step left in it are back in memory."""
        for executor, _ in self.executors.values():
            executor.restore_weights()
        store, self.store = self.store, None  # an interrupt must not leave a closed one for the next step
        if store is not None:
            store.close()

    def adapt(self) -> None:
        """Choose the window of the next step from the transfers of the last one; on a GPU of the one before it.

        The GPU may still run the last one, and a wait for it would leave the GPU idle until the next step is queued.
        """
        if self.adapter is None:
            return
        trace: Callable[[], TransferTrace] | None = self.executor.pending_trace
        if self.program.device.type == "cuda":
            trace, self.earlier_trace = self.earlier_trace, trace
        if trace is None:
            return
        self.adapter.record(trace())
        if self.adapter.current.plan != self.plan:
            if self.arena is not None:
                self.arena.release()
            if self.executor.graphed is not None:
                self.executor.graphed.release()
                self.executor.graphed.captures = 0  # no parameter moved
            self.plan, self.earlier_trace = self.adapter.current.plan, None

    def close(self) -> None:
        """Release the store's space, the arenas and the graphs; where a step runs, as in a signal's handler, at its end."""
        for executor, _ in self.executors.values():
            if executor.is_running:
                executor.at_end = partial(self._close_after, executor.at_end)
                return
        self.open_store = None
        self._close_store()
        for executor, arena in self.executors.values():
            if arena is not None:
                arena.close()
            if executor.graphed is not None:
                executor.graphed.release()

    def _close_after(self, earlier: Callable[[], None] | None) -> None:
        with closing(self):
            if earlier is not None:  # a postponed handler of another signal
                earlier()


class StepPreparer:
    """Preparation of all captured programs of one training loop.

    Args:
        plan: The plan, a file with the plan and the settings it was made with, or a maker of such a file; None to run
            steps as traced.
        stores: Directory of each store, by its name.
        adapts: True if plans that offload may change their window between steps.
        replans_first: True if the first batch may have another shape than the plan's, as after a resumed training.
        range_of: Context manager of a named range, opened around each op for a profiler; None for no ranges.
        make_recorder: Creates a recorder of CUDA graphs on a device; None to launch every op.
    """

    def __init__(
        self,
        plan: PlanFile | Plan | PlanMaker | None,
        stores: Mapping[str, Path],
        *,
        adapts: bool,
        replans_first: bool = False,
        range_of: RangeFactory | None = None,
        make_recorder: Callable[[torch.device], GraphRecorder] | None = None,
    ) -> None:
        self.file = plan if isinstance(plan, PlanFile) else None
        self._plan = plan.plan if isinstance(plan, PlanFile) else plan if isinstance(plan, Plan) else None
        self._make_file = None if isinstance(plan, PlanFile | Plan | None) else plan
        self._stores, self._adapts, self._replans_first = stores, adapts, replans_first
        self._range_of, self._make_recorder = range_of, make_recorder
        self._numbers = itertools.count()
        self._block = SharedBlock()
        self._costs = StepCosts(lambda program: self._profile(program, self._stores))

    @property
    def _source(self) -> Plan | PlanMaker:
        """Source of memory format, kernels, rebuild price and threads of all steps; an empty plan where there is none."""
        return self._plan or self._make_file or Plan(())

    @property
    def memory_format(self) -> str:
        """Memory format that the plan puts weights and batches into; empty to leave them as they are."""
        return self._source.memory_format

    @property
    def kernels(self) -> str:
        """Kernels that the plan runs; empty for those of eager."""
        return self._source.kernels

    def with_kernels(self, program: Program) -> Program:
        """Return a captured program with the plan's kernels."""
        return with_kernels(program, self.kernels, self._source.rebuild_price)

    @property
    def budget_bytes(self) -> int:
        """Budget of the plan file, static bytes included; 0 without a file."""
        return self.file.budget_bytes if self.file is not None else 0

    def first_plan(self, program: Program, make_workload: Callable[[], Workload], gradient_users: str) -> Plan:
        """Return the plan of the first captured step; a plan for another loop is transferred, with a warning.

        `gradient_users` names what needs every gradient before any update.

        Raises:
            PlanError: The plan file is for another graph.
            ConfigError: A store takes no tensors of the step's device.
        """
        self._refuse_stores_of_another_device(program.device.type)
        if self._make_file is not None and self.file is None:
            self.file = self._make_file(make_workload(), program.graph)
            self._plan = self.file.plan
        if self._plan is None:
            return Plan.traced(program.graph)
        if self._replans_first and self.file is not None and is_for_another_batch(self.file, program.graph):
            warnings.warn(
                "the first batch has another shape than the plan's; its step is planned with the same settings, and a batch of "
                "the plan's shape runs under the plan",
                stacklevel=5,
            )
            return self.make_plan(program)
        planned = self._planned_form(program)
        if planned is program:
            return self._plan
        plan = transfer_to_loop(self._plan, planned.graph, program.graph)
        self._warn_of_other_loop(planned, program, gradient_users)
        return plan

    def _planned_form(self, program: Program) -> Program:
        """Return the program itself, or the form of it for another loop that the plan was made for."""
        assert self._plan is not None
        if self.file is None:
            return program if fits_graph(program.graph, self._plan) else base_program(program)
        return find_planned_form(program, self.file)

    def make_plan(self, program: Program) -> Plan:
        """Plan another graph with the file's settings; without a file keep its traced order."""
        if self.file is not None and self.file.graph_digest == program.graph.digest:
            return self.file.plan
        if self.file is None:
            allocator = self._plan.allocator if self._plan is not None else "system"
            return replace(Plan.traced(program.graph).captured_as(self._source), allocator=allocator)
        costs, target = self._costs.estimate(program), self.file.target_bytes
        if target is None:
            target = self.file.budget_bytes
        elif target == 0:  # of a smallest plan: what that takes, a smaller step may take, too
            target = self.file.estimate.peak_bytes
        return make_plan(program.graph, self.file.settings, target, costs).captured_as(self._source)

    def _profile(self, program: Program, stores: Mapping[str, Path]) -> Costs:
        with use_threads(self._source.threads), use_gpu(program.device):
            return measure_stores(profile(program), stores, program.device.type)

    def plan_in_background(
        self, first: Program, first_call: Signature, workload: Workload, *, gradients: bool
    ) -> BackgroundShapes:
        """Start a process that captures and plans further shapes of the first batch's step, by the same settings."""
        return BackgroundShapes(
            first, first_call, workload, self.file or self._plan, dict(self._stores), gradients=gradients
        )

    def prepare(self, program: Program, plan: Plan) -> PreparedStep:
        """Check a plan, open its store and build its executors.

        Raises:
            PlanError: The plan does not fit the graph.
            ConfigError: A store has no directory.
            StoreError: A store cannot be opened.
        """
        check(program.graph, plan)
        if plan.allocator == "arena" and program.device.type == "cuda":
            grow_segments()
        with use_threads(plan.threads):
            compile_regions(program)
        adapter = self._make_adapter(program, plan) if self._adapts and plan.offload else None
        plans = [variant.plan for variant in adapter.variants] if adapter is not None else [plan]
        schedules = [lower(program.graph, each) for each in plans]
        opener = None
        if plan.offload:
            slots = slot_sizes(program, *schedules)
            opener = partial(open_store, plan.store, self._directory(plan.store), slots, program.device.type)
            opener = use_gpu(program.device)(opener)
        uses_arena = plan.allocator == "arena" and program.device.type == "cpu"
        recorder = None if self._make_recorder is None else partial(self._make_recorder, program.device)
        executors: dict[Plan, tuple[Executor, StepArena | None]] = {}
        with ExitStack() as undo:  # after an error, its traceback would keep the store's space
            store = undo.enter_context(opener()) if opener is not None else None
            for each, schedule in zip(plans, schedules, strict=True):
                # a step that offloads releases pages one by one, for which the block must be its own
                block = SharedBlock() if plan.offload else self._block
                arena = StepArena(block=block) if uses_arena else None
                executor = Executor(
                    program, schedule, store, arena=arena, range_of=self._range_of, make_recorder=recorder,
                    threads=plan.threads,
                )  # fmt: skip
                executors[each] = executor, arena
            undo.pop_all()
        memory = MemoryCheck(program)
        return PreparedStep(next(self._numbers), program, plan, plan, executors, store, opener, adapter, memory)

    def _make_adapter(self, program: Program, plan: Plan) -> WindowAdapter:
        costs = self._profile(program, {plan.store: self._directory(plan.store)})
        budget = self.file.budget_bytes if self.file is not None else peak_bytes(program.graph, plan, costs)
        return WindowAdapter(make_variants(program.graph, plan, budget, costs), budget)

    def _warn_of_other_loop(self, planned: Program, program: Program, gradient_users: str) -> None:
        """Warn once of a plan for another loop, if this loop takes more memory or time than the plan's."""
        assert self._plan is not None
        loop = program.updates.loop if program.updates is not None else Loop()
        planned_loop = planned.updates.loop if planned.updates is not None else Loop()
        next_step = f"tune with --loop {loop} to plan for that" if loop != Loop() else "tune without --loop"
        early = [planned.graph.ops[op] for op in early_updates(planned.graph, self._plan.order)]
        static = planned.graph.static
        gradients = {value for op in early for value in op.inputs if value not in static}
        nbytes = sum(planned.graph.values[value].nbytes for value in gradients)
        if early:
            message = (
                f"{gradient_users}: all gradients are needed at once, so {len(early)} updates that the plan places "
                f"beside their gradients wait for the last one, and {fmt_bytes(nbytes)} of gradients with them"
            )
        elif loop.accumulates and not planned_loop.accumulates:
            sums = program.graph.static_bytes - planned.graph.static_bytes
            message = (
                f"{gradient_users}: {fmt_bytes(sums)} of gradients stay in memory between steps, unlike in the plan"
            )
        elif planned_loop != Loop() and planned_loop.accumulates != loop.accumulates:
            message = f"the plan is for --loop {planned_loop}, which keeps gradients longer than this step does"
        else:
            return
        warnings.warn(f"{message}; {next_step}", stacklevel=5)

    def _refuse_stores_of_another_device(self, device: str) -> None:
        """Raise ConfigError for a store that takes no tensors of a kind of device; no plan needs to offload to it."""
        for name in self._stores:
            if device not in DEVICE_KINDS[name]:
                known = ", ".join(
                    f"stores={{{store!r}: DIR}}" for store, kinds in DEVICE_KINDS.items() if device in kinds
                )
                raise ConfigError(
                    f"the store {name!r} takes no tensors of device {device}; pass {known or 'no stores'}"
                )

    def _directory(self, name: str) -> Path:
        if name not in self._stores:
            raise ConfigError(f"the plan offloads to {name!r}; pass stores={{{name!r}: DIR}}")
        return self._stores[name]


def warn_of_environment(file: PlanFile | None) -> None:
    """Warn the caller's caller of threads and CPUs that differ from those that a plan for a CPU was measured with."""
    if file is None or file.device is None or file.device.kind != "cpu":
        return
    own = "torch threads"  # a plan that names their number sets it
    present = read_speed_environment(torch.get_num_threads(), torch.get_num_interop_threads())
    if file.plan.threads and own in file.device.environment:
        present[own] = file.device.environment[own]
    if changes := list_changes(file.device.environment, present):
        warnings.warn(
            f"the plan was measured with other settings of threads: {'; '.join(changes)}. "
            "Step times differ from the recorded ones; set them as recorded, or tune again",
            stacklevel=3,
        )
