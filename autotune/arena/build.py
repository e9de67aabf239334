"""Compile the allocator with g++ on first use, and load it into this process."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The allocator, installed; None, with one warning that says why, where it cannot be built."""
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error) or type(error).__name__
        _log.warning(
            "no arena, tensors stay with malloc: %s. Install g++ for plans with allocator: arena",
            detail.strip().splitlines()[-1],
        )
        return None
    loaded.arena_create.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    loaded.arena_recorded.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("arena_recorded", "arena_stop", "arena_hits"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.arena_install()
    return loaded


def _built() -> Path:
    """The shared object for this torch and this source, in the user's cache folder."""
    source = files("autotune.arena").joinpath("arena.cpp").read_text()
    key = hashlib.sha256(f"{torch.__version__}{torch._C._GLIBCXX_USE_CXX11_ABI}{source}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autotune"
    made = cache / f"arena-{key}.so"
    if made.exists():
        return made
    compiler = shutil.which("g++")
    if compiler is None:
        raise OSError("there is no g++")
    cache.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        draft = Path(folder) / "arena.so"
        command = [
            compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(draft),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
        ]  # fmt: skip
        subprocess.run(command, input=source, text=True, capture_output=True, check=True, timeout=300)
        draft.replace(made)
    return made
