"""A plan op by op: what lives while each runs, as nnstreamer/nntrainer#1126 tabulates an order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import Free, Offload, Prefetch, Run, lower
from autotune.predict.simulate import resident_bytes, timeline
from autotune.units import fmt_bytes


@dataclass(frozen=True, slots=True)
class OpRow:
    """One run of an op."""

    op: str
    tensors: tuple[tuple[str, int], ...]
    """(name, bytes) of all that the step has made and still needs, its own results last."""
    waiting: int
    """How many of them, the first ones, this op neither reads nor makes."""
    scratch_bytes: int
    resident_bytes: int
    """Parameters, state, buffers, batch, and what an open store holds."""
    peak_bytes: int
    """Highest so far."""

    @property
    def memory_bytes(self) -> int:
        """All of it together."""
        return self.resident_bytes + sum(nbytes for _, nbytes in self.tensors) + self.scratch_bytes


def op_rows(graph: TrainGraph, plan: Plan, costs: Costs) -> Iterator[OpRow]:
    """A row for every run of the plan, repeated and offloaded values as they stand then."""
    schedule = lower(graph, plan)
    resident = resident_bytes(graph, schedule, costs)
    live: dict[int, None] = {}
    peak = resident
    for moment in timeline(graph, schedule, costs):
        peak = max(peak, moment.during_bytes)
        match moment.instruction:
            case Run(op_id, takes):
                op = graph.ops[op_id]
                if takes is not None:
                    del live[takes]  # the result lies in its buffer
                live |= dict.fromkeys(op.outputs)
                own = [value for value in live if value in op.inputs or value in op.outputs]
                waiting = [value for value in live if value not in own]
                tensors = tuple((graph.values[value].name, graph.values[value].nbytes) for value in (*waiting, *own))
                yield OpRow(op.name, tensors, len(waiting), costs.scratch_bytes[op_id], resident, peak)
            case Free(value):
                del live[value]
            case Prefetch(value):
                live[value] = None
            case Offload(_):
                pass


def op_table(rows: Iterable[OpRow], most: int = 6) -> Iterator[str]:
    """Aligned lines; of the tensors that wait at most `most` are named where there are many."""
    cells = [("op", "tensors", "memory", "peak")]
    for row in rows:
        names = [name for name, _ in row.tensors]
        if row.waiting > most:
            nbytes = sum(nbytes for _, nbytes in row.tensors[: row.waiting])
            names = [f"{row.waiting} waiting ({fmt_bytes(nbytes)})", *names[row.waiting :]]
        scratch = [f"scratch ({fmt_bytes(row.scratch_bytes)})"] if row.scratch_bytes else []
        cells.append((row.op, ", ".join(names + scratch), fmt_bytes(row.memory_bytes), fmt_bytes(row.peak_bytes)))
    wide = [max(len(line[column]) for line in cells) for column in range(4)]
    for op, tensors, memory, peak in cells:
        yield f"{op:<{wide[0]}}  {memory:>{wide[2]}}  {peak:>{wide[3]}}  {tensors}".rstrip()
