"""Measured costs of a device's ops and stores: the numbers that planners and the simulator compute with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.ir.graph import TrainGraph

PAGE_BYTES = 4096
"""Size of a memory page in bytes. Slots of a store are whole pages."""


@dataclass(frozen=True, slots=True)
class StoreCost:
    """Measured bandwidth, latency and memory of a store on this device."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    write_beside_read_bytes_per_second: float
    """Write bandwidth while a read is under way."""
    read_beside_write_bytes_per_second: float
    """Read bandwidth while a write is under way."""
    latency_seconds: float = 0.0
    """Fixed time of a transfer, independent of its size."""
    pool_bytes: int = 0
    """Bounce buffers that an open store occupies."""
    holds_memory: bool = False
    """True if the store lies in this device's own memory, such as a RAM disk on a CPU: offloading frees nothing."""
    least_own_bytes: int = 0
    """Smallest parameter or optimizer state, in bytes, whose offload frees memory: the allocator keeps shared pages."""
    contention: float = 1.0
    """Slowdown of an op that runs beside a transfer."""
    slowed: float = 1.0
    """Slowdown of a transfer that runs beside an op."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured time and scratch memory of each op on this device. Tuples run parallel to the graph's ops."""

    seconds: tuple[float, ...]
    scratch_bytes: tuple[int, ...]
    """Bytes that an op allocates beside its outputs and frees before it ends.

    Negative where the op is charged for an output although it reuses the buffer of an input.
    """
    stores: dict[str, StoreCost] = field(default_factory=dict)
    device_kind: str = "cpu"
    """Kind of the device, `cpu` or `cuda`; a GPU's allocator has rules of its own."""

    @classmethod
    def unit(cls, graph: TrainGraph) -> "Costs":
        """Return one second and no scratch for every op, for graphs without measurements."""
        return cls((1.0,) * len(graph.ops), (0,) * len(graph.ops))

    @classmethod
    def from_measurements(
        cls, graph: TrainGraph, seconds: Sequence[float], scratch_bytes: Sequence[int], device_kind: str = "cpu"
    ) -> "Costs":
        """Return costs of ops that were measured one by one, in the order of the graph's ops.

        An op whose second result is the output of an alias op is charged only for the time beyond that op's.
        """
        charged = list(seconds)
        for op in graph.ops:
            if op.alias_of is not None and (producer := graph.producer[op.alias_of]) is not None:
                charged[producer] = max(0.0, charged[producer] - seconds[op.id])
        return cls(tuple(charged), tuple(scratch_bytes), device_kind=device_kind)

    def matches(self, graph: TrainGraph) -> bool:
        """Return True if there is one figure for each op of the graph: files of two runs may lie side by side."""
        return len(self.seconds) == len(self.scratch_bytes) == len(graph.ops)
