"""Temporary directories that a later session removes where their own session was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from autotune.runtime.stores.slab_file import is_in_memory


class Scratch:
    """Temporary directory that is locked while its process lives, however that ends."""

    def __init__(self, parent: Path, prefix: str) -> None:
        remove_dead(parent, prefix)
        while True:
            # before Python 3.12 it is as relative as its parent, and a workload may change the working directory
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
            try:  # another session may remove it before it is locked
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory with its files; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def temporary_root() -> Path:
    """Return the directory of temporary files: the system's, or `/var/tmp` where that one lies in memory.

    Results of eager steps are compared through files. In memory they would count as memory of the steps. `TMPDIR` is kept.
    """
    usual, on_disk = Path(tempfile.gettempdir()), Path("/var/tmp")
    may_replace = "TMPDIR" not in os.environ and os.access(on_disk, os.W_OK | os.X_OK)
    return on_disk if may_replace and is_in_memory(usual) and not is_in_memory(on_disk) else usual


def remove_dead(parent: Path, prefix: str) -> None:
    """Remove this user's directories of a prefix whose session has ended; a live session holds a lock on its own."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # BlockingIOError: its session is alive
            if path.lstat().st_uid != os.geteuid():
                continue
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)
