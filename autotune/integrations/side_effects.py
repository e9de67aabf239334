"""Refuse a loss whose Python code changes an object: a captured step does not repeat the change."""

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.capture.python.side_effects import SideEffectWarning
from autotune.capture.tracer import raises_side_effects
from autotune.errors import CaptureError


@contextmanager
def refuse_side_effects(advice: str) -> Iterator[None]:
    """Raise CaptureError for a step that is captured in the block and changes a Python object: a metric, say, would be lost.

    Any step may be captured again, so the block surrounds each one.

    Args:
        advice: Where to make the change instead; continues the message.
    """
    token = raises_side_effects.set(True)
    try:
        yield
    except SideEffectWarning as effect:
        raise CaptureError(f"{effect}, {advice}") from effect
    finally:
        raises_side_effects.reset(token)
