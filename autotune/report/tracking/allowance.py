"""Limit the time that logging takes of a search: a slow server must not use the time of the measurements."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_SECONDS = 60.0
"""Seconds of logging in any case: the first use imports MLflow, and may create a database."""
SHARE = 0.05
"""Share of the time since the search began that logging may use beyond these seconds."""


class TimeAllowance:
    """Seconds that logging may use so far: a number of seconds, and a share of the elapsed time."""

    def __init__(self, seconds: float, share: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._share, self._clock = seconds, share, clock
        self._began, self._used = clock(), 0.0
        self._running_since: float | None = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Count the time of a `with` block as used."""
        begun = self._running_since = self._clock()
        try:
            yield
        finally:
            self._used += self._clock() - begun
            self._running_since = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this allowance."""
        return self._clock() - self._began

    @property
    def is_left(self) -> bool:
        """True while less than the allowed time is used."""
        running = 0.0 if self._running_since is None else self._clock() - self._running_since
        return self._used + running < self._seconds + self._share * self.elapsed
