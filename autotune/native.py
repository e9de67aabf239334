"""Load the project's C++ libraries: built into the wheel, or with g++ on first use into the user's cache folder."""

import ctypes
import errno
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

PREBUILT = Path(__file__).with_name("_native")
"""Folder of the libraries that were compiled when the wheel was built; absent in a checkout."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _keep_from_others(path: Path) -> None:
    """Remove the permission of other users to write a path: they could run code as this user.

    Raises RuntimeError for a path of another user, or of a file system without such rights.
    """
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise RuntimeError(f"{path} belongs to another user; set XDG_CACHE_HOME to a directory of your own")
    if status.st_mode & _OTHERS_WRITE:  # a umask of 0002 leaves it to the group
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        if path.stat().st_mode & _OTHERS_WRITE:
            raise RuntimeError(
                f"the file system lets others write {path}; set XDG_CACHE_HOME to a directory on another one"
            )


def _is_own(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


@dataclass(frozen=True)
class Library:
    """Shared library in C++: its first source includes the others."""

    name: str
    """Prefix of the shared object's file name."""
    sources: tuple[Path, ...]
    """Source files. A change of any of them builds the library again."""
    flags: tuple[str, ...] = ()
    """Compiler flags beyond the language standard."""
    stamp: str = ""
    """Anything else that the binary depends on, such as a version of torch."""

    @property
    def file_name(self) -> str:
        """File name of the shared object for these very sources and flags."""
        key = f"{self.flags}{[source.read_text(encoding='utf-8') for source in self.sources]}{self.stamp}"
        return f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"

    def load(self, without: str) -> ctypes.CDLL | None:
        """Return the library; None, with a warning, if it cannot be built.

        Args:
            without: Consequence of a missing library, for the warning.
        """
        try:
            path = self.locate()
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                if path.parent == PREBUILT:
                    raise
                path.unlink(missing_ok=True)  # cut short by a full disk or a power failure
                return ctypes.CDLL(str(self.compile(path.parent)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or str(error) or type(error).__name__
            is_unwritable = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC)
            is_foreign = isinstance(error, RuntimeError)
            advice = "Set XDG_CACHE_HOME to a writable directory" if is_unwritable else "Install g++"
            reason = detail.strip().splitlines()[-1]
            _log.warning("%s: %s%s", without, reason, "" if is_foreign else f". {advice}")
            return None

    def locate(self) -> Path:
        """Return the path of the shared object: of the wheel, of the cache, or compiled now.

        Raises:
            OSError: There is no g++.
            RuntimeError: Another user owns or may write the cache folder.
            subprocess.SubprocessError: The compiler fails, or runs longer than 300 seconds.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"
        if (PREBUILT / self.file_name).exists():
            return PREBUILT / self.file_name
        library = cache / self.file_name
        if library.exists():
            _keep_from_others(cache)
            if _is_own(library):  # else its content may be another user's
                return library
        return self.compile(cache)

    def compile(self, folder: Path) -> Path:
        """Compile the shared object into a folder, in one step that other processes cannot see half done."""
        compiler = shutil.which("g++")
        if compiler is None:
            raise OSError("there is no g++")
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        _keep_from_others(folder)
        with tempfile.TemporaryDirectory(dir=folder) as drafts:
            draft = Path(drafts) / self.file_name
            command = [compiler, str(self.sources[0]), "-o", str(draft), "-shared", "-fPIC", "-std=c++20", *self.flags]
            subprocess.run(command, text=True, capture_output=True, check=True, timeout=300)
            draft.chmod(0o755)  # whatever the umask
            return draft.replace(folder / self.file_name)
