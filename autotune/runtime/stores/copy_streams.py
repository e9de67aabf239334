"""Queue copies between a GPU and host memory beside the computing stream."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotune.errors import StoreError
from autotune.runtime.stores import Direction


class CopyStreams:
    """A stream for each direction, on the GPU of the first tensor: copies of another device's would not overlap.

    Args:
        store_name: Name of the store, for messages.
        cuda: `torch.cuda`, or its replacement in tests.
    """

    def __init__(self, store_name: str, cuda: Any) -> None:
        self.device: Any = None
        """GPU of the streams; None before the first tensor."""
        self._store_name, self._cuda = store_name, cuda
        self._streams: dict[Direction, Any] = {}
        self._start_event: Any = None
        self._start_seconds = 0.0

    def __getitem__(self, direction: Direction) -> Any:
        return self._streams[direction]

    def bind(self, device: Any) -> None:
        """Make the streams on the first call. Raises StoreError for another device later."""
        if self.device is not None:
            if device != self.device:
                raise StoreError(
                    f"{self._store_name} store: it holds values of {self.device}, not of {device}; put model and batch on one GPU"
                )
            return
        with self._cuda.device(device):
            self._streams = {direction: self._cuda.Stream(device) for direction in Direction}
        self.set_clock(device)
        self.device = device

    def set_clock(self, device: Any) -> None:
        """Compare the clocks of GPU and host anew: events hold few digits, and the clocks drift."""
        with self._cuda.device(device):
            # no copy is in flight between two steps, so that the host waits for nothing
            self._start_event = self.record_event(self._streams[Direction.READ])
            self._start_event.synchronize()
        self._start_seconds = time.perf_counter()

    @contextmanager
    def current(self, direction: Direction) -> Iterator[Any]:
        """Make a direction's stream current in this thread, and yield it."""
        # the device first: to leave the stream's context alone would switch a worker thread to GPU 0
        with self._cuda.device(self.device), self._cuda.stream(self._streams[direction]):
            yield self._streams[direction]

    def record_event(self, stream: Any) -> Any:
        """Return an event behind the work that is queued on a stream now. The host sleeps while it waits for it."""
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def record_computing(self) -> Any:
        """Return an event behind the work that is queued on the caller's computing stream now."""
        return self.record_event(self._cuda.current_stream(self.device))

    def seconds(self, event: Any) -> float:
        """Return the time of an event that has happened, in seconds of `time.perf_counter`."""
        return self._start_seconds + float(self._start_event.elapsed_time(event)) / 1e3
