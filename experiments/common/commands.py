"""Commands that experiments run, and the exit status of an experiment that a further call continues."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import psutil

UNFINISHED = 75
"""Exit status of an experiment that stored a part of its results: the same command continues (EX_TEMPFAIL)."""
IDLE_PERCENT = 15.0
"""Share of the CPUs in percent that other programs may use when a measurement begins."""
DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers of signals that end a process."""


def exit_unfinished(reason: str) -> NoReturn:
    """End this process with `UNFINISHED`, and print the reason to standard error."""
    print(reason, file=sys.stderr, flush=True)
    raise SystemExit(UNFINISHED)


def refuse_busy_machine(*, anyway: bool = False) -> None:
    """Measure the CPUs for five seconds, and end this process with `UNFINISHED` while other programs use them.

    With `anyway` nothing is measured or refused.
    """
    if not anyway and (used := psutil.cpu_percent(interval=5.0)) > IDLE_PERCENT:
        exit_unfinished(f"other programs use {used:.0f} % of the CPUs; end them and run the command again")


def run_to_end(
    command: Sequence[str], *, capture_output: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`, and let it end by itself after a signal.

    SIGINT reaches all processes of a group. `subprocess.run` would kill the command 0.25 s later. SIGTERM and SIGHUP reach this
    process alone, so the command gets them from here. Signals that this process ignores or handles otherwise stay as they are.

    Raises KeyboardInterrupt when the command has ended after SIGTERM or SIGHUP, or has failed after SIGINT. The result of a
    command that succeeded despite SIGINT is returned.
    """
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    received: list[int] = []
    processes: list[subprocess.Popen[str]] = []

    def pass_on() -> None:
        for number in set(received) & {signal.SIGTERM, signal.SIGHUP}:
            for process in processes:
                process.send_signal(number)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        pass_on()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler in DEFAULT_HANDLERS}
    # the command does not inherit a handler, only a signal that is ignored
    for number in before:
        signal.signal(number, note)
    try:
        with subprocess.Popen(command, text=True, **options) as process:
            processes.append(process)
            pass_on()  # what arrived before the command had started
            output, errors = process.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and (process.returncode or set(received) != {signal.SIGINT}):
        raise KeyboardInterrupt
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
