"""What leaves memory during a step and comes back: where each value is, who waits for it, what the store's workers did.

Three work beside each other: the caller executes, the store's two workers save and load. The schedule itself holds the
bound: a value's memory is given back at its `Free`, which waits until the write has completed, and what is loaded next
stands behind that `Free`. So loading waits for saving, saving waits for nobody, and execution waits only there and for a
value that it needs now. Timing moves these waits, never bytes.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self

import torch

from autotune.errors import PlanError, StoreError
from autotune.records.measurement import Lanes, Span
from autotune.runtime import malloc

_log = logging.getLogger(__name__)


class Place(StrEnum):
    """Where an offloaded value is."""

    READY_FOR_EXEC = "in memory"
    WAIT_FOR_OFF = "being written"
    SWAPPED = "away"
    WAIT_FOR_EXEC = "being read back"


_BEFORE = {
    Place.WAIT_FOR_OFF: Place.READY_FOR_EXEC,
    Place.SWAPPED: Place.WAIT_FOR_OFF,
    Place.WAIT_FOR_EXEC: Place.SWAPPED,
    Place.READY_FOR_EXEC: Place.WAIT_FOR_EXEC,
}
"""Each place, and the only one that a value may come from."""


class Store(Protocol):
    """The part of a store that a step talks to; see `autotune.runtime.stores`."""

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]": ...

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]": ...

    def transfers(self) -> list[tuple[str, float, float]]: ...


class Memory(Protocol):
    """What the user's own tensors take memory from."""

    def away(self, nbytes: int) -> None:
        """So many bytes of them are away: told at a step's begin, after one gave its memory up, before one takes memory again."""

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give memory to one that has none."""


@dataclass(slots=True, eq=False)
class _Value:
    """One offloaded value during a step."""

    place: Place = Place.READY_FOR_EXEC
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Until they are written; the user's own, and what could not be written, until they are back."""
    nbytes: list[int] = field(default_factory=list)
    pending: list["Future[Any]"] = field(default_factory=list)
    kept: bool = False
    """Its write failed: it never left."""


class Engine:
    """Around each step: `with engine: ...`, and in it `save`, `gone`, `load` and `arrived` as the schedule says.

    `own`: for values that are the user's own (weights, optimizer state) what gives their tensors; `memory`: what these take
    theirs from, malloc if there is none. A value that cannot be written stays in memory, the step goes on above its plan's bytes, and `problem` says why. One that cannot be read back
    is a StoreError; `abandon` then brings the user's own tensors back, and the next step begins anew.
    """

    def __init__(
        self,
        store: Store,
        own: Mapping[int, Callable[[], list[torch.Tensor]]],
        values: int,
        memory: Memory | None = None,
    ) -> None:
        self.store = store
        """Another may take its place between steps, with the same slots."""
        self._own, self._count = own, values
        self._memory = memory
        self.lanes = Lanes()
        """Of the last step that ended."""
        self.transfer_bytes = 0
        """Of the last step: handed to and asked from the store."""
        self.problem = ""
        """Why something of the last step stayed in memory; empty if nothing did."""
        self._begun, self._stepped = 0.0, False
        self._away = 0
        self._values: dict[int, _Value] = {}
        self._save_stalls: list[Span] = []
        self._load_stalls: list[Span] = []

    def begin(self) -> None:
        """A new step."""
        self._values = {}
        self._save_stalls, self._load_stalls = [], []
        self.transfer_bytes, self.problem = 0, ""
        self._leave(-self._away)
        self.store.transfers()  # of a step that was abandoned
        self._begun = time.perf_counter()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        else:
            self.abandon()

    def end(self) -> None:
        """Note what the lanes did."""
        seconds = time.perf_counter() - self._begun
        self._stepped = True
        away = next((key for key, value in self._values.items() if value.place is not Place.READY_FOR_EXEC), None)
        if away is not None:
            raise PlanError(f"value {away} is {self._values[away].place} at the end of the step")
        moved: dict[str, list[Span]] = {"write": [], "read": []}
        for verb, start, stop in self.store.transfers():
            moved[verb].append((start - self._begun, stop - self._begun))
        self.lanes = Lanes(
            seconds, tuple(moved["write"]), tuple(moved["read"]), tuple(self._save_stalls), tuple(self._load_stalls)
        )

    def save(self, key: int, tensor: torch.Tensor | None = None) -> None:
        """Begin to write: a value of the step's own, or without a tensor one of the user's."""
        value = self._values.setdefault(key, _Value())
        self._move(key, Place.WAIT_FOR_OFF)
        value.tensors = [tensor] if tensor is not None else self._own[key]()
        if tensor is None and not all(one.untyped_storage().resizable() for one in value.tensors):
            value.kept = True
            self._told(
                "the memory of a weight cannot be given back: Tensor.numpy() was called on it, or it is of a file"
            )
            return
        value.nbytes = [one.untyped_storage().nbytes() for one in value.tensors]
        value.pending = [self.store.put(self._slot(key, at), one) for at, one in enumerate(value.tensors)]
        self.transfer_bytes += sum(value.nbytes)

    def gone(self, key: int) -> None:
        """Wait until it is written; then the user's own memory is given back, and the step's own is the caller's to drop."""
        value = self._values[key]
        problem = self._wait(value, self._save_stalls)
        self._move(key, Place.SWAPPED)
        if problem is not None:
            value.kept = True
            self._told(str(problem))
        if value.kept:
            return
        if key in self._own:
            for one in value.tensors:
                one.untyped_storage().resize_(0)
            self._leave(sum(value.nbytes))
            if not self._stepped:
                malloc.trim()  # it lay in the heap, between others; from now on it has a mapping of its own
        else:
            value.tensors = []

    def load(self, key: int) -> None:
        """Take memory for it, and begin to read it back."""
        value = self._values[key]
        self._move(key, Place.WAIT_FOR_EXEC)
        if value.kept:
            return
        if key in self._own:
            self._leave(-sum(value.nbytes))
            value.pending = []
            for at in range(len(value.tensors)):  # one by one: if there is no memory for the next, these are waited for
                value.pending.append(self._fetch_back(key, at, value))
        else:
            value.pending = [self.store.fetch(self._slot(key, 0))]
        self.transfer_bytes += sum(value.nbytes)

    def arrived(self, key: int) -> torch.Tensor | None:
        """Wait until it is back; gives the tensor of a value of the step's own."""
        value = self._values[key]
        if not value.kept:
            problem = self._wait(value, self._load_stalls)
            if problem is not None:
                raise problem
        self._move(key, Place.READY_FOR_EXEC)
        back = None
        if key not in self._own:
            back = value.tensors[0] if value.kept else value.pending[0].result()
        self._values[key] = _Value()
        return back

    def abandon(self) -> None:
        """End a step that failed: whatever is under way ends, and the user's own tensors come back. StoreError where the
        store does not give one of them back."""
        lost = []
        self._leave(-self._away)
        for key, value in self._values.items():
            self._wait(value, [])
            if key not in self._own or value.kept or value.place in (Place.READY_FOR_EXEC, Place.WAIT_FOR_OFF):
                continue
            back = value.pending if value.place is Place.WAIT_FOR_EXEC else []
            for at in range(len(value.tensors)):
                if at < len(back) and back[at].exception() is None:
                    continue
                try:
                    problem = self._fetch_back(key, at, value).exception()
                except (MemoryError, RuntimeError) as error:  # torch's own where it has no memory
                    problem = error
                lost += [str(problem)] if problem is not None else []
        self._values = {}
        if lost:
            raise StoreError(f"{lost[0]}. A weight or its optimizer state is lost: load a checkpoint")

    def _leave(self, nbytes: int) -> None:
        """So many bytes more of the user's own are away."""
        self._away += nbytes
        if self._memory is not None:
            self._memory.away(self._away)

    def _told(self, problem: str) -> None:
        if not self.problem:
            _log.warning("%s. What cannot leave stays in memory: this step takes more than planned", problem)
        self.problem = problem

    def _fetch_back(self, key: int, at: int, value: _Value) -> "Future[torch.Tensor]":
        storage = value.tensors[at].untyped_storage()
        if storage.nbytes() != value.nbytes[at]:
            if self._memory is None:
                storage.resize_(value.nbytes[at])
            else:
                self._memory.take(storage, value.nbytes[at])
        return self.store.fetch(self._slot(key, at), value.tensors[at])

    def _slot(self, key: int, at: int) -> int:
        return slot(key, at, self._count)

    def _move(self, key: int, place: Place) -> None:
        value = self._values[key]
        if value.place is not _BEFORE[place]:
            raise PlanError(f"value {key} is {value.place}, so it cannot be {place} next: the schedule is wrong")
        value.place = place

    def _wait(self, value: _Value, stalls: list[Span]) -> BaseException | None:
        """Until nothing of it is under way; what went wrong, if anything did."""
        waits = not all(one.done() for one in value.pending)
        start = time.perf_counter()
        problems = [found for one in value.pending if (found := one.exception()) is not None]
        if waits:
            stalls.append((start - self._begun, time.perf_counter() - self._begun))
        return problems[0] if problems else None


def slot(value: int, part: int, values: int) -> int:
    """Key in the store of one of a value's tensors, where the graph has so many values."""
    return value + part * values
