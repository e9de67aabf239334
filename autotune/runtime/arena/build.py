"""The allocator, compiled against this torch and installed in this process."""

import ctypes
import functools
from pathlib import Path

import torch

from autotune import native

FLAGS: tuple[str, ...] = ("-O2",)
"""What g++ is told beside where torch lies; `poison.hpp` says what tests add."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The allocator, installed; None, with one warning that says why, where it cannot be built."""
    root = Path(torch.__file__).parent
    flags = (
        *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    )  # fmt: skip
    sources = [Path(__file__).with_name(name) for name in ("arena.cpp", "heap.hpp", "poison.hpp", "ranges.hpp")]
    loaded = native.load("arena", sources, flags, "no arena, tensors stay with malloc", torch.__version__)
    if loaded is None:
        return None
    loaded.arena_create.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    loaded.arena_recorded.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.arena_hold.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    loaded.arena_map.argtypes, loaded.arena_map.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_bool
    for name in ("arena_recorded", "arena_stop", "arena_hits"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.arena_install()
    return loaded
