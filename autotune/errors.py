"""Every error that autotune raises on purpose, with the exit code that the command line returns for it.

AutotuneError           1   base class
├── ConfigError         2   unusable config, reference, argument or file
│   └── DeviceRefusedError  2   device or far end that cannot be used
├── StoreError          2   missing, read-only or full store directory
├── CaptureError        2   training step that cannot be captured
├── RegressionError     3   nightly champion that became worse
├── InfeasibleError     4   budget that no plan fits
├── InconclusiveError   5   nightly run whose measurements allow no verdict
├── PlanError           6   plan that breaks a rule, or belongs to another graph
├── OutOfTimeError      7   nightly run or study whose time ended before its last entry or first plan
├── NumericsError       8   plan whose results differ from the reference
├── ExperimentError     8   experiment that fails, or whose claim no longer holds
├── WorkerError         9   measuring process that was killed from outside
├── LockedError        75   run directory in use by another process
├── DeviceLostError    75   no device of a class is left
└── StudyInterruptedError   study ended by a signal: 128 + the signal's number
"""

import difflib
from collections.abc import Iterable

DISTRIBUTION = "autotune-training"
"""Name of this package on the package index; its import name and its command are `autotune`."""


class AutotuneError(Exception):
    """Base class of all errors that autotune raises on purpose. Exit code 1.

    The message is one line. It names the thing, its value and the next step.
    """

    exit_code = 1


class ConfigError(AutotuneError):
    """Raised when a config, a workload reference, an argument or a file cannot be used. Exit code 2."""

    exit_code = 2


class BaselineChangedError(ConfigError):
    """Raised when plain eager fits in memory now and did not when a run was recorded, or the other way round. Exit code 2."""


class DeviceRefusedError(ConfigError):
    """Raised when a device or its far end cannot be used. Exit code 2.

    Examples: no GPU, no connection, another version of autotune, or a device that is not what its class promises.
    """


class StoreError(AutotuneError):
    """Raised when a store's directory is missing, read-only or full. Exit code 2."""

    exit_code = 2


class SlotError(StoreError):
    """Raised when a store was opened without enough room for a value of the plan. Exit code 2."""


class CaptureError(AutotuneError):
    """Raised when a model's training step cannot be captured as one graph. Exit code 2."""

    exit_code = 2


class RegressionError(AutotuneError):
    """Raised when a nightly run confirms that its champion plan became worse. Exit code 3."""

    exit_code = 3


class InfeasibleError(AutotuneError):
    """Raised when no plan fits the memory budget. Exit code 4."""

    exit_code = 4


class InconclusiveError(AutotuneError):
    """Raised when a nightly run's measurements are too noisy or too few for a verdict. Exit code 5."""

    exit_code = 5


class PlanError(AutotuneError):
    """Raised when a plan breaks a rule of its graph, or was made for another graph. Exit code 6."""

    exit_code = 6


class OutOfTimeError(AutotuneError):
    """Raised when a time limit ends a night before its last entry, or a study before its first plan. Exit code 7."""

    exit_code = 7


class NumericsError(AutotuneError):
    """Raised when a plan's results differ from the reference. Exit code 8."""

    exit_code = 8


class ExperimentError(AutotuneError):
    """Raised when an experiment fails, or a claim that held before no longer holds. Exit code 8."""

    exit_code = 8


class WorkerError(AutotuneError):
    """Raised when a process of the measurements is killed from outside. Nothing is wrong with the input. Exit code 9."""

    exit_code = 9


class LockedError(AutotuneError):
    """Raised when another process works in the run directory. Exit code 75."""

    exit_code = 75


class DeviceLostError(AutotuneError):
    """Raised when no device of a class is left to measure on. The study's records remain: resume it. Exit code 75."""

    exit_code = 75

    def __init__(self, message: str = "", host: str = "") -> None:
        super().__init__(message)
        self.host = host
        """Host that was lost in a measurement, for a study that has other devices; else empty."""


class PlansFailedError(AutotuneError):
    """Raised when every plan of a study crashed or took too long, for reasons other than memory. Exit code 1."""


class StudyInterruptedError(AutotuneError):
    """Raised when a signal ends a study. Its records remain, and a later session can resume it.

    The exit code is 128 + the signal's number, as shells report it.
    """

    exit_code = 130

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_code = 128 + signal


LISTED_NAMES = 30
"""Maximum number of names listed beside a suggested name; a package can hold hundreds. Without one, all are listed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the suffix of an error message about an unknown name: the valid names and the closest of them.

    >>> nearest("bath", ["batch", "size"])
    "; known: batch, size; did you mean 'batch'?"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    listed = f"; known: {', '.join(names) or 'none'}" if len(names) <= LISTED_NAMES or not close else ""
    return listed + (f"; did you mean {close[0]!r}?" if close else "")


def install_command(extra: str) -> str:
    """Return the commands that install a group of optional dependencies, from the package index or from a checkout.

    >>> install_command("zoo")
    "pip install 'autotune-training[zoo]', or in a checkout: pip install '.[zoo]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]', or in a checkout: pip install '.[{extra}]'"
