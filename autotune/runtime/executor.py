"""Execute a schedule: straight-line Python, generated once, that frees every value after its last use."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.ir.schedule import Schedule
from autotune.kernels.region_program import load_variants
from autotune.kernels.threads import use_threads
from autotune.records.measurement import TransferTrace
from autotune.runtime import malloc
from autotune.runtime.arena import StepArena
from autotune.runtime.codegen import StepWriter
from autotune.runtime.gpu.graphed_step import GraphedStep, GraphRecorder
from autotune.runtime.offload.engine import OffloadEngine, Store
from autotune.runtime.offload.slots import peak_step_bytes, static_tensors

RangeFactory = Callable[[str], AbstractContextManager[Any]]
"""Opens a named range of a profiler: `torch.profiler.record_function` or `torch.cuda.nvtx.range`."""


class Executor:
    """One step of a program under a schedule.

    Args:
        program: The captured step.
        schedule: The instructions to run; all ids are those of the program's graph.
        store: Destination of offloaded values; None if the schedule offloads none.
        arena: Block of memory that the step's tensors are placed in; None for malloc.
        after_instruction: Called with each instruction's index, so that a meter can compare bytes with the simulator.
        range_of: Context manager of a named range, opened around each op for a profiler; None for no ranges.
        make_recorder: Creates a recorder of CUDA graphs, in which the step then runs; None to launch every op.
        threads: Number of threads that torch's CPU ops use during the step; 0 for the number that the process has then.

    Raises:
        PlanError: The schedule offloads a parameter that shares its memory with another tensor.

    Examples:
        >>> from autotune.capture.tracer import capture
        >>> from autotune.ir.plan import Plan
        >>> from autotune.ir.schedule import lower
        >>> from autotune.workloads.workload import Workload
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batch = torch.ones(3, 4)
        >>> program = capture(Workload(model, lambda model, batch: model(batch).sum(), optimizer, batch))
        >>> execute = Executor(program, lower(program.graph, Plan.traced(program.graph)))
        >>> with program.updates.step():
        ...     loss = execute([batch])
        >>> loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        store: Store | None = None,
        *,
        arena: StepArena | None = None,
        after_instruction: Callable[[int], None] | None = None,
        range_of: RangeFactory | None = None,
        make_recorder: Callable[[], GraphRecorder] | None = None,
        threads: int = 0,
    ) -> None:
        self.program = program
        self._threads = threads
        self.schedule = schedule
        self._arena = arena
        static = {} if store is None else static_tensors(program, schedule)
        self._memory: SharedBudget | None = None
        if static and arena is not None and arena.works and program.device.type == "cpu":
            # static tensors lie outside of the arena: bytes that one of the two holds the other must not hold too
            self._memory = SharedBudget(arena, peak_step_bytes(program.graph, schedule))
        count = len(program.graph.values)
        self._engine = OffloadEngine(store, static, count, self._memory, program.device) if store is not None else None
        self.tangent = seed_gradient(program)
        self.is_whole = True
        """False for a step that skips its update, as in an accumulation: an arena is laid out for a step with one."""
        self.is_running = False
        self.at_end: Callable[[], None] | None = None
        """Called once at the end of the step that runs now, also of one that fails."""
        writer = StepWriter(program, schedule)
        self.source = writer.source(calls_back=after_instruction is not None, names_ranges=range_of is not None)
        scope: dict[str, Any] = {
            **writer.names, "engine": self._engine, "after": after_instruction, "range_of": range_of,
            "updates": program.updates,
        }  # fmt: skip
        with use_threads(threads):
            load_variants(scope.values())
        exec(compile(self.source, f"<step of {program.graph.name}>", "exec"), scope)
        self._step: Callable[..., tuple[Any, ...]] = scope["step"]
        self.graphed: GraphedStep | None = None
        """The step in CUDA graphs; None where every op is launched."""
        if make_recorder is not None:
            self._step = self.graphed = GraphedStep(program, schedule, self._step, self._engine, make_recorder)

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        """Run the step on the batch's tensors; return the results in the structure of the loss function's."""
        return self.run(self.inputs(batch))[0]

    def inputs(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the inputs of a step: the batch's tensors, and the current values from outside of model and batch."""
        return [*batch, *(read() for _, read in self.program.free)]

    def run(self, inputs: list[torch.Tensor]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Run the step on its inputs; return the results, and the gradients of `program.gradients`."""
        self.is_running = True
        try:
            with (
                torch.no_grad(),
                use_threads(self._threads),
                malloc.eager_release(self._memory is not None),
                self._arena.step(lays_out=self.is_whole) if self._arena else nullcontext(),
                self._engine or nullcontext(),
            ):
                results = self._step(self.tangent, *inputs)
        except BaseException:
            self.restore_weights()  # a signal's handler may have raised before the engine did so
            raise
        finally:
            self.is_running = False
            if self.at_end is not None:
                at_end, self.at_end = self.at_end, None
                at_end()
        if self._memory is not None:
            self._memory.set_offloaded(0)
        count = len(results) - len(self.program.gradients)
        leaves = list(results[:count])
        for position, read in self.program.passed:
            leaves[position] = read()
        return pytree.tree_unflatten(leaves, self.program.result_spec), results[count:]

    def restore_weights(self) -> None:
        """Read back weights and state that a failed step left in its store; do nothing if there are none.

        A signal's handler may raise in the engine before it has restored them. Raises StoreError for those that are lost.
        """
        if self._engine is not None:
            self._engine.abort()

    def replace_store(self, store: Store) -> None:
        """Offload to `store` from the next step on; it must have the same slots as the first one."""
        if self._engine is not None:
            self._engine.store = store

    @property
    def transfer_trace(self) -> TransferTrace:
        """Transfers of the last step, and the times at which it waited for them. On a GPU this waits for the step's end."""
        return self._engine.transfer_trace if self._engine else TransferTrace()

    @property
    def pending_trace(self) -> Callable[[], TransferTrace]:
        """Function that returns the last step's transfers, also after later steps; on a GPU it waits for that step alone."""
        return self._engine.pending_trace if self._engine else TransferTrace

    @property
    def stall_seconds(self) -> float:
        """Seconds that the last step waited for the store."""
        return self.transfer_trace.stall_seconds

    @property
    def transfer_bytes(self) -> int:
        """Bytes written to the store and read from it by the last step."""
        return self._engine.transfer_bytes if self._engine else 0

    @property
    def problem(self) -> str:
        """Reason why a value that the schedule offloads stayed in memory in the last step; empty if none did."""
        return self._engine.problem if self._engine else ""


@dataclass
class SharedBudget:
    """One bound on the bytes of an arena and of the offloaded static tensors together."""

    arena: StepArena
    step_bytes: int
    """Peak of the step's own values, by `peak_step_bytes`."""

    def set_offloaded(self, nbytes: int) -> None:
        """Let the arena hold its own peak plus the bytes that are offloaded now."""
        self.arena.limit_resident(self.step_bytes, nbytes)

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate memory for a static tensor that returns."""
        self.arena.map_storage(storage, nbytes)


def seed_gradient(program: Program) -> torch.Tensor:
    """Return the gradient of the loss with respect to itself: one, in the loss's dtype and shape."""
    meta = program.metas[program.tangent] if program.tangent is not None else None
    if meta is None:
        return torch.ones((), device=program.device)
    return torch.ones(meta.shape, dtype=meta.dtype, device=meta.device)
