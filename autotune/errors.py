"""Every error that autotune raises on purpose, each with the exit code that the command line gives it.

AutotuneError           1   a fault of ours, never raised bare
├── ConfigError         2   a config, a reference, an argument or a file that cannot be used
├── StoreError          2   a store directory that is missing, read-only or full
├── CaptureError        2   a model whose training step cannot be captured
├── RegressionError     3   a nightly champion that became worse
├── InfeasibleError     4   no plan fits the budget
├── InconclusiveError   5   a night whose numbers do not tell
├── PlanError           6   a plan that breaks a rule, or belongs to another graph
├── OutOfTimeError      7   a night that ended before all of its entries, and can be gone on with
├── NumericsError       8   a plan whose results differ from the reference
├── ExperimentError     8   an experiment that fails, or whose claim held before and does no longer
└── LockedError        75   another process works in the run directory
"""

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """Base of all: its message names the thing, the value and the next move, in one line."""

    exit_code = 1


class ConfigError(AutotuneError):
    """A config, a reference, an argument or a file that cannot be used."""

    exit_code = 2


class StoreError(AutotuneError):
    """A store directory that is missing, read-only or full."""

    exit_code = 2


class CaptureError(AutotuneError):
    """A model whose training step cannot be captured as one graph."""

    exit_code = 2


class RegressionError(AutotuneError):
    """A nightly champion that became worse."""

    exit_code = 3


class InfeasibleError(AutotuneError):
    """No plan fits the budget."""

    exit_code = 4


class InconclusiveError(AutotuneError):
    """A night whose numbers do not tell."""

    exit_code = 5


class PlanError(AutotuneError):
    """A plan that breaks a rule of its graph, or belongs to another graph."""

    exit_code = 6


class OutOfTimeError(AutotuneError):
    """A night that ended before all of its entries, and can be gone on with."""

    exit_code = 7


class NumericsError(AutotuneError):
    """A plan whose results differ from the reference."""

    exit_code = 8


class ExperimentError(AutotuneError):
    """An experiment that fails, or whose claim held before and does no longer."""

    exit_code = 8


class LockedError(AutotuneError):
    """Another process works in the run directory."""

    exit_code = 75


def nearest(name: str, known: Iterable[str]) -> str:
    """The next move after a name that is none of `known`: `; known: batch, size; did you mean 'batch'?`."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    # a package can hold hundreds of names: an error is one line
    listed = f"; known: {', '.join(known) or 'none'}" if len(known) <= 20 or not close else ""
    return listed + (f"; did you mean {close[0]!r}?" if close else "")
