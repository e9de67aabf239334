"""Find run directories and nightly entries below `runs/`, and name each place that cannot be read with the reason."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from autotune.nightly.config import RESERVED
from autotune.records.run_dir import RunDir

T = TypeVar("T")

MAX_DEPTH = 4
"""Levels below `runs/` to search: a nightly study is at `nightly/ENTRY/RUN`."""
SKIPPED = frozenset({"mlruns", "devices", "logs", "plans"})
"""Directories that hold no run; `mlruns` has MLflow's copies of runs' files."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A place that cannot be read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class RunIndex:
    """Run directories, the latest change first, and the directories of nightly entries by name."""

    runs: tuple[Path, ...]
    entries: tuple[Path, ...]


def find_runs(root: Path) -> RunIndex:
    """Search a directory for runs and entries; a missing directory has none."""
    runs, entries = [], []
    for place, subdirectories, files in os.walk(root):
        path, names, run = Path(place), set(files), RunDir(Path(place))
        depth = len(path.relative_to(root).parts)
        is_entry = bool({"history.jsonl", "champion.json"} & names)
        begun = bool({run.config.name, run.trials.name} & names) or _holds_only_lock(path, names, subdirectories)
        is_run = depth > 0 and begun and not is_entry
        entries += [path] if is_entry else []
        runs += [path] if is_run else []
        links = [path / name for name in subdirectories if (path / name).is_symlink()]
        runs += [link for link in links if RunDir(link).trials.exists()]  # os.walk follows no link
        is_leaf = is_run or depth == MAX_DEPTH
        subdirectories[:] = (
            [] if is_leaf else [name for name in subdirectories if name not in SKIPPED and not name.startswith(".")]
        )
    return RunIndex(tuple(sorted(runs, key=last_change, reverse=True)), tuple(sorted(entries)))


def _holds_only_lock(path: Path, files: set[str], subdirectories: Iterable[str]) -> bool:
    """Return True for the lock of a run that has just begun.

    The lock of a night is beside the directory `nights`; that of a night's entry is above the lock of its study.
    """
    lock = RunDir(path).lock.name
    above = any(name == RESERVED or RunDir(path / name).lock.exists() for name in subdirectories)
    return lock in files and not above


def last_change(run_dir: Path) -> float:
    """Return the time of the last record, in seconds since the epoch; 0 for none."""
    return max((stamp for stamp in file_stamps(run_dir) if stamp), default=0.0)


def file_stamps(run_dir: Path) -> tuple[float, ...]:
    """Return the modification times of a run's files and of its lock; 0 for a missing file."""
    files = RunDir(run_dir)
    return tuple(_modified(path) for path in (*files.records, files.lock))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def try_read(path: Path, read: Callable[[Path], T]) -> T | Unreadable:
    """Return `read(path)`, or the reason that it failed."""
    try:
        return read(path)
    except Exception as error:  # noqa: BLE001 - files after a crash may have any content: the page shows the error and continues
        reason = " ".join(str(error).split()) or type(error).__name__
        return Unreadable(path, reason[:300])


def split_unreadable(results: Iterable[T | Unreadable]) -> tuple[list[T], list[Unreadable]]:
    """Return (results that were read, places that could not be read)."""
    readable: list[T] = []
    unreadable: list[Unreadable] = []
    for result in results:
        if isinstance(result, Unreadable):
            unreadable.append(result)
        else:
            readable.append(result)
    return readable, unreadable


def relative_name(path: Path, root: Path) -> str:
    """Return a directory's name relative to the root."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
