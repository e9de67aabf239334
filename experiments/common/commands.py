"""Commands that experiments run, and the exit status of an experiment that a further call continues."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

UNFINISHED = 75
"""Exit status of an experiment that stored a part of its results: the same command continues (EX_TEMPFAIL)."""


def exit_unfinished(reason: str) -> NoReturn:
    """End this process with `UNFINISHED`, and print the reason to standard error."""
    print(reason, file=sys.stderr, flush=True)
    raise SystemExit(UNFINISHED)


def run_to_end(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`, and let it end by itself after an interrupt.

    SIGINT reaches all processes of a group. `subprocess.run` would kill the command 0.25 s later. Raises KeyboardInterrupt
    if SIGINT arrived and the command failed; the result of a command that succeeded anyway is returned.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return subprocess.run(command, text=True, check=False, **options)
    interrupts: list[int] = []
    # the command does not inherit a handler, only a signal that is ignored
    signal.signal(signal.SIGINT, lambda *received: interrupts.append(received[0]))
    try:
        process = subprocess.run(command, text=True, check=False, **options)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts and process.returncode:
        raise KeyboardInterrupt
    return process
