"""Failure messages of experiments that interleave variants with plain eager."""

import textwrap
from pathlib import Path

from autotune.measure.messages import ChildError

REASON = 120
"""Most characters of a shortened reason."""


def describe_failure(error: ChildError) -> str:
    """Describe a child process's failure in one line, without this machine's paths."""
    return remove_paths(error.summary())


def remove_paths(text: str) -> str:
    """Remove this machine's path of the experiments from a message."""
    return text.replace(f"{Path(__file__).parents[1]}/", "")


def shorten_reason(reason: str) -> str:
    """Return the first line of a failure, of at most `REASON` characters.

    >>> shorten_reason("crashed: no memory is left")
    'crashed: no memory is left'
    """
    return textwrap.shorten(reason.partition("\n")[0], REASON, placeholder=" ...")
