"""End a process with the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send a signal to this process when the thread that started it ends, however that happens.

    `parent` is the id of the process that started this one. Where it has ended already, the signal comes now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        signal.raise_signal(number)
