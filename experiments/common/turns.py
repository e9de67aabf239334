"""Confidence intervals and failure messages of experiments that interleave variants with plain eager."""

from collections.abc import Sequence
from pathlib import Path

from autotune.measure.messages import ChildError
from autotune.study.verdicts.statistics import median_interval


def median_bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratios' median by order statistics; the range of fewer than six."""
    median = median_interval(ratios)
    return median.low, median.high


def describe_failure(error: ChildError) -> str:
    """Describe a child process's failure in one line, without this machine's paths."""
    return remove_paths(error.summary())


def remove_paths(text: str) -> str:
    """Remove this machine's path of the experiments from a message."""
    return text.replace(f"{Path(__file__).parents[1]}/", "")
