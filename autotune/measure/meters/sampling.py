"""The peak of a number that nothing else records, sampled by a thread."""

import threading
from collections.abc import Callable


class SampledPeak:
    """The highest reading from `start` to `stop`; a peak shorter than the interval may be missed."""

    def __init__(self, read: Callable[[], int], interval_seconds: float = 0.002) -> None:
        self._read = read
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._peak = 0

    def start(self) -> None:
        """Start the thread; the peak begins with the present reading."""
        self._peak = self._read()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="autotune-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Sample once more and end the thread."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            self._sample()

    @property
    def peak(self) -> int:
        """Highest reading so far."""
        if self._thread is not None:
            self._sample()
        return self._peak

    def _sample(self) -> None:
        self._peak = max(self._peak, self._read())

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval):
            self._sample()
