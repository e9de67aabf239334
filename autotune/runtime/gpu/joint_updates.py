"""Collect updates that follow each other, and run them in one call: on a GPU its kernels take all of their tensors at once."""

from collections.abc import Iterator
from typing import Any

from autotune.capture.program import Program
from autotune.capture.source_writer import SourceWriter
from autotune.ir.graph import Op, Role
from autotune.ir.schedule import Schedule, lives

TEMPORARIES = 3
"""Upper bound of the temporary bytes of a joint update, per byte of its parameters: Adam needs two."""


class JointUpdates:
    """Updates and releases that were collected, for as long as the plan's peak leaves room for them.

    A joint update needs the temporaries of all of its parameters at once, and what is released between its parts stays
    until its end. Both have to fit between the bytes that are live and the plan's peak.

    Args:
        writer: Writer of the arguments.
        program: The captured step.
        schedule: Its instructions.
    """

    def __init__(self, writer: SourceWriter, program: Program, schedule: Schedule) -> None:
        self._writer, self._program = writer, program
        self._room_bytes = _rooms(program, schedule)
        self._calls: list[str] = []
        self._released: list[str] = []
        self._bytes = 0

    def add(self, index: int, op: Op) -> list[str] | None:
        """Collect the op of an instruction; return the lines to run before it, or None if it is not the update of a parameter."""
        update = next(list_updates(self._program, op), None)
        if update is None:
            return None
        values = self._program.graph.values
        nbytes = TEMPORARIES * sum(values[v].nbytes for v in op.writes if values[v].role is Role.PARAM)
        lines = self.flush() if self._bytes + nbytes > self._room_bytes[index] else []
        self._calls.append(self._writer.argument(tuple(update)))
        self._bytes += nbytes
        return lines

    def release(self, index: int, value: int) -> bool:
        """Collect the release of a value after collected updates; False if there are none, or no room to keep it."""
        nbytes = self._program.graph.values[value].nbytes
        if not self._calls or self._bytes + nbytes > self._room_bytes[index]:
            return False
        self._released.append(self._writer.variable(value))
        self._bytes += nbytes
        return True

    def flush(self) -> list[str]:
        """Return the lines that run what was collected."""
        lines = [f" updates.update_together([{', '.join(self._calls)}])"] if self._calls else []
        lines += [f" del {', '.join(self._released)}"] if self._released else []
        self._calls, self._released, self._bytes = [], [], 0
        return lines


def joins_updates(program: Program) -> bool:
    """Return whether the step of a program runs updates together: on a GPU, where each call costs launches."""
    updates = program.updates
    return program.device.type == "cuda" and updates is not None and not updates.loop.needs_all_gradients


def list_updates(program: Program, op: Op) -> Iterator[Any]:
    """Yield the arguments (name, parameter, gradient, shared) of an op that updates one parameter; else nothing."""
    call = program.calls[op.id]
    if program.updates is not None and call.target == program.updates.update:
        yield call.args


def _rooms(program: Program, schedule: Schedule) -> list[int]:
    """Return for each instruction its distance in bytes to the plan's peak."""
    graph, live, levels = program.graph, 0, []
    for _, begins, ends in lives(graph, schedule):
        live += sum(graph.values[value].nbytes for value in begins)
        levels.append(live)
        live -= sum(graph.values[value].nbytes for value in ends)
    peak = max(levels, default=0)
    return [peak - level for level in levels]
