"""Compute the peak bytes that a plan's decisions save and the time they cost, module by module."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import early_updates
from autotune.ir.schedule import Free, Instruction, Offload, Prefetch, Run
from autotune.predict.step_view import NO_LAYER, StepTimeline


class DecisionKind(StrEnum):
    """Kind of a memory-saving decision, in the order of the report."""

    RECOMPUTE = "recomputed"
    OFFLOAD = "offloaded"
    INPLACE = "in-place"
    UPDATE = "early update"


@dataclass(frozen=True, slots=True)
class DecisionSaving:
    """Saving and cost of all decisions of one kind about one module."""

    kind: DecisionKind
    layer: str
    """Path of the module; empty for the total over all modules, whose saving is no smaller than a module's."""
    saved_bytes: int
    """Rise of the step's peak if these bytes stayed resident."""
    seconds: float
    """Time of one step spent on recomputation, or on waiting for the store."""
    moved_bytes: int
    """Bytes that one step writes to the store and reads from it."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """Bytes that a decision keeps out of memory from instruction `first` to instruction `last`."""

    kind: DecisionKind
    layer: str
    nbytes: int
    first: int
    last: int


def evaluate_decisions(timeline: StepTimeline) -> list[DecisionSaving]:
    """Return the savings of a plan: for each kind of decision the total, then the modules, largest saving first."""
    absences: dict[tuple[DecisionKind, str], list[_Absence]] = defaultdict(list)
    for absence in _find_absences(timeline):
        absences[absence.kind, absence.layer].append(absence)
        absences[absence.kind, ""].append(absence)
    seconds, moved = _sum_costs(timeline)
    during = np.array([span.moment.during_bytes for span in timeline.spans], dtype=np.int64)
    savings = [
        DecisionSaving(
            kind, layer, _peak_rise(during, absences[kind, layer]), seconds[kind, layer],
            moved[layer] * (kind == DecisionKind.OFFLOAD),
        )
        for kind, layer in {**absences, **seconds}
    ]  # fmt: skip
    kinds = list(DecisionKind)
    return sorted(savings, key=lambda s: (kinds.index(s.kind), s.layer != "", -s.saved_bytes, s.layer))


def _peak_rise(during: npt.NDArray[np.int64], absences: Iterable[_Absence]) -> int:
    """Return the rise of the peak if all these absent bytes were resident."""
    change = np.zeros(len(during) + 1, dtype=np.int64)
    for absence in absences:
        change[absence.first] += absence.nbytes
        change[absence.last + 1] -= absence.nbytes
    return int((during + np.cumsum(change[:-1])).max() - during.max())


def _find_absences(timeline: StepTimeline) -> Iterator[_Absence]:
    """Yield every stretch of the step during which a decision keeps a value out of memory.

    A value that is recomputed only as the input of another recomputation does not count: without that one, nothing
    would read it again.
    """
    graph, instructions = timeline.graph, timeline.schedule.instructions
    runs = [instruction.op for instruction in instructions if isinstance(instruction, Run)]
    last_read = _last_reads(graph, runs)
    early = set(early_updates(graph, tuple(runs)))
    steps = [step for step, instruction in enumerate(instructions) if _is_compute(graph, instruction)]
    last_compute = max(steps, default=-1)
    freed: dict[int, tuple[int, int]] = {}  # value: (instruction, runs until then)
    reader: dict[int, int] = {}
    count = 0
    for step, instruction in enumerate(instructions):
        match instruction:
            case Run(op_id, takes):
                op, layer = graph.ops[op_id], _op_layer(graph, op_id)
                for value in op.outputs:
                    if value in freed and last_read[value] >= freed[value][1]:
                        nbytes = graph.values[value].nbytes
                        yield _Absence(DecisionKind.RECOMPUTE, layer, nbytes, freed[value][0] + 1, step - 1)
                if takes is not None and takes != op.alias_of:
                    yield _Absence(DecisionKind.INPLACE, layer, graph.values[takes].nbytes, step, step)
                    freed[takes] = step, count + 1
                reader.update(dict.fromkeys((*op.inputs, *op.writes), op_id))
                count += 1
            case Free(value):
                freed[value] = step, count
                if reader.get(value) in early and _is_gradient(graph, value) and step < last_compute:
                    layer, nbytes = _value_layer(graph, value), graph.values[value].nbytes
                    yield _Absence(DecisionKind.UPDATE, layer, nbytes, step + 1, last_compute)
            case Prefetch(value):
                layer, nbytes = _value_layer(graph, value), graph.values[value].nbytes
                yield _Absence(DecisionKind.OFFLOAD, layer, nbytes, freed[value][0] + 1, step - 1)
            case Offload(_):
                pass


def _last_reads(graph: TrainGraph, runs: list[int]) -> list[int]:
    """Return for each value the position in `runs` of the last first-time run that reads it; -1 for none."""
    first_runs = {op: position for position, op in reversed(list(enumerate(runs)))}
    last_read = [-1] * len(graph.values)
    for op, position in first_runs.items():
        for value in (*graph.ops[op].inputs, *graph.ops[op].writes):
            last_read[value] = max(last_read[value], position)
    for value in graph.outputs:
        last_read[value] = len(runs)
    return last_read


def _sum_costs(timeline: StepTimeline) -> tuple[dict[tuple[DecisionKind, str], float], Counter[str]]:
    """Return (seconds by kind and module, transferred bytes by module).

    A wait for several values is charged to the value that arrived last.
    """
    graph = timeline.graph
    seconds: dict[tuple[DecisionKind, str], float] = defaultdict(float)
    moved: Counter[str] = Counter()
    arrivals: dict[int, float] = {}
    executed: set[int] = set()

    def add(kind: DecisionKind, layer: str, amount: float) -> None:
        seconds[kind, layer] += amount
        seconds[kind, ""] += amount

    for span in timeline.spans:
        match span.moment.instruction:
            case Run(op_id):
                op = graph.ops[op_id]
                if op_id in executed:
                    add(DecisionKind.RECOMPUTE, _op_layer(graph, op_id), timeline.costs.seconds[op_id])
                executed.add(op_id)
                arriving = [value for value in dict.fromkeys((*op.inputs, *op.writes)) if value in arrivals]
                if arriving and span.ready_seconds > span.start_seconds:
                    latest = max(arriving, key=lambda value: arrivals[value])
                    add(DecisionKind.OFFLOAD, _value_layer(graph, latest), span.ready_seconds - span.start_seconds)
                for value in arriving:
                    del arrivals[value]
            case Free(value) if span.end_seconds > span.start_seconds:
                add(DecisionKind.OFFLOAD, _value_layer(graph, value), span.end_seconds - span.start_seconds)
            case Offload(value) | Prefetch(value) as transfer:
                moved[_value_layer(graph, value)] += graph.values[value].nbytes
                moved[""] += graph.values[value].nbytes
                if isinstance(transfer, Prefetch) and span.transfer is not None:
                    arrivals[value] = span.transfer[1]
    return seconds, moved


def _value_layer(graph: TrainGraph, value: int) -> str:
    """Return the module that produces a value, or for an input of the step the first module that reads it."""
    op = graph.producer[value]
    if op is None:
        op = next(iter(graph.consumers[value]), None)
    return NO_LAYER if op is None else _op_layer(graph, op)


def _op_layer(graph: TrainGraph, op: int) -> str:
    return graph.ops[op].layer or NO_LAYER


def _is_gradient(graph: TrainGraph, value: int) -> bool:
    op = graph.producer[value]
    return op is not None and graph.ops[op].phase is Phase.BACKWARD


def _is_compute(graph: TrainGraph, instruction: Instruction) -> bool:
    return isinstance(instruction, Run) and graph.ops[instruction.op].phase is not Phase.UPDATE
