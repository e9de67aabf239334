"""What the decisions of a plan save and cost, module by module: bytes at the highest moment, seconds of a step."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.ir.graph import Phase, TrainGraph
from autotune.ir.plan import early_updates
from autotune.ir.schedule import Free, Offload, Prefetch, Run
from autotune.predict.step_view import NO_LAYER, Walk

RECOMPUTE, OFFLOAD, INPLACE, UPDATE = "computed again", "sent to the store", "made in place", "updated at once"
KINDS = (RECOMPUTE, OFFLOAD, INPLACE, UPDATE)


@dataclass(frozen=True, slots=True)
class Decision:
    """One kind of decision about one module."""

    kind: str
    """One of `KINDS`."""
    layer: str
    """Path of the module; empty for all of them together, which save no less than any of them alone."""
    saved_bytes: int
    """By how much the highest moment of the step would rise if these bytes stayed in memory."""
    seconds: float
    """Computing again, or waiting for the store, of one step."""
    moved_bytes: int
    """Written and read, of one step."""


@dataclass(frozen=True, slots=True)
class _Absence:
    """Bytes that a decision keeps out of memory from instruction `first` to instruction `last`."""

    kind: str
    layer: str
    nbytes: int
    first: int
    last: int


def decisions(walk: Walk) -> list[Decision]:
    """Of every kind that the plan made use of the whole, then its modules, those that save most first."""
    gone: dict[tuple[str, str], list[_Absence]] = defaultdict(list)
    for absence in _absences(walk):
        gone[absence.kind, absence.layer].append(absence)
        gone[absence.kind, ""].append(absence)
    seconds, moved = _spent(walk)
    during = np.array([span.moment.during_bytes for span in walk.spans], dtype=np.int64)
    found = [
        Decision(kind, layer, _saved(during, gone[kind, layer]), seconds[kind, layer], moved[layer] * (kind == OFFLOAD))
        for kind, layer in {**gone, **seconds}
    ]
    return sorted(found, key=lambda one: (KINDS.index(one.kind), one.layer != "", -one.saved_bytes, one.layer))


def _saved(during: npt.NDArray[np.int64], gone: Iterable[_Absence]) -> int:
    change = np.zeros(len(during) + 1, dtype=np.int64)
    for absence in gone:
        change[absence.first] += absence.nbytes
        change[absence.last + 1] -= absence.nbytes
    return int((during + np.cumsum(change[:-1])).max() - during.max())


def _absences(walk: Walk) -> Iterator[_Absence]:
    """Every stretch of the step during which a decision keeps a value out of memory.

    A value that is made again only for others that are made again too would be gone anyway.
    """
    graph, order = walk.graph, walk.schedule
    runs = [made.op for made in order.instructions if isinstance(made, Run)]
    first = {op: at for at, op in reversed(list(enumerate(runs)))}
    last_read = [-1] * len(graph.values)
    for op, at in first.items():
        for value in (*graph.ops[op].inputs, *graph.ops[op].writes):
            last_read[value] = max(last_read[value], at)
    for value in graph.outputs:
        last_read[value] = len(runs)
    early = set(early_updates(graph, tuple(runs)))
    last_needed = max((at for at, one in enumerate(order.instructions) if _computes(graph, one)), default=-1)
    freed: dict[int, tuple[int, int]] = {}  # value: (instruction, runs until then)
    reader: dict[int, int] = {}
    count = 0
    for at, instruction in enumerate(order.instructions):
        match instruction:
            case Run(op, takes):
                made = graph.ops[op]
                for value in made.outputs:
                    if value in freed and last_read[value] >= freed[value][1]:
                        yield _Absence(
                            RECOMPUTE, _module(graph, op), graph.values[value].nbytes, freed[value][0] + 1, at - 1
                        )
                if takes is not None and takes != made.given:
                    yield _Absence(INPLACE, _module(graph, op), graph.values[takes].nbytes, at, at)
                    freed[takes] = at, count + 1
                reader.update(dict.fromkeys((*made.inputs, *made.writes), op))
                count += 1
            case Free(value):
                freed[value] = at, count
                if reader.get(value) in early and _is_gradient(graph, value) and at < last_needed:
                    yield _Absence(UPDATE, _layer(graph, value), graph.values[value].nbytes, at + 1, last_needed)
            case Prefetch(value):
                yield _Absence(OFFLOAD, _layer(graph, value), graph.values[value].nbytes, freed[value][0] + 1, at - 1)
            case Offload(_):
                pass


def _spent(walk: Walk) -> tuple[dict[tuple[str, str], float], Counter[str]]:
    """(seconds by kind and module, bytes through the store by module); a wait is that of the value that came last."""
    graph = walk.graph
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    moved: Counter[str] = Counter()
    arrives: dict[int, float] = {}
    ran: set[int] = set()

    def spend(kind: str, layer: str, amount: float) -> None:
        seconds[kind, layer] += amount
        seconds[kind, ""] += amount

    for span in walk.spans:
        match span.moment.instruction:
            case Run(op):
                made = graph.ops[op]
                if op in ran:
                    spend(RECOMPUTE, _module(graph, op), walk.costs.seconds[op])
                ran.add(op)
                coming = [value for value in dict.fromkeys((*made.inputs, *made.writes)) if value in arrives]
                if coming and span.ready_seconds > span.start_seconds:
                    late = max(coming, key=lambda value: arrives[value])
                    spend(OFFLOAD, _layer(graph, late), span.ready_seconds - span.start_seconds)
                for value in coming:
                    del arrives[value]
            case Free(value) if span.end_seconds > span.start_seconds:
                spend(OFFLOAD, _layer(graph, value), span.end_seconds - span.start_seconds)
            case Offload(value) | Prefetch(value) as moves:
                moved[_layer(graph, value)] += graph.values[value].nbytes
                moved[""] += graph.values[value].nbytes
                if isinstance(moves, Prefetch) and span.transfer is not None:
                    arrives[value] = span.transfer[1]
    return seconds, moved


def _layer(graph: TrainGraph, value: int) -> str:
    """Of the op that makes a value, or of the user's own, the first that reads it."""
    maker = graph.producer[value]
    if maker is None:
        maker = next(iter(graph.consumers[value]), None)
    return NO_LAYER if maker is None else _module(graph, maker)


def _module(graph: TrainGraph, op: int) -> str:
    return graph.ops[op].layer or NO_LAYER


def _is_gradient(graph: TrainGraph, value: int) -> bool:
    maker = graph.producer[value]
    return maker is not None and graph.ops[maker].phase is Phase.BACKWARD


def _computes(graph: TrainGraph, instruction: object) -> bool:
    return isinstance(instruction, Run) and graph.ops[instruction.op].phase is not Phase.UPDATE
