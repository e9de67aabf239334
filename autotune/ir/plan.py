"""A plan: the decisions about one training step, as stored in files."""

from dataclasses import dataclass, replace
from typing import Protocol, Self

from autotune.ir.graph import Phase, Role, TrainGraph

OFFLOADABLE_ROLES = (Role.PARAM, Role.STATE)
"""Roles of graph inputs that may be offloaded during a step. All of them are resident again when the step ends."""

REBUILD_PRICE = 4.0
"""Default rebuild price. Regions minimize the bytes kept for the backward pass, plus this number times the bytes that
rebuilding ops read or write. At the default regions rebuild hardly anything, and planners decide what is recomputed.
"""


class CaptureSettings(Protocol):
    """Settings that all plans of a study share; the fields of `Plan` with these names describe them."""

    @property
    def kernels(self) -> str: ...
    @property
    def memory_format(self) -> str: ...
    @property
    def rebuild_price(self) -> float: ...
    @property
    def threads(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Swap:
    """Offload of a value during one gap between its uses.

    A value's events are its runs and reads in the plan's order, counted from 0. Gap `g` lies between event `g` and
    event `g + 1`, which must be a read. Gap -1, of a weight or of optimizer state, lies before the first event.
    """

    value: int
    gap: int
    late: int = 0
    """Layers beyond the plan's window during which the value may still be written, where memory allows it."""
    early: int = 0
    """Layers beyond the plan's window by which the value is prefetched earlier."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """A run that writes its output to the buffer of an input, as the last reader of that input."""

    position: int
    """Position of the run in the plan's order."""
    value: int
    """Input that is overwritten."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions about one graph. Ids are positions in that graph, so a plan fits no other graph.

    A plan that recomputes op 0 before op 2, and one that offloads value 1 between its first two events:

    >>> Plan((0, 1, 0, 2)).recomputed
    1
    >>> plan = Plan((0, 1, 2, 3), (Swap(1, 0),), store="ssd")
    """

    order: tuple[int, ...]
    """Ops in execution order. An op that is listed again is recomputed there; readers use its latest run."""
    offload: tuple[Swap, ...] = ()
    window: int = 1
    """Layers during which a value is written after its own layer, and by which it is prefetched ahead of its reader."""
    store: str = ""
    """Name of the store that receives the offloaded values; empty if there are none."""
    allocator: str = "system"
    """Memory allocator of the step: `system`, or `arena` for planned offsets in one block."""
    inplace: tuple[InPlace, ...] = ()
    memory_format: str = ""
    """Memory format that the graph was captured in: `channels_last`, or empty for the format of the user's model."""
    kernels: str = ""
    """Kernels that the graph's ops run: `inductor` for compiled regions, or empty for the kernels of eager."""
    rebuild_price: float = REBUILD_PRICE
    """Price at which the graph's regions rebuild a byte; the default without kernels, which have no regions."""
    threads: int = 0
    """Number of threads that torch's CPU ops use during the step; 0 for the number that the process has."""

    def __post_init__(self) -> None:
        if not self.kernels:
            object.__setattr__(self, "rebuild_price", REBUILD_PRICE)

    @classmethod
    def traced(cls, graph: TrainGraph) -> Self:
        """Return the plan that runs every op once, in traced order."""
        return cls(tuple(range(len(graph.ops))))

    def captured_as(self, settings: CaptureSettings) -> Self:
        """Return this plan with the kernels, memory format, rebuild price and threads of `settings`."""
        return replace(
            self,
            kernels=settings.kernels,
            memory_format=settings.memory_format,
            rebuild_price=settings.rebuild_price,
            threads=settings.threads,
        )

    @property
    def capture_name(self) -> str:
        """Kernels, memory format, an unusual rebuild price and number of threads as text: `aten`, or `inductor, 4 threads`."""
        price = "" if self.rebuild_price == REBUILD_PRICE else f"rebuild price {self.rebuild_price:g}"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else ""
        return ", ".join(filter(None, (self.kernels or "aten", self.memory_format, price, threads)))

    @property
    def recomputed(self) -> int:
        """Number of runs that are recomputations."""
        return len(self.order) - len(set(self.order))


def events(graph: TrainGraph, order: tuple[int, ...]) -> list[list[tuple[int, bool]]]:
    """Return per value its events in `order`: (position, True for a run and False for a read).

    A change in place counts as a read.
    """
    result: list[list[tuple[int, bool]]] = [[] for _ in graph.values]
    for position, op_id in enumerate(order):
        op = graph.ops[op_id]
        for value in dict.fromkeys((*op.inputs, *op.writes)):
            result[value].append((position, False))
        for value in op.outputs:
            result[value].append((position, True))
    return result


def early_updates(graph: TrainGraph, order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parameter updates after which `order` still runs forward or backward ops."""
    last = max((position for position, op in enumerate(order) if graph.ops[op].phase is not Phase.UPDATE), default=-1)
    return tuple(op for op in order[: last + 1] if graph.ops[op].phase is Phase.UPDATE and _has_gradient(graph, op))


def _has_gradient(graph: TrainGraph, op_id: int) -> bool:
    producers = (graph.producer[value] for value in graph.ops[op_id].inputs)
    return any(producer is not None and graph.ops[producer].phase is Phase.BACKWARD for producer in producers)
