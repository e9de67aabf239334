"""Refuse a loss whose Python code changes an object: a captured step does not repeat the change."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from autotune.capture.python.side_effects import SideEffectWarning
from autotune.errors import CaptureError

_FILTER = ("error", None, SideEffectWarning, None, 0)
"""Filter as `warnings.simplefilter("error", SideEffectWarning)` inserts it."""


@contextmanager
def refuse_side_effects(advice: str) -> Iterator[None]:
    """Raise CaptureError for a step that is captured in the block and changes a Python object: a metric, say, would be lost.

    Any step may be captured again, so the block surrounds each one.

    Args:
        advice: Where to make the change instead; continues the message.
    """
    # `warnings.catch_warnings` around each step would let Python repeat warnings in each that it shows once
    filters: Any = warnings.filters
    filters.insert(0, _FILTER)
    try:
        yield
    except SideEffectWarning as effect:
        raise CaptureError(f"{effect}, {advice}") from effect
    finally:
        with suppress(ValueError):  # the block may have reset all filters
            filters.remove(_FILTER)
