"""Time of a simulated step: one engine that computes and one for each direction of the store, each slowed by the others."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.ir.costs import StoreCost


@dataclass(slots=True, eq=False)
class Transfer:
    """One on its way: it begins when its direction is free, and its pace changes with what goes on beside it."""

    left: float
    """Bytes still to move, and those that could have been moved in the time until the first one did."""
    start: float = 0.0
    end: float | None = None
    """None as long as it is under way."""


class Clock:
    """Time of the executing thread, and the transfers that go on beside it. Without a store there are none."""

    def __init__(self, store: StoreCost | None) -> None:
        self.now = 0.0
        self.stalled = 0.0
        """Seconds of `now` in which nothing was computed."""
        self._store = store
        self._writes: deque[Transfer] = deque()
        self._reads: deque[Transfer] = deque()
        self._written: dict[int, Transfer] = {}
        self._loaded: dict[int, Transfer] = {}

    def run(self, touched: Iterable[int], seconds: float) -> float:
        """Wait for the values, then compute for so long as it takes alone, slowed by transfers; gives when it began."""
        for value in touched:
            if (load := self._loaded.pop(value, None)) is not None:
                self._wait(load)
        began = self.now
        while self._writes or self._reads:
            assert self._store is not None
            took = self._advance(seconds * self._store.contention, computing=True)
            seconds -= took / self._store.contention
            if seconds <= 0.0:
                return began
        self.now += seconds
        return began

    def write(self, value: int, nbytes: int) -> Transfer:
        """Begin to write once the writes before it have ended."""
        assert self._store is not None
        made = self._written[value] = self._begin(self._writes, nbytes, self._store.write_bytes_per_second)
        return made

    def read(self, value: int, nbytes: int) -> Transfer:
        """Begin to read once the reads before it have ended."""
        assert self._store is not None
        made = self._loaded[value] = self._begin(self._reads, nbytes, self._store.read_bytes_per_second)
        return made

    def free(self, value: int) -> None:
        """Wait until the value is written, if it is on its way."""
        if (save := self._written.pop(value, None)) is not None:
            self._wait(save)
        self._loaded.pop(value, None)

    def settle(self) -> None:
        """Let every transfer end, in a time that the step does not see."""
        now = self.now
        while self._writes or self._reads:
            self._advance(float("inf"), computing=False)
        self.now = now

    def _begin(self, lane: deque[Transfer], nbytes: int, rate: float) -> Transfer:
        assert self._store is not None
        made = Transfer(nbytes + self._store.latency_seconds * rate, self.now)
        lane.append(made)
        return made

    def _wait(self, transfer: Transfer) -> None:
        while transfer.end is None:
            self.stalled += self._advance(float("inf"), computing=False)

    def _advance(self, limit: float, *, computing: bool) -> float:
        """Go on until the first transfer ends, or for `limit` seconds; gives the seconds."""
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
        took = min(limit, *(lane[0].left * slowed / rate for lane, rate in moving))
        self.now += took
        for lane, rate in moving:
            if lane[0].left * slowed / rate <= took:
                lane.popleft().end = self.now
                if lane:
                    lane[0].start = self.now
            else:
                lane[0].left -= took * rate / slowed
        return took
