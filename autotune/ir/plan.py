"""A plan: the decisions about one training step, as stored."""

from dataclasses import dataclass
from typing import Self

from autotune.ir.graph import Phase, Role, TrainGraph

MAY_LEAVE = (Role.PARAM, Role.STATE)
"""Of the user's own, what may be away during a step; all of it is back when the step ends."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A value away in the store during one gap.

    A value's events are its runs and reads in the plan's order, counted from 0; gap `g` lies between event `g` and
    event `g + 1`, which must be a read. Gap -1, of a weight or of optimizer state, lies before the first event.
    """

    value: int
    gap: int
    late: int = 0
    """Layers beside which it is saved beyond the plan's window: where memory is free its write may take longer."""
    early: int = 0
    """Layers that it is loaded ahead beyond the plan's window."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """A run that makes its output in the buffer of an input, of which it is the last reader."""

    position: int
    """Of the run in the plan's order."""
    value: int
    """The input that is overwritten."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions about one graph. Ids are positions in that graph, so a plan fits no other."""

    order: tuple[int, ...]
    """Ops as they run; an op listed again is recomputed there, and readers take its latest run."""
    offload: tuple[Swap, ...] = ()
    window: int = 1
    """Layers beside which a value is saved after its own has run, and that it is loaded ahead of the one that reads it."""
    store: str = ""
    """Name of the store that offloaded values go to; empty when none do."""
    allocator: str = "system"
    """Who hands out the step's memory: `system`, or `arena` for planned places in one block."""
    inplace: tuple[InPlace, ...] = ()
    memory_format: str = ""
    """What the graph was captured in: `channels_last`, or empty for the user's own."""

    @classmethod
    def traced(cls, graph: TrainGraph) -> Self:
        """Every op once, in the order in which it was traced."""
        return cls(tuple(range(len(graph.ops))))

    @property
    def recomputed(self) -> int:
        """How many runs of the order are repetitions."""
        return len(self.order) - len(set(self.order))


def events(graph: TrainGraph, order: tuple[int, ...]) -> list[list[tuple[int, bool]]]:
    """Per value its events in `order`: (position, whether it is a run). A change in place counts as a read."""
    found: list[list[tuple[int, bool]]] = [[] for _ in graph.values]
    for position, op_id in enumerate(order):
        op = graph.ops[op_id]
        for value in dict.fromkeys((*op.inputs, *op.writes)):
            found[value].append((position, False))
        for value in op.outputs:
            found[value].append((position, True))
    return found


def early_updates(graph: TrainGraph, order: tuple[int, ...]) -> tuple[int, ...]:
    """Updates of parameters after which `order` still runs forward or backward ops."""
    last = max((at for at, op in enumerate(order) if graph.ops[op].phase is not Phase.UPDATE), default=-1)
    return tuple(op for op in order[: last + 1] if graph.ops[op].phase is Phase.UPDATE and _has_gradient(graph, op))


def _has_gradient(graph: TrainGraph, op_id: int) -> bool:
    makers = (graph.producer[value] for value in graph.ops[op_id].inputs)
    return any(maker is not None and graph.ops[maker].phase is Phase.BACKWARD for maker in makers)
