"""Bindings of the compiled layout searches, built with g++ on first use. Slower Python code replaces them otherwise."""

import ctypes
import functools
from pathlib import Path
from typing import Any

from autotune import native
from autotune.layout.buffers import Buffers

_I64, _INT, _VOID = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
LIBRARY = native.Library(
    "layout",
    tuple(Path(__file__).with_name(name) for name in ("search.cpp", "canonical.hpp", "ejection.hpp", "problem.hpp")),
    ("-O3", "-pthread"),
)
_BUFFERS: list[Any] = [_INT, _VOID, _VOID, _VOID, _VOID]


@functools.cache
def load_compiled() -> ctypes.CDLL | None:
    """Return the compiled searches; None, with one warning, if they cannot be built."""
    loaded = LIBRARY.load(without="layouts are searched in Python, slower")
    if loaded is None:
        return None
    loaded.layout_place.restype, loaded.layout_place.argtypes = _I64, [*_BUFFERS, _VOID, _INT, _VOID]
    loaded.layout_search.restype = _INT
    loaded.layout_search.argtypes = [*_BUFFERS, _I64, _INT, _VOID, _VOID, _I64, _I64, _VOID]
    loaded.layout_eject.restype = _INT
    loaded.layout_eject.argtypes = [*_BUFFERS, _I64, _INT, _VOID, _VOID, _I64, _I64, _I64, _VOID]
    return loaded


def buffer_arguments(buffers: Buffers) -> tuple[int, int, int, int, int]:
    """Return the leading arguments of every call. They are addresses, so the buffers must outlive the call."""
    return (
        len(buffers), buffers.sizes.ctypes.data, buffers.born.ctypes.data, buffers.died.ctypes.data,
        buffers.aligned.ctypes.data,
    )  # fmt: skip
