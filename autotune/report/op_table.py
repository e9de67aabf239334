"""Tabulate a plan op by op with the values that are live while each op runs, as nnstreamer/nntrainer#1126 does."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Run, lives, lower
from autotune.predict.simulate import resident_bytes, timeline
from autotune.units import fmt_bytes


@dataclass(frozen=True, slots=True)
class OpRow:
    """One run of an op."""

    op: str
    tensors: tuple[tuple[str, int], ...]
    """(name, bytes) of all live values, the op's own inputs and outputs last."""
    waiting: int
    """Number of live values, the first ones, that this op neither reads nor writes."""
    scratch_bytes: int
    resident_bytes: int
    """Bytes of parameters, state, buffers and batch, and of an open store."""
    peak_bytes: int
    """Highest memory so far, in bytes."""

    @property
    def memory_bytes(self) -> int:
        """Total memory during the op."""
        return self.resident_bytes + sum(nbytes for _, nbytes in self.tensors) + self.scratch_bytes


def build_op_rows(graph: TrainGraph, plan: Plan, costs: Costs) -> Iterator[OpRow]:
    """Yield a row for every run of an op under a plan; a recomputed op has one row per run."""
    schedule = lower(graph, plan)
    resident = resident_bytes(graph, schedule, costs)
    live: dict[int, None] = {}
    peak = resident
    moments = timeline(graph, schedule, costs)
    for moment, (instruction, begins, ends) in zip(moments, lives(graph, schedule), strict=True):
        peak = max(peak, moment.during_bytes)
        for value in ends:
            if value in graph.static:
                resident -= graph.values[value].nbytes
            else:
                del live[value]
        for value in begins:
            if value in graph.static:
                resident += graph.values[value].nbytes
            else:
                live[value] = None
        if isinstance(instruction, Run):
            op = graph.ops[instruction.op]
            used = [value for value in live if value in op.inputs or value in op.outputs]
            waiting = [value for value in live if value not in used]
            tensors = tuple((graph.values[value].name, graph.values[value].nbytes) for value in (*waiting, *used))
            yield OpRow(op.name, tensors, len(waiting), costs.scratch_bytes[op.id], resident, peak)


def format_op_table(rows: Iterable[OpRow], most: int = 6) -> Iterator[str]:
    """Yield aligned lines; more than `most` waiting values are counted instead of named."""
    cells = [("op", "tensors", "memory", "peak")]
    for row in rows:
        names = [name for name, _ in row.tensors]
        if row.waiting > most:
            nbytes = sum(nbytes for _, nbytes in row.tensors[: row.waiting])
            names = [f"{row.waiting} waiting ({fmt_bytes(nbytes)})", *names[row.waiting :]]
        scratch = [f"scratch ({fmt_bytes(row.scratch_bytes)})"] if row.scratch_bytes else []
        cells.append((row.op, ", ".join(names + scratch), fmt_bytes(row.memory_bytes), fmt_bytes(row.peak_bytes)))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    for op, tensors, memory, peak in cells:
        yield f"{op:<{widths[0]}}  {memory:>{widths[2]}}  {peak:>{widths[3]}}  {tensors}".rstrip()
