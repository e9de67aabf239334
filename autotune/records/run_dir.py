"""Lock a run directory, write its files whole, and see who works in it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import LockedError


def write_json(path: Path, document: Any) -> None:
    """Write whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(document) + "\n")
    draft.replace(path)


@contextmanager
def locked(run_dir: Path, move: str = "tune under another --name") -> Iterator[None]:
    """Work in a run directory alone; LockedError names the process that does already, and the next move."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise LockedError(f"{run_dir}: process {holder} works here; wait for it or {move}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def at_work(run_dir: Path) -> int | None:
    """The process of this machine that works in a run directory now; its lock is looked at, never taken."""
    import psutil

    lock, done = run_dir / "lock", run_dir / "study.json"
    try:
        process, began = int(lock.read_text()), lock.stat().st_mtime
        # a night goes on to other studies, and a number is given to another process one day
        ended = done.exists() and done.stat().st_mtime >= began
        alive = not ended and psutil.Process(process).create_time() <= began
    except (OSError, ValueError, psutil.Error):
        return None
    return process if alive else None


def runs_of(run_dir: Path) -> str:
    """The `runs` that a run lies in now, which its config may name where it lay before; a night's lie deeper than others."""
    above = list((run_dir if run_dir.name else run_dir.resolve()).parents)
    return str(next((place for place in above if (place / "mlflow.lock").exists()), above[0]))
