"""The compiled half of the layouts: built with g++ on first use; without g++ the same is done in Python, slower."""

import ctypes
import functools
from pathlib import Path
from typing import Any

from autotune import native
from autotune.layout.buffers import Buffers

_I64, _INT, _VOID = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
_SOURCES = ("search.cpp", "canonical.hpp", "ejection.hpp", "problem.hpp")
_BUFFERS: list[Any] = [_INT, _VOID, _VOID, _VOID, _VOID]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled layouts; None, with one warning that says why, where they cannot be built."""
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    loaded = native.load("layout", sources, ("-O3", "-pthread"), "layouts are searched in Python, slower")
    if loaded is None:
        return None
    loaded.layout_place.restype, loaded.layout_place.argtypes = _I64, [*_BUFFERS, _VOID, _INT, _VOID]
    loaded.layout_search.restype = _INT
    loaded.layout_search.argtypes = [*_BUFFERS, _I64, _INT, _VOID, _VOID, _I64, _I64, _VOID]
    loaded.layout_eject.restype = _INT
    loaded.layout_eject.argtypes = [*_BUFFERS, _I64, _INT, _VOID, _VOID, _I64, _I64, _I64, _VOID]
    return loaded


def arguments(buffers: Buffers) -> tuple[int, int, int, int, int]:
    """Buffers as every call takes them; they must outlive it."""
    return (
        len(buffers), buffers.sizes.ctypes.data, buffers.born.ctypes.data, buffers.died.ctypes.data,
        buffers.aligned.ctypes.data,
    )  # fmt: skip
