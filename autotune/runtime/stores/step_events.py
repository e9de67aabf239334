"""Record one step's transfers and waits by events of the GPU.

A step is queued long before the GPU runs it. The host's clock then shows neither its duration nor its stalls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autotune.records.measurement import Span, TransferTrace
from autotune.runtime.stores import Direction


class StepEvents:
    """Events of one step on the computing stream and on the copying streams.

    Args:
        cuda: `torch.cuda`, or its replacement in tests.
        device: GPU of the step.
        host_seconds: Returns the time of an event in seconds of `time.perf_counter`.
    """

    def __init__(self, cuda: Any, device: Any, host_seconds: Callable[[Any], float]) -> None:
        self._cuda, self._device, self._host_seconds = cuda, device, host_seconds
        self._start = self.record()
        self._end: Any = None
        self._copies: dict[Direction, list[tuple[Any, Any]]] = {direction: [] for direction in Direction}
        self._transfers: dict[Direction, list[Span]] = {direction: [] for direction in Direction}
        self._waits: dict[Direction, list[tuple[Any, Any]]] = {direction: [] for direction in Direction}

    def record(self) -> Any:
        """Return an event behind the work that is queued on the computing stream now."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def add_copy(self, direction: Direction, start: Any, end: Any) -> None:
        """Add a queued copy by the events at its start and end."""
        self._copies[direction].append((start, end))

    def add_transfer(self, direction: Direction, start: float, end: float) -> None:
        """Add a transfer that has ended, by its start and end in seconds of `time.perf_counter`."""
        self._transfers[direction].append((start, end))

    @contextmanager
    def waiting(self, direction: Direction) -> Iterator[None]:
        """Record the wait for transfers of a direction that the context queues on the computing stream."""
        start = self.record()
        yield
        self._waits[direction].append((start, self.record()))

    def end(self) -> None:
        """Mark the end of the step."""
        self._end = self.record()

    def trace(self) -> TransferTrace:
        """Return the step's transfers and stalls, in seconds since its start; wait until the GPU has run all of it."""
        self._end.synchronize()
        for copies in self._copies.values():
            for _, end in copies:
                end.synchronize()
        return TransferTrace(
            self._seconds(self._end),
            self._transfer_spans(Direction.WRITE),
            self._transfer_spans(Direction.READ),
            self._spans(self._waits[Direction.WRITE]),
            self._spans(self._waits[Direction.READ]),
        )

    def _transfer_spans(self, direction: Direction) -> tuple[Span, ...]:
        began = self._host_seconds(self._start)
        ended = tuple((start - began, end - began) for start, end in self._transfers[direction])
        return self._spans(self._copies[direction]) + ended

    def _spans(self, pairs: list[tuple[Any, Any]]) -> tuple[Span, ...]:
        return tuple((self._seconds(start), self._seconds(end)) for start, end in pairs)

    def _seconds(self, event: Any) -> float:
        return float(self._start.elapsed_time(event)) / 1e3
