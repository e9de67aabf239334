"""The compiled search: built with g++ on first use; without g++ the same moves run in Python, far fewer of them."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune import native
from autotune.planners.recompute.editable_order import Runs

_I64, _F64, _INT, _VOID = ctypes.c_int64, ctypes.c_double, ctypes.c_int, ctypes.c_void_p
_SOURCES = ("search.cpp", "order.hpp", "timeline.hpp")
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "graph_new": (_VOID, [_INT, _INT, *[_VOID] * 12, _I64]),
    "graph_free": (None, [_VOID]),
    "search_new": (_VOID, [_VOID, _VOID, _INT]),
    "search_copy": (_VOID, [_VOID]),
    "search_free": (None, [_VOID]),
    "search_peak": (_I64, [_VOID]),
    "search_seconds": (_F64, [_VOID]),
    "search_size": (_INT, [_VOID]),
    "search_order": (None, [_VOID, _VOID]),
    "search_bytes": (None, [_VOID, _VOID]),
    "search_change": (_INT, [_VOID, _I64, _INT, _VOID, _INT, _VOID, _INT, _VOID, _VOID]),
    "search_fit": (_I64, [_VOID, _I64, _F64, ctypes.c_uint64, _F64]),
    "search_undo": (None, [_VOID, _I64]),
    "search_improve": (None, [_VOID, _I64, _F64, ctypes.c_uint64, _I64]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled search; None, with one warning that says why, where it cannot be built."""
    folder = Path(__file__).parent
    without = "recompute is planned in Python, slower and not as well"
    loaded = native.load("recompute", [folder / name for name in _SOURCES], ("-O3",), without)
    if loaded is None:
        return None
    for name, (returns, takes) in _CALLS.items():
        call = getattr(loaded, name)
        call.restype, call.argtypes = returns, takes
    return loaded


class _Graph:
    """What all searches of one graph read, outside of Python."""

    def __init__(self, loaded: ctypes.CDLL, runs: Runs) -> None:
        self.loaded = loaded
        graph, costs = runs.graph, runs.costs
        arrays: list[npt.NDArray[Any]] = [
            np.array(runs.nbytes, np.int64),
            np.array(costs.scratch_bytes, np.int64),
            np.array(costs.seconds, np.float64),
            np.array(runs.maker, np.int32),
            np.array(runs.repeatable, np.int8),
            np.array([value in runs.outputs for value in range(len(graph.values))], np.int8),
            *_flat(runs.reads),
            *_flat(runs.makes),
            *_flat(runs.spoilers),
        ]
        self.handle = loaded.graph_new(
            len(graph.ops), len(graph.values), *(array.ctypes.data for array in arrays), graph.static_bytes
        )

    def __del__(self) -> None:
        self.loaded.graph_free(self.handle)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(where each list starts, and the end; all items)."""
    starts = np.cumsum([0, *map(len, lists)])
    return starts.astype(np.int32), np.array([item for own in lists for item in own], np.int32)


class Compiled:
    """`autotune.planners.recompute.search.Search`, compiled."""

    def __init__(self, runs: Runs, loaded: ctypes.CDLL) -> None:
        self._loaded = loaded
        self._graph = _Graph(loaded, runs)
        order = np.array(runs.order, np.int32)
        self._handle = loaded.search_new(self._graph.handle, order.ctypes.data, len(order))

    def __del__(self) -> None:
        self._loaded.search_free(self._handle)

    def copy(self) -> "Compiled":
        """The same order, to be changed apart."""
        twin = object.__new__(Compiled)
        twin._loaded, twin._graph = self._loaded, self._graph
        twin._handle = self._loaded.search_copy(self._handle)
        return twin

    @property
    def peak(self) -> int:
        """Highest bytes."""
        return int(self._loaded.search_peak(self._handle))

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return float(self._loaded.search_seconds(self._handle))

    @property
    def order(self) -> tuple[int, ...]:
        """Ops as they run."""
        ops = np.empty(self._loaded.search_size(self._handle), np.int32)
        self._loaded.search_order(self._handle, ops.ctypes.data)
        return tuple(ops.tolist())

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """At every position."""
        made = np.empty(self._loaded.search_size(self._handle), np.int64)
        self._loaded.search_bytes(self._handle, made.ctypes.data)
        return made

    def change(self, limit: int, anchor: int, chain: Sequence[int], removed: Iterable[int]) -> tuple[int, float] | None:
        """Make one change, in positions, and give what it does to bytes over the limit and seconds; None if refused."""
        ops, gone = np.array(chain, np.int32), np.array(list(removed), np.int32)
        area, seconds = _I64(), _F64()
        made = self._loaded.search_change(
            self._handle, limit, anchor, ops.ctypes.data, len(ops), gone.ctypes.data, len(gone),
            ctypes.byref(area), ctypes.byref(seconds),
        )  # fmt: skip
        return (area.value, seconds.value) if made else None

    def fit(self, limit: int, greed: float, taste: float = 0.0, seed: int = 0) -> int:
        """Evict until nothing is over the limit, or nothing helps; scores shrink at random by up to `taste`."""
        return int(self._loaded.search_fit(self._handle, limit, greed, seed, taste))

    def undo(self, limit: int) -> None:
        """Take back what is computed again without need, the dearest first."""
        self._loaded.search_undo(self._handle, limit)

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        """Local moves until `work` changes were weighed; the cheapest order under the limit that was seen."""
        self._loaded.search_improve(self._handle, limit, greed, seed, work)
