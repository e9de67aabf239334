"""Generate the Python source of a step from its schedule."""

from typing import Any

import torch

from autotune.capture.bindings import Bindings
from autotune.capture.inplace_kernels import write_over
from autotune.capture.program import Call, Program, Read, View
from autotune.capture.source_writer import SourceWriter
from autotune.ir.graph import Op
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run, Schedule
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import overwrite
from autotune.runtime.gpu.joint_updates import JointUpdates, joins_updates

AT_RUN_TIME: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Replacements for views that fail if a kernel's strides differ from the traced ones; eager copies in that case."""


class StepWriter(SourceWriter):
    """Generator of a step's source; `names` maps each name in the source to its object."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        super().__init__(Bindings(program.metas))
        self._program = program
        self._schedule = schedule
        self.names |= {f"v{value}": tensor for value, tensor in program.tensors.items()}

    def source(self, *, calls_back: bool, names_ranges: bool = False) -> str:
        """Return the source of `step(tangent, *batch)`; with `calls_back` it calls `after(index)` per instruction.

        With `names_ranges` each op runs inside `with range_of(name)`, for a profiler. Without either, updates that follow
        each other run together on a GPU.
        """
        lines = [f"def step({self.parameters()}):"]
        joins = joins_updates(self._program) and not (calls_back or names_ranges)
        joint = JointUpdates(self, self._program, self._schedule) if joins else None
        reading: set[int] = set()
        writing: set[int] = set()
        ran: set[int] = set()
        static = self._program.graph.static
        for index, instruction in enumerate(self._schedule.instructions):
            if joint is not None:
                collected = self._collect(joint, index, instruction, reading, writing)
                lines += joint.flush() if collected is None else collected
                if collected is not None:
                    continue
            match instruction:
                case Run(op_id, reused):
                    op = self._program.graph.ops[op_id]
                    due = [value for value in dict.fromkeys((*op.inputs, *op.writes)) if value in reading]
                    # static values have no name here: they are the user's own objects with their memory restored
                    lines += [
                        f" {'' if value in static else f'v{value} = '}engine.finish_read({value})" for value in due
                    ]
                    reading.difference_update(due)
                    call = self.call(op, reused)
                    lines.append(
                        f" with range_of({_range_name(op, again=op_id in ran)!r}): {call}"
                        if names_ranges
                        else f" {call}"
                    )
                    ran.add(op_id)
                case Offload(value):
                    lines.append(f" engine.start_write({value}{'' if value in static else f', v{value}'})")
                    writing.add(value)
                case Free(value):
                    if value in writing:
                        lines.append(f" engine.finish_write({value})")
                        writing.remove(value)
                    if value not in static:
                        lines.append(f" del v{value}")
                case Prefetch(value):
                    lines.append(f" engine.start_read({value})")
                    reading.add(value)
            if calls_back:
                lines.append(f" after({index})")
        lines += [] if joint is None else joint.flush()
        lines.append(f" return {self.results()}")
        return "\n".join(lines) + "\n"

    def _collect(
        self, joint: JointUpdates, index: int, instruction: Instruction, reading: set[int], writing: set[int]
    ) -> list[str] | None:
        """Collect an update, or a release after updates; return the lines to run before it, or None for other instructions."""
        match instruction:
            case Run(op_id):
                op = self._program.graph.ops[op_id]
                return joint.add(index, op) if reading.isdisjoint((*op.inputs, *op.writes)) else None
            case Free(value) if value not in writing and value not in self._program.graph.static:
                return [] if joint.release(index, value) else None
        return None

    def parameters(self) -> str:
        """Return the parameters of a step's function: the gradient of the loss, the batch, and values from outside."""
        inputs = (*self._program.batch, *(value for value, _ in self._program.free))
        tangent = f"v{self._program.tangent}" if self._program.tangent is not None else "tangent"
        return ", ".join([tangent, *(f"v{value}" for value in inputs)])

    def results(self) -> str:
        """Return the expression for the step's results."""
        return f"({''.join(self._result(result) + ', ' for result in self._program.results)})"

    def _result(self, result: Any) -> str:
        """Return the expression for one result; a parameter that the step returns is detached like all others."""
        text = self.argument(result)
        is_static = isinstance(result, Read) and result.value in self._program.graph.static
        return f"{text}.detach()" if is_static else text

    def view(self, view: View) -> str:
        """Return the expression for a view, by a kernel that allows the layouts of a running step."""
        return self.invocation(AT_RUN_TIME.get(view.target, view.target), view.args, view.kwargs)

    def call(self, op: Op, reused: int | None) -> str:
        """Return the statement that runs an op; `reused` is the value whose buffer its output reuses."""
        call = self._program.calls[op.id]
        if reused is not None and reused == op.alias_of:
            return f"v{op.outputs[0]} = v{reused}; del v{reused}"
        if reused is not None:
            over = overwrite if isinstance(call.target, CompiledRegion) else write_over
            return f"{self._assignment(over(call, reused))}; del v{reused}"
        return self._assignment(call)

    def _assignment(self, call: Call) -> str:
        text, variables = self.statement(call)
        unused = [name for name in variables if name.startswith("_")]
        return text + (f"; del {', '.join(unused)}" if unused else "")


def _range_name(op: Op, *, again: bool) -> str:
    """Return the name of an op's range: its phase, its name and its layer."""
    return f"{'recompute' if again else op.phase} {op.name}{f' [{op.layer}]' if op.layer else ''}"
