"""Failure messages of experiments that interleave variants with plain eager."""

from pathlib import Path

from autotune.measure.messages import ChildError


def describe_failure(error: ChildError) -> str:
    """Describe a child process's failure in one line, without this machine's paths."""
    return remove_paths(error.summary())


def remove_paths(text: str) -> str:
    """Remove this machine's path of the experiments from a message."""
    return text.replace(f"{Path(__file__).parents[1]}/", "")
