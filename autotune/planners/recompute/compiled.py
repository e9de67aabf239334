"""Call the compiled search, which g++ builds on first use. Without g++ the search runs in Python with fewer moves."""

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune import native
from autotune.planners.recompute.editable_order import EditableOrder

_I64, _F64, _INT, _VOID = ctypes.c_int64, ctypes.c_double, ctypes.c_int, ctypes.c_void_p
LIBRARY = native.Library(
    "recompute",
    tuple(Path(__file__).with_name(name) for name in ("search.cpp", "order.hpp", "timeline.hpp")),
    ("-O3",),
)
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
def load_search() -> ctypes.CDLL | None:
    """Return the compiled search; None, with one warning that names the reason, if it cannot be built."""
    library = LIBRARY.load(without="recompute is planned in Python, slower and not as well")
    if library is None:
        return None
    for name, (returns, takes) in _CALLS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = returns, takes
    return library


class _Graph:
    """Graph in the memory of the compiled search, shared by all searches of it."""

    def __init__(self, library: ctypes.CDLL, runs: EditableOrder) -> None:
        self.library = library
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
            *_flat(runs.later_writers),
        ]
        self.handle = library.graph_new(
            len(graph.ops), len(graph.values), *(array.ctypes.data for array in arrays), graph.static_bytes
        )

    def __del__(self) -> None:
        self.library.graph_free(self.handle)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return (start of each list and the total length, all items)."""
    starts = np.cumsum([0, *map(len, lists)])
    return starts.astype(np.int32), np.array([item for items in lists for item in items], np.int32)


class CompiledSearch:
    """CompiledSearch implementation of `autotune.planners.recompute.search.Search`."""

    def __init__(self, runs: EditableOrder, library: ctypes.CDLL) -> None:
        self._library = library
        self._graph = _Graph(library, runs)
        order = np.array(runs.order, np.int32)
        self._handle = library.search_new(self._graph.handle, order.ctypes.data, len(order))

    def __del__(self) -> None:
        self._library.search_free(self._handle)

    def copy(self) -> "CompiledSearch":
        """Return an independent copy."""
        twin = object.__new__(CompiledSearch)
        twin._library, twin._graph = self._library, self._graph
        twin._handle = self._library.search_copy(self._handle)
        return twin

    @property
    def peak(self) -> int:
        """Peak in bytes."""
        return int(self._library.search_peak(self._handle))

    @property
    def seconds(self) -> float:
        """Seconds of all runs."""
        return float(self._library.search_seconds(self._handle))

    @property
    def order(self) -> tuple[int, ...]:
        """Ops in the order in which they run."""
        ops = np.empty(self._library.search_size(self._handle), np.int32)
        self._library.search_order(self._handle, ops.ctypes.data)
        return tuple(ops.tolist())

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """Bytes at every position."""
        nbytes = np.empty(self._library.search_size(self._handle), np.int64)
        self._library.search_bytes(self._handle, nbytes.ctypes.data)
        return nbytes

    def edit(self, limit: int, anchor: int, chain: Sequence[int], removed: Iterable[int]) -> tuple[int, float] | None:
        """Apply one edit, given by positions, and return the change of (bytes over the limit, seconds); None if refused."""
        ops, positions = np.array(chain, np.int32), np.array(list(removed), np.int32)
        area, seconds = _I64(), _F64()
        applied = self._library.search_change(
            self._handle, limit, anchor, ops.ctypes.data, len(ops), positions.ctypes.data, len(positions),
            ctypes.byref(area), ctypes.byref(seconds),
        )  # fmt: skip
        return (area.value, seconds.value) if applied else None

    def fit(self, limit: int, greed: float, perturbation: float = 0.0, seed: int = 0) -> int:
        """Evict until no position exceeds the limit, or no eviction helps; return the number of edits weighed."""
        return int(self._library.search_fit(self._handle, limit, greed, seed, perturbation))

    def undo(self, limit: int) -> None:
        """Undo recomputations that the limit does not need, the most expensive first."""
        self._library.search_undo(self._handle, limit)

    def improve(self, limit: int, greed: float, work: int, seed: int = 0) -> None:
        """Apply local moves until `work` edits are weighed; the result is the cheapest order within the limit."""
        self._library.search_improve(self._handle, limit, greed, seed, work)
