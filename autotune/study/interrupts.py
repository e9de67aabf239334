"""Signals: how a study stops."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(BaseException):
    """The running trial is to be given up now; no `except Exception` may swallow it."""


class Interrupts:
    """One SIGINT asks to stop after the running trial; a second one, or SIGTERM, gives the trial up."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the last signal; 0 for none."""
        self._urgent = False
        self._breakable = False
        self._patient = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._urgent = bool(self.received) or number == signal.SIGTERM
        self.received = number
        if self._breakable and (self._urgent or not self._patient):
            raise Stopped

    def check(self) -> None:
        """Stop between two trials if a signal asked for it."""
        if self.received:
            raise Stopped

    @contextmanager
    def breakable(self, *, patient: bool = True) -> Iterator[None]:
        """A stretch that a signal may break: the second one, or where there is nothing to finish (not `patient`) any."""
        if self._urgent or not patient:
            self.check()
        self._breakable, self._patient = True, patient
        try:
            yield
        finally:
            self._breakable = False
