"""The compiled half of the layouts: built with g++ on first use; without g++ the same is done in Python, slower."""

import ctypes
import functools
from pathlib import Path
from typing import Any

from autotune import native
from autotune.layout.buffers import Buffers

_I64, _INT, _VOID = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
_BUFFERS: list[Any] = [_INT, _VOID, _VOID, _VOID, _VOID]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled layouts; None, with one warning that says why, where they cannot be built."""
    source = Path(__file__).with_name("search.cpp")
    loaded = native.load("layout", [source], ("-O3", "-pthread"), "layouts are searched in Python, slower")
    if loaded is None:
        return None
    loaded.layout_place.restype, loaded.layout_place.argtypes = _I64, [*_BUFFERS, _VOID, _INT, _VOID]
    loaded.layout_search.restype = _INT
    loaded.layout_search.argtypes = [*_BUFFERS, _I64, _INT, _VOID, _VOID, _I64, _I64, _VOID]
    return loaded


def arguments(buffers: Buffers) -> tuple[int, int, int, int, int]:
    """Buffers as every call takes them; they must outlive it."""
    return (
        len(buffers), buffers.sizes.ctypes.data, buffers.born.ctypes.data, buffers.died.ctypes.data,
        buffers.aligned.ctypes.data,
    )  # fmt: skip
