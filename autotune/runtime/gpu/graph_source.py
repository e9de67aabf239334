"""Generate the two functions of a step in CUDA graphs: one that captures the graphs, one that replays them."""

from typing import Any

from autotune.capture.program import Program
from autotune.ir.graph import Op
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run, Schedule
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import overwrite
from autotune.runtime.codegen import StepWriter
from autotune.runtime.gpu.joint_updates import JointUpdates
from autotune.runtime.gpu.step_split import Part, SplitStep


class GraphWriter(StepWriter):
    """Generator of `capture(tangent, *inputs)` and `replay(tangent, *inputs)`; `names` is the scope of both.

    The functions use `recorder`, `borrowed`, `graphs`, `engine` and `updates`. A capture runs no host instruction. It
    records in `borrowed[index, value]` the tensors of graphs that the host instruction `index` reads.
    """

    def __init__(self, program: Program, schedule: Schedule, split: SplitStep) -> None:
        super().__init__(program, schedule)
        self._split = split

    def capture_source(self) -> str:
        """Return the source of the function that captures the graphs."""
        lines = [f"def capture({self.parameters()}):"]
        is_open, deleted = False, set(self._program.graph.static)
        for index, (part, instruction) in enumerate(self._instructions()):
            if part is Part.GRAPH and isinstance(instruction, Run):
                lines += [] if is_open else [" recorder.begin()"]
                is_open = True
                op = self._program.graph.ops[instruction.op]
                lines.append(f" {self.call(op, instruction.reuses_buffer_of)}")
                deleted.difference_update(op.outputs)
                deleted.update(() if instruction.reuses_buffer_of is None else (instruction.reuses_buffer_of,))
                continue
            if part is Part.HOST:
                lines += [" recorder.end()"] if is_open else []
                is_open = False
                lines += self._lend(index)
            if isinstance(instruction, Run):
                reused, op = instruction.reuses_buffer_of, self._program.graph.ops[instruction.op]
                deleted.update(op.outputs)
                if reused is not None and reused not in deleted:
                    # the host's output goes into this memory: the name keeps it from reuse until the output is freed
                    holder = self._find_holder(op, reused)
                    lines.append(f" v{holder} = v{reused}; del v{reused}")
                    deleted.add(reused)
                    deleted.discard(holder)
            elif isinstance(instruction, Free) and instruction.value not in deleted:
                lines.append(f" del v{instruction.value}")
                deleted.add(instruction.value)
        lines += [" recorder.end()"] if is_open else []
        return "\n".join([*lines, *self._lend(len(self._split.parts)), " return"]) + "\n"

    def replay_source(self) -> str:
        """Return the source of the function that runs one step: graphs, and the host's work between them."""
        body = _ReplayBody(self, self._program, JointUpdates(self, self._program, self._schedule))
        is_open = False
        for index, (part, instruction) in enumerate(self._instructions()):
            if part is Part.GRAPH and not is_open:
                body.replay_graph()
            elif part is Part.HOST:
                body.add(index, instruction, self._borrow(index))
            is_open = part is Part.GRAPH or (is_open and part is Part.CAPTURE)
        body.update_pending()
        body.lines += [*self._borrow(len(self._split.parts)), f" return {self.results()}"]
        return "\n".join([f"def replay({self.parameters()}):", *body.lines]) + "\n"

    def _find_holder(self, op: Op, reused: int) -> int:
        """Return the output of an op that lies in the memory of the value that it reuses."""
        call, values = self._program.calls[op.id], self._program.graph.values
        if isinstance(call.target, CompiledRegion):
            # it chooses by exact bytes, and those of `values` are rounded to whole blocks
            region: Any = overwrite(call, reused).target
            number: int = region.target
            return op.outputs[number]
        return next(v for v in op.outputs if values[v].nbytes == values[reused].nbytes)

    def _instructions(self) -> list[tuple[Part, Instruction]]:
        return list(zip(self._split.parts, self._schedule.instructions, strict=True))

    def _lend(self, index: int) -> list[str]:
        return [f" borrowed[{index}, {v}] = recorder.borrow(v{v})" for v in self._split.reads.get(index, ())]

    def _borrow(self, index: int) -> list[str]:
        return [f" v{v} = borrowed[{index}, {v}]" for v in self._split.reads.get(index, ())]


class _ReplayBody:
    """Lines of a replay. Updates without other work between them are collected, and run together where memory allows."""

    def __init__(self, writer: StepWriter, program: Program, joint: JointUpdates) -> None:
        self.lines: list[str] = []
        self._writer, self._program, self._joint = writer, program, joint
        self._static = program.graph.static
        self._graphs = 0
        self._writing: set[int] = set()
        self._reading: set[int] = set()

    def replay_graph(self) -> None:
        """Add the launch of the next graph."""
        self.update_pending()
        self.lines.append(f" graphs[{self._graphs}].replay()")
        self._graphs += 1

    def add(self, index: int, instruction: Instruction, borrow: list[str]) -> None:
        """Add an instruction of the host, after lines that borrow what it reads of graphs."""
        if isinstance(instruction, Run):
            self._run(index, instruction, borrow)
            return
        self.update_pending()
        self.lines += borrow
        match instruction:
            case Offload(value):
                self.lines.append(f" engine.start_write({value}{'' if value in self._static else f', v{value}'})")
                self._writing.add(value)
            case Prefetch(value):
                self.lines.append(f" engine.start_read({value})")
                self._reading.add(value)
            case Free(value):
                if value in self._writing:
                    self.lines.append(f" engine.finish_write({value})")
                    self._writing.remove(value)
                if value not in self._static:
                    self.lines.append(f" del v{value}")

    def update_pending(self) -> None:
        """Add one call for the updates that were collected."""
        self.lines += self._joint.flush()

    def _run(self, index: int, instruction: Run, borrow: list[str]) -> None:
        op = self._program.graph.ops[instruction.op]
        due = [value for value in dict.fromkeys((*op.inputs, *op.writes)) if value in self._reading]
        before = self._joint.add(index, op) if not due else None
        if before is not None:
            self.lines += [*before, *borrow]
            return
        self.update_pending()
        self.lines += borrow
        # static values have no name here: they are the user's own objects with their memory restored
        self.lines += [
            f" {'' if value in self._static else f'v{value} = '}engine.finish_read({value})" for value in due
        ]
        self._reading.difference_update(due)
        self.lines.append(f" {self._writer.call(op, instruction.reuses_buffer_of)}")
