"""Run the entries of a night at the same time, as many as there are devices: a process for each entry.

Entries have processes of their own, because signal handlers belong to the main thread of a process, and a measurement's
children to the thread that started them.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.nightly.config import NightlyEntry
from autotune.study.interrupts import Interrupts

POLL_SECONDS = 0.05
"""Time between two looks at the running entries."""
END_SECONDS = 20.0
"""Time in which an entry may end after a signal; then its process is killed."""


class EntryProcess(Protocol):
    """Process that runs one entry; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, if it still runs."""
        ...

    def kill(self) -> None:
        """End the process at once."""
        ...


@dataclass(frozen=True, slots=True)
class EntryTime:
    """Time of an entry: `seconds` from when its device is up, and none after `latest_seconds` from now."""

    seconds: float
    latest_seconds: float


def run_in_parallel(
    entries: Sequence[NightlyEntry],
    devices: Mapping[str | None, int],
    deadline: float,
    *,
    start: Callable[[NightlyEntry, EntryTime], EntryProcess],
    finish: Callable[[NightlyEntry, int], None],
    interrupts: Interrupts,
    note_waiting: Callable[[Sequence[NightlyEntry]], None] | None = None,
) -> None:
    """Run entries until all have ended, the time is up, or a signal arrived; the signal is passed on to their processes.

    Args:
        entries: entries to run, in order.
        devices: number of devices of each class; None is this machine.
        deadline: end of the night on the monotonic clock, after which no entry starts.
        start: starts the process of an entry.
        finish: receives each entry that has ended, and the exit code of its process.
        interrupts: handlers of the signals.
        note_waiting: receives the entries that wait for a device, every `POLL_SECONDS`; an empty list at the end.
    """
    waiting, running = list(entries), dict[str, tuple[NightlyEntry, EntryProcess]]()
    try:
        while waiting or running:
            for key, (entry, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[key]
                    finish(entry, code)
            if interrupts.received or time.monotonic() >= deadline:
                waiting.clear()
            if interrupts.received:
                return
            used = Counter(entry.on for entry, _ in running.values())
            for entry in list(waiting):
                if used[entry.on] < devices[entry.on]:
                    left = deadline - time.monotonic()
                    running[entry.key] = entry, start(entry, EntryTime(share_time(entry, waiting, devices, left), left))
                    waiting.remove(entry)
                    used[entry.on] += 1
            if note_waiting is not None:
                note_waiting(waiting)
            time.sleep(POLL_SECONDS)
    finally:
        if note_waiting is not None:
            note_waiting([])
        _end(running, finish, interrupts.received)


def share_time(
    entry: NightlyEntry, waiting: Sequence[NightlyEntry], devices: Mapping[str | None, int], left: float
) -> float:
    """Return the seconds of an entry: its share of the time that is left on the devices of its class, at most its `time`."""
    shares = sum(other.share for other in waiting if other.on == entry.on)
    return min(left, left * devices[entry.on] * entry.share / shares, entry.time_seconds)


def _end(
    running: Mapping[str, tuple[NightlyEntry, EntryProcess]], finish: Callable[[NightlyEntry, int], None], number: int
) -> None:
    """End the processes that still run, by the signal that arrived; an entry keeps what it recorded."""
    for _, process in running.values():
        process.send_signal(number or 15)
    until = time.monotonic() + END_SECONDS
    for entry, process in running.values():
        while (code := process.poll()) is None:
            if time.monotonic() > until:
                process.kill()
            time.sleep(POLL_SECONDS)
        finish(entry, code)
