"""Queue copies between a GPU and host memory beside the computing stream."""

import time
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

    def use(self, device: Any) -> None:
        """Make the streams on the first call. Raises StoreError for another device later."""
        if self.device is not None:
            if device != self.device:
                raise StoreError(
                    f"{self._store_name} store: it holds values of {self.device}, not of {device}; put model and batch on one GPU"
                )
            return
        self.device = device
        with self._cuda.device(device):
            self._streams = {direction: self._cuda.Stream(device) for direction in Direction}
            self._start_event = self.mark(self._cuda.current_stream(device))
            self._start_event.synchronize()
        self._start_seconds = time.perf_counter()

    def mark(self, stream: Any) -> Any:
        """Return an event behind the work that is queued on a stream now. To wait for it takes no CPU."""
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def mark_computing(self) -> Any:
        """Return an event behind the work that is queued on the caller's computing stream now."""
        return self.mark(self._cuda.current_stream(self.device))

    def seconds(self, event: Any) -> float:
        """Return the time of an event that has happened, in seconds of `time.perf_counter`."""
        return self._start_seconds + float(self._start_event.elapsed_time(event)) / 1e3
