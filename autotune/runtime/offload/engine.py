"""Move offloaded values between memory and a store while a step runs.

Three threads work at the same time: the caller executes, and the store's two workers write and read. The schedule
bounds the memory. A `Free` of an offloaded value waits until its write has finished, and each `Prefetch` stands behind the
`Free` that makes room for it. Reads therefore wait for writes, and writes wait for nothing. Execution waits only at a
`Free` and for a value that its next op reads. Timing changes these waits, never the bytes.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch

from autotune.errors import PlanError, SlotError, StoreError
from autotune.records.measurement import Span, TransferTrace
from autotune.runtime import malloc
from autotune.runtime.stores import Direction

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


ATTEMPTS = 3
"""Number of attempts to restore one value after a failed step: an error may be that of a signal's handler."""


class Residence(StrEnum):
    """Place of an offloaded value's bytes."""

    MEMORY = "in memory"
    WRITING = "being written"
    STORE = "in the store"
    READING = "being read back"


_PREVIOUS = {
    Residence.WRITING: Residence.MEMORY,
    Residence.STORE: Residence.WRITING,
    Residence.READING: Residence.STORE,
    Residence.MEMORY: Residence.READING,
}
"""The only valid predecessor of each residence."""


class Store(Protocol):
    """The part of a store that a step uses; see `autotune.runtime.stores.SwapStore`."""

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]": ...

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]": ...

    def transfers(self) -> list[tuple[Direction, float, float]]: ...


class EventLog(Protocol):
    """Events of one step on a GPU; see `autotune.runtime.stores.step_events.StepEvents`."""

    def waiting(self, direction: Direction) -> AbstractContextManager[None]: ...

    def end(self) -> None: ...

    def trace(self) -> TransferTrace: ...


@runtime_checkable
class RecordsSteps(Protocol):
    """A store of a GPU's values, which records a step by events: the host's clock does not show what the GPU waits for."""

    def begin_step(self, device: torch.device) -> EventLog: ...


class StaticMemory(Protocol):
    """An allocator of static tensors (parameters and optimizer state) that return from a store."""

    def set_offloaded(self, nbytes: int) -> None:
        """Update the bytes of static tensors that are offloaded now.

        Called when a step begins, after a static tensor has released its memory, and before one is allocated again.
        """

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate `nbytes` for a storage without memory."""


@dataclass(slots=True, eq=False)
class _Value:
    """State of one offloaded value during a step."""

    residence: Residence = Residence.MEMORY
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Tensors that must stay alive: until written, or until read back if they are static or their write failed."""
    nbytes: list[int] = field(default_factory=list)
    pending: list["Future[Any]"] = field(default_factory=list)
    stays: bool = False
    """True if it could not be written, so its memory was never released."""


class OffloadEngine:
    """Run the transfers of each step: `with engine: ...`, inside which the schedule's instructions call the methods.

    Args:
        store: Destination of the bytes.
        static: For each static value (parameter or optimizer state), a function that returns its tensors.
        value_count: Number of values in the graph.
        memory: Allocator of static tensors that return; malloc if None.
        device: Device of the values.

    A value that cannot be written stays in memory. The step then continues with more bytes than planned, and `problem`
    holds the reason. A value that cannot be read back raises StoreError. `abort` then restores all static tensors,
    and the next step starts from a clean state. An interrupt that arrives meanwhile is raised once they are back.
    """

    def __init__(
        self,
        store: Store,
        static: Mapping[int, Callable[[], list[torch.Tensor]]],
        value_count: int,
        memory: StaticMemory | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.store = store
        """Store in use; between steps it may be replaced by another with the same slots."""
        self._static, self._value_count = static, value_count
        self._memory = memory
        self._device = device
        self._trace: TransferTrace | EventLog = TransferTrace()
        self.transfer_bytes = 0
        """Bytes written and read by the last step."""
        self.problem = ""
        """Reason why a value of the last step stayed in memory; empty if every value was offloaded."""
        self._reported = ""
        self._start_seconds, self._has_run = 0.0, False
        self._offloaded_static_bytes = 0
        self._values: dict[int, _Value] = {}
        self._stalls: dict[Direction, list[Span]] = {direction: [] for direction in Direction}
        self._events: EventLog | None = None

    @property
    def transfer_trace(self) -> TransferTrace:
        """Transfers and stalls of the last completed step. On a GPU this waits until the step has run."""
        if not isinstance(self._trace, TransferTrace):
            self._trace = self._trace.trace()
        return self._trace

    @property
    def pending_trace(self) -> Callable[[], TransferTrace]:
        """Function that returns the trace of the last completed step, also after later steps have begun."""
        trace = self._trace
        return (lambda: trace) if isinstance(trace, TransferTrace) else trace.trace

    def begin(self) -> None:
        """Start a step, after the end of one that was broken off before its tensors were back."""
        if any(value.residence is not Residence.MEMORY for value in self._values.values()):
            self.abort()
        self._values = {}
        self._stalls = {direction: [] for direction in Direction}
        self.transfer_bytes, self.problem = 0, ""
        self._add_offloaded(-self._offloaded_static_bytes)
        self.store.transfers()  # drops those of an aborted step
        self._events = self.store.begin_step(self._device) if isinstance(self.store, RecordsSteps) else None
        self._start_seconds = time.perf_counter()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
            return
        try:
            # the frames of the failed step hold its values, whose memory the weights need that are away
            traceback.clear_frames(trace)
        finally:
            self.abort()

    def end(self) -> None:
        """Finish a step and record its transfers. Raises PlanError if a value is still outside of memory."""
        seconds = time.perf_counter() - self._start_seconds
        self._has_run = True
        for key, value in self._values.items():
            if value.residence is not Residence.MEMORY:
                raise PlanError(f"value {key} is {value.residence} at the end of the step")
        if self._events is not None:
            self._events.end()
            self._trace = self._events
            return
        spans: dict[Direction, list[Span]] = {Direction.WRITE: [], Direction.READ: []}
        for direction, start, stop in self.store.transfers():
            spans[direction].append((start - self._start_seconds, stop - self._start_seconds))
        self._trace = TransferTrace(
            seconds,
            tuple(spans[Direction.WRITE]),
            tuple(spans[Direction.READ]),
            tuple(self._stalls[Direction.WRITE]),
            tuple(self._stalls[Direction.READ]),
        )

    def start_write(self, key: int, tensor: torch.Tensor | None = None) -> None:
        """Start to write a value: `tensor`, or the tensors of a static value if None."""
        value = self._values.setdefault(key, _Value())
        self._enter(key, Residence.WRITING)
        value.tensors = [tensor] if tensor is not None else self._static[key]()
        if tensor is None and not all(part.untyped_storage().resizable() for part in value.tensors):
            value.stays = True
            self._report(
                "the memory of a weight cannot be released: Tensor.numpy() was called on it, or it maps a file"
            )
            return
        value.nbytes = [part.untyped_storage().nbytes() for part in value.tensors]
        value.pending = []
        # appended one by one: if the store refuses the next tensor, `abort` must wait for the writes before it
        try:
            for index, part in enumerate(value.tensors):
                value.pending.append(self.store.put(self._slot(key, index), part))
        except SlotError as error:
            if tensor is not None:
                raise
            value.stays = True  # the state of a loaded checkpoint may have other tensors than the slots were made for
            self._report(str(error))
            return
        self.transfer_bytes += sum(value.nbytes)

    def finish_write(self, key: int) -> None:
        """Wait for a value's write, then release its memory if it is static; the caller drops any other value."""
        value = self._values[key]
        problem = self._wait(value, Direction.WRITE)
        self._enter(key, Residence.STORE)
        if problem is not None:
            value.stays = True
            self._report(str(problem))
        if value.stays:
            return
        if key in self._static:
            for part in value.tensors:
                part.untyped_storage().resize_(0)
            self._add_offloaded(sum(value.nbytes))
            if not self._has_run:
                malloc.trim()  # it was part of the heap; when it returns it gets a mapping of its own
        else:
            value.tensors = []

    def start_read(self, key: int) -> None:
        """Allocate memory for an offloaded value and start to read it back."""
        value = self._values[key]
        value.pending = []  # before the value counts as being read: `abort` must not take its writes for reads
        self._enter(key, Residence.READING)
        if value.stays:
            return
        if key in self._static:
            self._add_offloaded(-sum(value.nbytes))
            # appended one by one: if the next allocation fails, `abort` must wait for the reads before it
            for index in range(len(value.tensors)):
                value.pending.append(self._restore(key, index, value))
        else:
            value.pending = [self.store.fetch(self._slot(key, 0))]
        self.transfer_bytes += sum(value.nbytes)

    def finish_read(self, key: int) -> torch.Tensor | None:
        """Wait until a value is back; return its tensor, or None for a static value. Raises StoreError if a read failed."""
        value = self._values[key]
        if not value.stays:
            problem = self._wait(value, Direction.READ)
            if problem is not None:
                raise problem
        self._enter(key, Residence.MEMORY)
        tensor = None
        if key not in self._static:
            tensor = value.tensors[0] if value.stays else value.pending[0].result()
        self._values[key] = _Value()
        return tensor

    def abort(self) -> None:
        """End a failed step: wait for pending transfers, drop the step's values, and restore all static tensors.

        What a signal's handler raises meanwhile, such as the second of two Ctrl-C, does not end that: a tensor on which it
        arrives is restored again. KeyboardInterrupt and SystemExit are raised afterwards.

        Raises StoreError if the store cannot return a tensor, which is NaN then, or if there is no memory for it.
        """
        problems: dict[tuple[int, int], str] = {}
        late: BaseException | None = None
        left = [(key, part) for key, value in self._values.items() for part in range(max(1, len(value.tensors)))]
        left.sort(key=lambda item: item[0] not in self._static)  # from the end: what is dropped makes room
        failures = 0
        while left:
            try:
                problem = self._bring_back(*left[-1])
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                failures += 1
                if failures < ATTEMPTS:
                    continue
                problem = error
            except BaseException as error:  # noqa: BLE001 - raised below
                late = error
                continue
            if problem is not None:
                problems[left[-1]] = str(problem)
            failures = 0
            left.pop()
        for key, part in problems:
            self._fill_lost(key, part)
        has_memory = all(
            tensor.untyped_storage().nbytes() == nbytes
            for key, value in self._values.items()
            if key in self._static
            for tensor, nbytes in zip(value.tensors, value.nbytes, strict=False)
        )
        self._values = {}
        if problems:
            # a checkpoint cannot be loaded into a tensor without memory
            advice = "load a checkpoint" if has_memory else "start the process again and load a checkpoint"
            raise StoreError(f"{next(iter(problems.values()))}, and a weight or its optimizer state is lost; {advice}")
        if late is not None:
            raise late

    def _bring_back(self, key: int, part: int) -> BaseException | None:
        """Wait for a value's transfers, and restore one of its tensors if it is static and away; return the store's error."""
        if self._offloaded_static_bytes:
            self._add_offloaded(-self._offloaded_static_bytes)
        value = self._values[key]
        self._wait(value)
        if key not in self._static:
            value.tensors, value.pending = [], []
        in_memory = value.residence in (Residence.MEMORY, Residence.WRITING)
        if key not in self._static or value.stays or in_memory or part == len(value.tensors):
            return None
        reads = value.pending if value.residence is Residence.READING else []
        if part < len(reads) and reads[part].exception() is None:
            return None
        return self._restore(key, part, value).exception()

    def _fill_lost(self, key: int, part: int) -> None:
        """Fill a lost tensor with NaN: a loop that goes on, or saves the model, would use whatever its memory holds."""
        value = self._values[key]
        is_away = value.residence in (Residence.STORE, Residence.READING) and not value.stays
        if key not in self._static or not is_away or part == len(value.tensors):
            return
        tensor, nbytes = value.tensors[part], value.nbytes[part]
        if tensor.untyped_storage().nbytes() == nbytes and (tensor.is_floating_point() or tensor.is_complex()):
            with torch.no_grad(), suppress(RuntimeError):  # a GPU that failed runs no kernel
                tensor.fill_(math.nan)

    def _add_offloaded(self, nbytes: int) -> None:
        self._offloaded_static_bytes += nbytes
        if self._memory is not None:
            self._memory.set_offloaded(self._offloaded_static_bytes)

    def _report(self, problem: str) -> None:
        if not self.problem and problem != self._reported:  # each step may have the same
            _log.warning("%s. The value stays in memory, so the step exceeds its planned bytes", problem)
            self._reported = problem
        self.problem = problem

    def _restore(self, key: int, index: int, value: _Value) -> "Future[torch.Tensor]":
        """Allocate one static tensor's memory, unless it has it already, and start to read its bytes."""
        storage = value.tensors[index].untyped_storage()
        if storage.nbytes() != value.nbytes[index]:
            if self._memory is None:
                storage.resize_(value.nbytes[index])
            else:
                self._memory.allocate(storage, value.nbytes[index])
        return self.store.fetch(self._slot(key, index), value.tensors[index])

    def _slot(self, key: int, part: int) -> int:
        return slot_key(key, part, self._value_count)

    def _enter(self, key: int, residence: Residence) -> None:
        value = self._values[key]
        if value.residence is not _PREVIOUS[residence]:
            raise PlanError(
                f"value {key} is {value.residence}, so it cannot be {residence} next: the schedule is wrong"
            )
        value.residence = residence

    def _wait(self, value: _Value, direction: Direction | None = None) -> BaseException | None:
        """Wait for all pending transfers of a value; return the first error, or None. No direction: not a stall."""
        waits = direction is not None and not all(future.done() for future in value.pending)
        start = time.perf_counter()
        with self._events.waiting(direction) if self._events and waits and direction else nullcontext():
            errors = [error for future in value.pending if (error := future.exception()) is not None]
        if waits and direction is not None:
            self._stalls[direction].append((start - self._start_seconds, time.perf_counter() - self._start_seconds))
        return errors[0] if errors else None


def slot_key(value: int, part: int, value_count: int) -> int:
    """Return the store's key for one tensor of a value, in a graph with `value_count` values."""
    return value + part * value_count
