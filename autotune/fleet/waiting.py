"""Record who waits for a device, in files beside the classes' records: the dashboard reads them, nothing else does."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records.json_codec import from_json, parse_json, to_json
from autotune.records.run_dir import write_json

FOLDER = "waiting"
"""Directory below that of the classes' records."""
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A study, or an entry of a night, that has no device yet."""

    name: str
    device_class: str
    """Class of the fleet; empty for the machine of the study."""
    since: float
    """Begin of the wait, in seconds since the epoch."""


class WaitingFile:
    """File with the waits of one process; it is never more than a note, so a disk without room ends no study."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / "fleet" / FOLDER / f"{os.getpid()}-{next(_NUMBERS)}.json"
        self._waits: dict[tuple[str, str], Waiting] = {}

    def update(self, waits: Iterable[tuple[str, str]]) -> None:
        """Record the names and classes that wait now; those that waited before keep their begin."""
        now = time.time()
        current = {wait: self._waits.get(wait) or Waiting(*wait, now) for wait in waits}
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
    """Record a wait for the time of a `with` block."""
    file = WaitingFile(runs)
    file.update([(name, device_class)])
    try:
        yield
    finally:
        file.update([])


def read_waiting(runs: Path) -> list[Waiting]:
    """Return who waits now, the longest wait first; files of killed processes and damaged ones are left out."""
    waits: list[Waiting] = []
    for path in (runs / "fleet" / FOLDER).glob("*.json"):
        if not Path(f"/proc/{path.name.partition('-')[0]}").exists():
            continue
        with contextlib.suppress(OSError, ValueError, TypeError, AutotuneError):
            waits += [from_json(Waiting, document, where=str(path)) for document in parse_json(path.read_bytes())]
    return sorted(waits, key=lambda wait: (wait.since, wait.name))
