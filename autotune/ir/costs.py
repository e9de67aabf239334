"""What ops and stores were measured to take on a device: the numbers that planners and the simulator work with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.ir.graph import TrainGraph


@dataclass(frozen=True, slots=True)
class StoreCost:
    """What a store was measured to do on this device."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    write_beside_read_bytes_per_second: float
    """Writing while a read is under way."""
    read_beside_write_bytes_per_second: float
    latency_seconds: float = 0.0
    """What a transfer takes beyond its bytes."""
    pool_bytes: int = 0
    """Bounce buffers that the store holds as long as it is open."""
    holds_memory: bool = False
    """Its bytes lie in this device's own memory (a RAM-disk on a CPU): offloading there frees nothing."""
    least_own_bytes: int = 0
    """Of the user's own weights and state smaller ones free nothing when they leave: the allocator keeps what it shares."""
    contention: float = 1.0
    """Seconds that an op takes beside a transfer, over its seconds alone."""
    slowed: float = 1.0
    """Seconds that a transfer takes beside an op, over its seconds alone."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What each op was measured to take on this device; lists run parallel to the graph's ops."""

    seconds: tuple[float, ...]
    scratch_bytes: tuple[int, ...]
    """Bytes that an op takes on top of its outputs and gives back before it ends; below 0 where it is planned with what
    it will make in the buffer of an input."""
    stores: dict[str, StoreCost] = field(default_factory=dict)

    @classmethod
    def unit(cls, graph: TrainGraph) -> "Costs":
        """One second and no scratch for every op: for graphs that nobody ran."""
        return cls((1.0,) * len(graph.ops), (0,) * len(graph.ops))

    @classmethod
    def of(cls, graph: TrainGraph, seconds: Sequence[float], scratch_bytes: Sequence[int]) -> "Costs":
        """Of ops that were measured one by one: what one of them makes for another to take, it is not charged for."""
        charged = list(seconds)
        for op in graph.ops:
            if op.given is not None and (maker := graph.producer[op.given]) is not None:
                charged[maker] = max(0.0, charged[maker] - seconds[op.id])
        return cls(tuple(charged), tuple(scratch_bytes))

    def belong_to(self, graph: TrainGraph) -> bool:
        """Whether there is one figure for each of its ops: files of two runs may lie beside each other."""
        return len(self.seconds) == len(self.scratch_bytes) == len(graph.ops)
