"""Time of a simulated step: one computing engine and one engine for each direction of the store."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.ir.costs import StoreCost


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer. It starts when its direction is free; its pace depends on what runs beside it."""

    left: float
    """Bytes still to move, including the bytes that could have moved during the latency."""
    start: float = 0.0
    """Start of the transfer in seconds."""
    end: float | None = None
    """End of the transfer in seconds; None while it is under way."""


class TransferClock:
    """Time of the executing thread, and the transfers beside it. Without a store there are no transfers."""

    def __init__(self, store: StoreCost | None) -> None:
        self.now = 0.0
        """Current time in seconds."""
        self.stalled = 0.0
        """Seconds of `now` during which the thread waited."""
        self._store = store
        self._writes: deque[Transfer] = deque()
        self._reads: deque[Transfer] = deque()
        self._written: dict[int, Transfer] = {}
        self._loaded: dict[int, Transfer] = {}

    def run(self, touched: Iterable[int], seconds: float) -> float:
        """Wait for the reads of the touched values, then compute. Return the start of the computation.

        `seconds` is the op's time alone; transfers beside it slow it down.
        """
        for value in touched:
            if (load := self._loaded.pop(value, None)) is not None:
                self._wait(load)
        start = self.now
        while self._writes or self._reads:
            assert self._store is not None
            elapsed = self._advance(seconds * self._store.contention, computing=True)
            seconds -= elapsed / self._store.contention
            if seconds <= 0.0:
                return start
        self.now += seconds
        return start

    def write(self, value: int, nbytes: int) -> Transfer:
        """Queue a write behind the earlier writes and return it."""
        assert self._store is not None
        transfer = self._written[value] = self._enqueue(self._writes, nbytes, self._store.write_bytes_per_second)
        return transfer

    def read(self, value: int, nbytes: int) -> Transfer:
        """Queue a read behind the earlier reads and return it."""
        assert self._store is not None
        transfer = self._loaded[value] = self._enqueue(self._reads, nbytes, self._store.read_bytes_per_second)
        return transfer

    def free(self, value: int) -> None:
        """Wait for the value's write, if one is under way."""
        if (save := self._written.pop(value, None)) is not None:
            self._wait(save)
        self._loaded.pop(value, None)

    def settle(self) -> None:
        """Finish all transfers without a change of `now`."""
        now = self.now
        while self._writes or self._reads:
            self._advance(float("inf"), computing=False)
        self.now = now

    def _enqueue(self, queue: deque[Transfer], nbytes: int, rate: float) -> Transfer:
        assert self._store is not None
        transfer = Transfer(nbytes + self._store.latency_seconds * rate, self.now)
        queue.append(transfer)
        return transfer

    def _wait(self, transfer: Transfer) -> None:
        while transfer.end is None:
            self.stalled += self._advance(float("inf"), computing=False)

    def _advance(self, limit: float, *, computing: bool) -> float:
        """Advance until the first transfer ends, by `limit` seconds at most. Return the elapsed seconds."""
        assert self._store is not None
        store, slowed = self._store, self._store.slowed if computing else 1.0
        both = bool(self._writes and self._reads)
        moving = []
        if self._writes:
            moving.append(
                (self._writes, store.write_beside_read_bytes_per_second if both else store.write_bytes_per_second)
            )
        if self._reads:
            moving.append(
                (self._reads, store.read_beside_write_bytes_per_second if both else store.read_bytes_per_second)
            )
        elapsed = min(limit, *(queue[0].left * slowed / rate for queue, rate in moving))
        self.now += elapsed
        for queue, rate in moving:
            if queue[0].left * slowed / rate <= elapsed:
                queue.popleft().end = self.now
                if queue:
                    queue[0].start = self.now
            else:
                queue[0].left -= elapsed * rate / slowed
        return elapsed
