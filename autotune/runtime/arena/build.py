"""Compile the allocator against the installed torch, and install it in this process."""

import ctypes
import functools
from pathlib import Path

import torch

from autotune import native

FLAGS: tuple[str, ...] = ("-O2",)
"""Flags of g++ besides the paths of torch; `poison.hpp` documents those that tests add."""


def arena_library() -> native.Library:
    """Return the allocator's sources with the flags for the installed torch."""
    root = Path(torch.__file__).parent
    flags = (
        *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}",
    )  # fmt: skip
    sources = tuple(Path(__file__).with_name(name) for name in ("arena.cpp", "heap.hpp", "poison.hpp", "ranges.hpp"))
    return native.Library("arena", sources, flags, torch.__version__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the installed allocator, or None with one warning if it cannot be compiled.

    It is compiled for one version of torch: c10's C++ interface is not stable between versions.
    """
    loaded = arena_library().load(without="no arena, tensors stay with malloc")
    if loaded is None:
        return None
    loaded.arena_create.argtypes = [
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int,
    ]  # fmt: skip
    loaded.arena_recorded.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.arena_limit_resident.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    loaded.arena_map_storage.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("arena_map_storage", "arena_record"):
        getattr(loaded, name).restype = ctypes.c_bool
    for name in ("arena_recorded", "arena_stop", "arena_hits"):
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.arena_install()
    return loaded
