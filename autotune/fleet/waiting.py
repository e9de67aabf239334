"""Record the studies and entries that wait for a device, in files that only the dashboard reads."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.errors import AutotuneError
from autotune.records.json_codec import from_json, parse_json, to_json
from autotune.records.run_dir import write_json

FOLDER = "waiting"
"""Name of the directory of these files, below `RUNS/fleet`."""
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """A study, or an entry of a night, that has no device yet."""

    name: str
    device_class: str
    """Class of the fleet; empty for the machine of the study."""
    since: float
    """Start of the wait, in seconds since the epoch."""


class WaitingFile:
    """File with the waits of one process. Errors on writing are ignored, because only the dashboard reads it."""

    def __init__(self, runs: Path) -> None:
        process = f"{os.getpid()}-{round(psutil.Process().create_time())}"
        self._path = runs / "fleet" / FOLDER / f"{socket.gethostname()}~{process}-{next(_NUMBERS)}.json"
        self._waits: dict[tuple[str, str], DeviceWait] = {}

    def update(self, waits: Iterable[tuple[str, str]]) -> None:
        """Replace the recorded waits by these (name, class) pairs. A wait recorded before keeps its start time."""
        now = time.time()
        current = {wait: self._waits.get(wait) or DeviceWait(*wait, now) for wait in waits}
        if current == self._waits:
            return
        self._waits = current
        with contextlib.suppress(OSError, AutotuneError):
            if not current:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, [to_json(wait) for wait in current.values()])


@contextlib.contextmanager
def record_wait(runs: Path, name: str, device_class: str) -> Iterator[None]:
    """Record a wait for the time of a `with` block.

    Args:
        runs: Directory of the runs.
        name: Directory of the study, or key of the entry.
        device_class: Class of the fleet.
    """
    file = WaitingFile(runs)
    file.update([(name, device_class)])
    try:
        yield
    finally:
        file.update([])


def read_waiting(runs: Path) -> list[DeviceWait]:
    """Return the present waits, the longest first.

    Damaged files are skipped. Files of this machine's processes that ended are deleted; those of other machines count.
    """
    waits: list[DeviceWait] = []
    for path in (runs / "fleet" / FOLDER).glob("*.json"):
        if _has_ended(path):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, AutotuneError):
            waits += [from_json(DeviceWait, document, where=str(path)) for document in parse_json(path.read_bytes())]
    return sorted(waits, key=lambda wait: (wait.since, wait.name))


def _has_ended(path: Path) -> bool:
    """Return True if a file is of a process of this machine that does not run any more."""
    host, _, process = path.stem.rpartition("~")
    if host and host != socket.gethostname():
        return False
    try:
        pid, begin, _ = map(int, process.split("-"))
        return round(psutil.Process(pid).create_time()) != begin
    except (ValueError, psutil.NoSuchProcess):
        return True
