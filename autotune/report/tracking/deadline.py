"""Call a client whose server may never answer, with a limit on the total time of each call."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

CALL_LIMIT_SECONDS = 30.0
"""Limit on one call to a tracking server; a server that sends a byte a second never reaches a limit on each read."""


class UnansweredError(OSError):
    """Raised when a tracking server does not complete its answer in time."""


def call_within(seconds: float | None, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return the result of a call in another thread; UnansweredError after `seconds`. The thread is then abandoned.

    Without a limit the call runs in this thread.

    >>> call_within(5.0, max, 1, 2)
    2
    """
    if seconds is None:
        return function(*arguments, **options)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*arguments, **options))
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            errors.append(error)

    # a daemon: an abandoned call must not keep the process from ending
    thread = threading.Thread(target=run, name="tracking", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise UnansweredError(f"no complete answer within {seconds:g} s")
    return results[0]


class LimitedClient:
    """Client whose every method has a limit on its total time."""

    def __init__(self, client: Any, seconds: float | None = None) -> None:
        self._client, self._seconds = client, CALL_LIMIT_SECONDS if seconds is None else seconds

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not callable(method):
            return method
        return lambda *arguments, **options: call_within(self._seconds, method, *arguments, **options)
