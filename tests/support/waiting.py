"""Wait for what another thread or another process does."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return as soon as a condition is true; raise AssertionError if it is still false after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{condition} is still false after {seconds:g} s"
        time.sleep(0.01)
