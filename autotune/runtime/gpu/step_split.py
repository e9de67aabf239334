"""Split a schedule into what a CUDA graph can contain and what the host must do between graphs.

A graph repeats kernels at fixed addresses. So the host keeps what reads Python (updates, with their learning rates), what
moves memory (transfers, and every op on a value that was read back), what runs on the CPU, and all that follows from these.
"""

from dataclasses import dataclass
from enum import StrEnum

from autotune.capture.program import Program
from autotune.ir.graph import Op
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run, Schedule


class Part(StrEnum):
    """Place of an instruction in a step that is split."""

    GRAPH = "graph"
    """Kernels of a graph."""
    HOST = "host"
    """Work between two graphs, in every step."""
    CAPTURE = "capture"
    """A release that only a capture does, so that later kernels of the graphs reuse the memory."""


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A schedule with a part for each instruction."""

    parts: tuple[Part, ...]
    """Part of each instruction, in order."""
    reads: dict[int, tuple[int, ...]]
    """Values computed by graphs that each host instruction reads, by its index; those the step returns are at `len(parts)`."""
    graphs: int
    """Number of graphs."""
    fixed: tuple[int, ...]
    """Parameters and buffers, by value, whose addresses are parts of the graphs."""
    reason: str
    """Reason why no graph can be made of the step; empty if one can."""


def split_step(program: Program, schedule: Schedule) -> SplitStep:
    """Return the parts of a step.

    >>> from autotune.capture.tracer import capture
    >>> from autotune.ir.plan import Plan
    >>> from autotune.ir.schedule import lower
    >>> import torch
    >>> from autotune.workloads.workload import Workload
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> program = capture(Workload(model, lambda model, x: model(x).sum(), optimizer, torch.ones(3, 4)))
    >>> split_step(program, lower(program.graph, Plan.traced(program.graph))).graphs
    1
    """
    splitter = _Splitter(program, schedule)
    parts = tuple(splitter.place(index, instruction) for index, instruction in enumerate(schedule.instructions))
    splitter.read_results(len(parts))
    graphs, is_open = 0, False
    for part, instruction in zip(parts, schedule.instructions, strict=True):
        starts = part is Part.GRAPH and isinstance(instruction, Run)
        graphs += starts and not is_open
        is_open = starts or (is_open and part is not Part.HOST)
    runs = [
        program.graph.ops[instruction.op]
        for part, instruction in zip(parts, schedule.instructions, strict=True)
        if part is Part.GRAPH and isinstance(instruction, Run)
    ]
    fixed = {value for op in runs for value in (*op.inputs, *op.writes)} & program.tensors.keys()
    return SplitStep(parts, splitter.reads, graphs, tuple(sorted(fixed)), _refusal(program, graphs))


def _refusal(program: Program, graphs: int) -> str:
    if program.gradients:
        return "its gradients are handed to the loop, which may keep them, and a graph overwrites them in the next step"
    if program.updates is not None and program.updates.loop.needs_all_gradients:
        return f"the loop ({program.updates.loop}) holds gradients, which a graph overwrites in the next step"
    outside = {value for value, _ in program.free}
    if any(not outside.isdisjoint(op.writes) for op in program.graph.ops):
        return "it changes a tensor from outside of the model, of which a graph would change a copy"
    if not graphs:
        return "no op of it can run in a graph"
    return ""


class _Splitter:
    def __init__(self, program: Program, schedule: Schedule) -> None:
        self.reads: dict[int, tuple[int, ...]] = {}
        self._program, self._graph = program, program.graph
        static = program.graph.static
        self._on_host = {value for value in range(len(program.graph.values)) if not self._is_on_device(value)}
        # the memory of an offloaded parameter or state returns at another address
        self._moving = {item.value for item in schedule.instructions if isinstance(item, Offload)} & static
        self._on_host |= self._moving
        self._writing: set[int] = set()
        self._reading: set[int] = set()

    def place(self, index: int, instruction: Instruction) -> Part:
        """Return the part of the next instruction, and record what it reads of graphs."""
        match instruction:
            case Run(op_id, reused):
                op = self._graph.ops[op_id]
                if not self._needs_host(op):
                    self._on_host.difference_update(op.outputs)
                    return Part.GRAPH
                self.reads[index] = self._of_graphs((*op.inputs, *(() if reused is None else (reused,))))
                self._reading.difference_update((*op.inputs, *op.writes))
                self._on_host.update(op.outputs)
                return Part.HOST
            case Offload(value):
                self._writing.add(value)
                self.reads[index] = self._of_graphs((value,))
                return Part.HOST
            case Prefetch(value):
                self._reading.add(value)
                self._on_host.add(value)
                return Part.HOST
            case Free(value):
                is_host = value in self._writing or value in self._on_host
                self._writing.discard(value)
                if value not in self._moving:
                    self._on_host.discard(value)
                return Part.HOST if is_host else Part.CAPTURE

    def read_results(self, end: int) -> None:
        """Record the values of graphs that the step returns."""
        self.reads[end] = self._of_graphs(self._graph.outputs)

    def _needs_host(self, op: Op) -> bool:
        updates = self._program.updates
        target = self._program.calls[op.id].target
        if updates is not None and getattr(target, "__self__", None) is updates:
            return True
        values = (*op.inputs, *op.writes)
        return not self._on_host.isdisjoint(values) or not all(map(self._is_on_device, op.outputs))

    def _of_graphs(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the values that a graph computes: neither static values nor values that the host's work produces."""
        return tuple(v for v in dict.fromkeys(values) if v not in self._graph.static and v not in self._on_host)

    def _is_on_device(self, value: int) -> bool:
        meta = self._program.metas[value]
        return meta is None or meta.device.type == self._program.device.type
