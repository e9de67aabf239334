"""What lies under `runs/`: run directories and entries of nights. What cannot be read is named, with the reason."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEPTH = 4
"""Below `runs/`: a night's study lies in `nightly/ENTRY/RUN`."""
OTHERS = frozenset({"mlruns", "devices", "logs", "plans"})
"""Directories that hold no run; MLflow's copies of runs' files are none."""
FILES = ("config.yaml", "trials.jsonl", "graph.json", "costs.json", "device.json", "plan.json", "study.json")
"""What a run directory is read from."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A place that cannot be read."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """Run directories, the one worked on last first, and entries of nights by name."""

    runs: tuple[Path, ...]
    entries: tuple[Path, ...]


def look(root: Path) -> Found:
    """Walk the directory; one that is not there holds nothing."""
    runs, entries = [], []
    for place, below, files in os.walk(root):
        here, marks = Path(place), set(files)
        depth = len(here.relative_to(root).parts)
        is_entry = bool({"history.jsonl", "champion.json"} & marks)
        # a run that has only begun is a lock; that of a whole night lies beside the nights' results
        begun = bool({"config.yaml", "trials.jsonl"} & marks) or ("lock" in marks and "nights" not in below)
        is_run = depth > 0 and begun and not is_entry
        entries += [here] if is_entry else []
        runs += [here] if is_run else []
        leaf = is_run or depth == DEPTH
        below[:] = [] if leaf else [name for name in below if name not in OTHERS and not name.startswith(".")]
    return Found(tuple(sorted(runs, key=worked_on, reverse=True)), tuple(sorted(entries)))


def worked_on(run_dir: Path) -> float:
    """When something was recorded last, in seconds since the epoch."""
    return max((at for at in stamp(run_dir) if at), default=0.0)


def stamp(run_dir: Path) -> tuple[float, ...]:
    """Changes with whatever a run is read from, and when somebody begins to work in it."""
    return tuple(_changed(run_dir / name) for name in (*FILES, "lock"))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def attempt(path: Path, read: Callable[[Path], T]) -> T | Broken:
    """What is read there, or why it cannot be."""
    try:
        return read(path)
    except Exception as error:  # noqa: BLE001 - a crash or an editor may have left anything there: a page says what, and goes on
        said = " ".join(str(error).split()) or type(error).__name__
        return Broken(path, said[:300])


def parted(found: Iterable[T | Broken]) -> tuple[list[T], list[Broken]]:
    """What could be read, and what could not."""
    good: list[T] = []
    broken: list[Broken] = []
    for one in found:
        if isinstance(one, Broken):
            broken.append(one)
        else:
            good.append(one)
    return good, broken


def called(path: Path, root: Path) -> str:
    """A directory's name below the root."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
