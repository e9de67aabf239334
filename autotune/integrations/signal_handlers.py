"""Postpone handlers of signals while a planned step offloads weights: a handler that saves the model would save empty ones."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from autotune.runtime.executor import Executor

SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals by which schedulers announce the end of a job. Handlers such as Lightning's for Slurm save a checkpoint then."""


class PostponedHandlers:
    """Handlers of signals that wait for the end of a running step, from construction to `restore`.

    Args:
        running_step: Returns the executor of a step that runs now and offloads; None without one.
    """

    def __init__(self, running_step: Callable[[], Executor | None]) -> None:
        self._running_step = running_step
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: set[int] = set()
        if threading.current_thread() is not threading.main_thread():  # others cannot set handlers
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, int):
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the handlers, except where others have replaced these meanwhile."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        step = self._running_step()
        if step is None:
            self._waiting.discard(number)
            self._handlers[number](number, frame)
        elif number not in self._waiting:
            self._waiting.add(number)
            step.at_end = self._handle_later(number, step.at_end)

    def _handle_later(self, number: int, before: Callable[[], None] | None) -> Callable[[], None]:
        def handle() -> None:
            try:
                if before is not None:
                    before()
            finally:
                signal.raise_signal(number)

        return handle
