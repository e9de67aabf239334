"""Stop a study by SIGINT, SIGTERM or SIGHUP."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(BaseException):
    """The study stops here and drops the running trial. Not an Exception, so that no handler catches it by accident."""


class Expired(Stopped):
    """The time of a `with` block is up, and it still waits."""


@contextmanager
def expire_after(seconds: float) -> Iterator[None]:
    """Raise Expired inside a `with` block after so many seconds; infinity for no limit.

    Outside of the main thread, which alone handles signals, the block has no limit.
    """
    if not math.isfinite(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # zero would disarm it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _expire(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Expired


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt inside a `with` block on SIGTERM and SIGHUP, too, with the number of the signal.

    A signal that the process ignores stays ignored. Outside of the main thread signals keep their handlers.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise KeyboardInterrupt(number)


class Interrupts:
    """Signal handlers of a study: one SIGINT stops it after the running trial, a second one, SIGTERM or SIGHUP at once.

    A signal that the process ignores stays ignored: `nohup` ignores SIGHUP, and shells ignore SIGINT in jobs of a script.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the last signal; 0 for none."""
        self._urgent = False
        self._breakable = False
        self._patient = True
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._urgent = bool(self.received) or number in (signal.SIGTERM, signal.SIGHUP)
        self.received = number
        if self._breakable and (self._urgent or not self._patient):
            raise Stopped

    def check(self) -> None:
        """Raise Stopped between two trials if a signal arrived."""
        if self.received:
            raise Stopped

    @contextmanager
    def breakable(self, *, patient: bool = True) -> Iterator[None]:
        """Let a signal raise Stopped inside a `with` block.

        A `patient` block runs on after a first SIGINT; any signal breaks a block that is not.
        """
        if self._urgent or not patient:
            self.check()
        self._breakable, self._patient = True, patient
        try:
            yield
        finally:
            self._breakable = False
