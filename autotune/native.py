"""C++ of our own: compiled with g++ on first use, kept in the user's cache folder, loaded into this process."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)


def load(name: str, sources: Sequence[Path], flags: Sequence[str], without: str, stamp: str = "") -> ctypes.CDLL | None:
    """The library of the first source, which includes the others; None, with a warning, where it cannot be built.

    `without`: what it means to go without, for the warning. `stamp`: what the library hangs on that no flag names.
    """
    try:
        return ctypes.CDLL(str(built(name, sources, flags, stamp)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error) or type(error).__name__
        _log.warning("%s: %s. Install g++", without, detail.strip().splitlines()[-1])
        return None


def built(name: str, sources: Sequence[Path], flags: Sequence[str], stamp: str = "") -> Path:
    """The shared object for these very sources and flags; OSError without a compiler, SubprocessError if it fails."""
    key = hashlib.sha256(f"{flags}{[source.read_text() for source in sources]}{stamp}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"
    made = cache / f"{name}-{key}.so"
    if made.exists():
        return made
    compiler = shutil.which("g++")
    if compiler is None:
        raise OSError("there is no g++")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        draft = Path(folder) / made.name
        command = [compiler, str(sources[0]), "-o", str(draft), "-shared", "-fPIC", "-std=c++20", *flags]
        subprocess.run(command, text=True, capture_output=True, check=True, timeout=300)
        draft.replace(made)
    return made
