"""The highest of a number that must be looked at again and again, because nothing else remembers it."""

import threading
from collections.abc import Callable


class Highest:
    """Reads in a thread from `start` to `stop`; what lasts shorter than the interval may go unseen."""

    def __init__(self, read: Callable[[], int], interval_seconds: float = 0.002) -> None:
        self._read = read
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._highest = 0

    def start(self) -> None:
        self._highest = self._read()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._watch, name="autotune-meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
            self._look()

    @property
    def highest(self) -> int:
        if self._thread is not None:
            self._look()
        return self._highest

    def _look(self) -> None:
        self._highest = max(self._highest, self._read())

    def _watch(self) -> None:
        while not self._stopping.wait(self._interval):
            self._look()
