"""Edit an order of runs: weigh and apply added or removed recomputations, with exact bytes at every position.

Liveness is that of `autotune.ir.schedule.lower`: a reader uses the latest run, and a version lives from its run to its
last read before the next run. All numbers are exact; nothing is estimated.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.errors import PlanError
from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan

Bytes = npt.NDArray[np.int64]
NEVER = 1 << 60
"""Marker of a read at the end of the step."""


def refuse_inplace_and_offload(plan: Plan) -> None:
    """Raise PlanError if the plan already runs ops in place or offloads: both refer to positions of its order."""
    if plan.inplace:
        raise PlanError(f"the plan already runs {len(plan.inplace)} ops in place; plan recompute before in-place")
    if plan.offload:
        raise PlanError(f"the plan already offloads {len(plan.offload)} gaps; plan recompute before offload")


@lru_cache(maxsize=4)
def later_writers(graph: TrainGraph) -> tuple[tuple[int, ...], ...]:
    """Return, per op, the ops that overwrite its inputs later in the trace: it cannot be recomputed after them."""
    writers: dict[int, list[int]] = {}
    for op in graph.ops:
        for value in op.writes:
            writers.setdefault(value, []).append(op.id)
    return tuple(
        tuple({writer for value in op.inputs for writer in writers.get(value, ()) if writer > op.id})
        for op in graph.ops
    )


@dataclass(frozen=True, slots=True)
class OrderEdit:
    """Edit of an order: a chain of ops to recompute, runs to remove, and the effect on bytes and seconds."""

    anchor: int
    """Run before which the chain is inserted; -1 for an edit without a chain."""
    chain: tuple[int, ...]
    """Ops to run again, in order."""
    removed: tuple[int, ...]
    """Runs to remove."""
    area: int
    """Change of the bytes over the limit, summed over positions; negative is better."""
    seconds: float
    """Change of the step's seconds."""
    low: int
    delta: Bytes
    """Change of the bytes at the positions from `low` on."""
    local: tuple[int, ...]
    """Bytes while each op of the chain runs."""
    events: dict[int, list[int]]
    """New runs and reads of each value that the edit touches; `~i` is the i-th op of the chain."""


class EditableOrder:
    """Order of runs that can be edited. A run keeps its number across edits; `position` returns where it runs."""

    def __init__(self, graph: TrainGraph, order: Sequence[int], costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        dynamic = [value.id not in graph.static for value in graph.values]
        self.nbytes = [value.nbytes for value in graph.values]
        self.reads = [tuple(value for value in op.inputs if dynamic[value]) for op in graph.ops]
        self.makes = [op.outputs for op in graph.ops]
        self.maker = [-1 if op is None else op for op in graph.producer]
        self.sources = [tuple(dict.fromkeys(self.maker[value] for value in reads)) for reads in self.reads]
        self.op_bytes = [
            sum(self.nbytes[value] for value in op.outputs) + scratch
            for op, scratch in zip(graph.ops, costs.scratch_bytes, strict=True)
        ]
        self.outputs = frozenset(graph.outputs)
        self.repeatable = [op.repeatable and not op.random and not op.writes and bool(op.outputs) for op in graph.ops]
        self.later_writers = later_writers(graph)
        self.limit = 0
        self._start(order)

    def _start(self, order: Sequence[int]) -> None:
        self.op_of = list(order)
        self._position: Bytes = np.arange(len(order), dtype=np.int64)
        self.sequence: Bytes = np.arange(len(order), dtype=np.int64)
        self.events: list[list[int]] = [[] for _ in self.nbytes]
        self.runs: list[list[int]] = [[] for _ in self.graph.ops]
        for run, op in enumerate(order):
            self.runs[op].append(run)
            for value in (*self.reads[op], *self.makes[op]):
                self.events[value].append(run)
        steps = np.zeros(len(order) + 1, dtype=np.int64)
        for value, events in enumerate(self.events):
            for first, last in self._intervals(value, events):
                steps[self.position(first)] += self.nbytes[value]
                steps[self._end(last)] -= self.nbytes[value]
        scratch = np.array([self.costs.scratch_bytes[op] for op in order], dtype=np.int64)
        self.bytes: Bytes = np.cumsum(steps)[:-1] + scratch + self.graph.static_bytes

    def copy(self) -> "EditableOrder":
        """Return an independent copy."""
        twin = object.__new__(EditableOrder)
        twin.__dict__.update(self.__dict__)
        twin.op_of, twin._position, twin.sequence = self.op_of.copy(), self._position.copy(), self.sequence.copy()
        twin.bytes = self.bytes.copy()
        twin.events = [events.copy() for events in self.events]
        twin.runs = [runs.copy() for runs in self.runs]
        return twin

    # -- current state ---------------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, ...]:
        """Ops in the order in which they run."""
        return tuple(self.op_of[run] for run in self.sequence.tolist())

    @property
    def peak(self) -> int:
        """Peak in bytes."""
        return int(self.bytes.max()) if len(self.bytes) else self.graph.static_bytes

    @property
    def seconds(self) -> float:
        """Seconds of all runs."""
        return sum(self.costs.seconds[op] for op in self.order)

    def position(self, run: int) -> int:
        """Return the position of a run; -1 if it was removed."""
        return self._position.item(run)

    def _end(self, last: int) -> int:
        """Return the position after the last read of a version."""
        return len(self.sequence) if last == NEVER else self._position.item(last) + 1

    def latest(self, op: int, position: int) -> int:
        """Return the last run of an op before `position`; -1 if there is none."""
        op_runs = self.runs[op]
        index = bisect_left(op_runs, position, key=self._position.item)
        return op_runs[index - 1] if index else -1

    def is_repeat(self, run: int) -> bool:
        """Return true if the op already ran before this run."""
        return run != self.runs[self.op_of[run]][0]

    def repeats(self) -> list[int]:
        """Return all runs but the first of each op."""
        return [run for op_runs in self.runs for run in op_runs[1:]]

    def last_event(self, value: int, position: int) -> int:
        """Return the position of a value's last run or read before `position`; -1 if there is none."""
        events = self.events[value]
        index = bisect_left(events, position, key=self._position.item)
        return self.position(events[index - 1]) if index else -1

    def is_live(self, value: int, position: int) -> bool:
        """Return true if a value computed earlier is live just before `position`: its next event is a read."""
        events = self.events[value]
        index = bisect_left(events, position, key=self._position.item)
        if index == len(events):
            return value in self.outputs
        return self.op_of[events[index]] != self.graph.producer[value]

    def may_run_before(self, op: int, position: int) -> bool:
        """Return true if the op may be recomputed there: it has no side effect and its inputs are not overwritten yet."""
        if not self.repeatable[op]:
            return False
        return all(position <= self.position(self.runs[writer][0]) for writer in self.later_writers[op])

    def _intervals(self, value: int, events: Sequence[int], chain: Sequence[int] = ()) -> Iterable[tuple[int, int]]:
        """Yield (run, last read) of every version of a value."""
        maker = self.graph.producer[value]
        first = last = None
        for run in events:
            if (chain[~run] if run < 0 else self.op_of[run]) == maker:
                if first is not None and last is not None:
                    yield first, last
                first = run
            last = run
        if first is not None and last is not None:
            yield first, NEVER if value in self.outputs else last

    # -- weighing an edit ------------------------------------------------------------------------------------------

    def weigh_edit(self, anchor: int = -1, chain: Sequence[int] = (), removed: Iterable[int] = ()) -> OrderEdit | None:
        """Return the edit that inserts `chain` before `anchor` and removes `removed` and all runs then unread.

        Return None if a needed run would be removed.
        """
        position = self.position(anchor) if anchor >= 0 else len(self.sequence)
        events: dict[int, list[int]] = {}
        suspects: list[tuple[int, int]] = []  # (op, run): its results may have lost their last reader

        def edited_events(value: int) -> list[int]:
            if value not in events:
                events[value] = self.events[value].copy()
            return events[value]

        slots: dict[int, int] = {}
        for index, op in enumerate(chain):
            for value in (*self.reads[op], *self.makes[op]):
                value_events = edited_events(value)
                slot = slots.get(value)
                if slot is None:
                    slot = bisect_left(value_events, position, key=self._position.item)
                value_events.insert(slot, ~index)
                slots[value] = slot + 1
        for op in chain:
            run = self.latest(op, position)
            if run >= 0:
                suspects.append((op, run))
        dropped: list[int] = []
        pending = list(removed)
        while pending or suspects:
            if pending:
                run = pending.pop()
                op = self.op_of[run]
                dropped.append(run)
                for value in (*self.makes[op], *self.reads[op]):
                    value_events = edited_events(value)
                    slot = value_events.index(run)
                    del value_events[slot]
                    maker = self.graph.producer[value]
                    if maker == op or maker is None:
                        continue
                    while slot > 0:
                        slot -= 1
                        before = value_events[slot]
                        if (chain[~before] if before < 0 else self.op_of[before]) == maker:
                            suspects.append((maker, before))
                            break
                continue
            op, run = suspects.pop()
            if run in dropped or run in pending or not self._is_unread(op, run, chain, edited_events):
                continue
            if run < 0:
                return None  # nobody reads a result of the chain
            pending.append(run)
        for run in dropped:
            op = self.op_of[run]
            left = [other for other in self.runs[op] if other not in dropped]
            if not left and op not in chain:
                return None
        if not self._runs_before_reads(events, chain):
            return None
        return self._weigh(anchor, position, tuple(chain), tuple(dropped), events)

    def _is_unread(self, op: int, run: int, chain: Sequence[int], edited_events: Callable[[int], list[int]]) -> bool:
        """Return true if no op reads the results of this run."""
        for value in self.makes[op]:
            value_events = edited_events(value)
            following = value_events.index(run) + 1
            if following == len(value_events):
                if value in self.outputs:
                    return False
                continue
            after = value_events[following]
            if (chain[~after] if after < 0 else self.op_of[after]) != op:
                return False
        return True

    def _runs_before_reads(self, events: Mapping[int, list[int]], chain: Sequence[int]) -> bool:
        for value, value_events in events.items():
            if value_events:
                first = chain[~value_events[0]] if value_events[0] < 0 else self.op_of[value_events[0]]
                if first != self.graph.producer[value]:
                    return False
        return True

    def _weigh(
        self, anchor: int, position: int, chain: tuple[int, ...], dropped: tuple[int, ...], events: dict[int, list[int]]
    ) -> OrderEdit:
        """Return the edit with its effect on bytes and seconds, computed from its events."""
        size = len(chain)
        marks: dict[int, int] = {}
        inner = [0] * (size + 1)

        def mark(value: int, first: int, last: int, sign: int) -> None:
            amount = sign * self.nbytes[value]
            begin = position if first < 0 else self._position.item(first)
            end = position if last < 0 else self._end(last)
            if begin < end:
                marks[begin] = marks.get(begin, 0) + amount
                marks[end] = marks.get(end, 0) - amount
            if size:
                enter = ~first if first < 0 else (0 if begin < position else size)
                leave = (~last) + 1 if last < 0 else (size if end > position else 0)
                if enter < leave:
                    inner[enter] += amount
                    inner[leave] -= amount

        for value, value_events in events.items():
            old = list(self._intervals(value, self.events[value]))
            new = list(self._intervals(value, value_events, chain))
            if len(new) > 1 or len(old) > 1:
                unchanged = set(old)
                old = [version for version in old if version not in new]
                new = [version for version in new if version not in unchanged]
            for first, last in old:
                mark(value, first, last, -1)
            for first, last in new:
                mark(value, first, last, +1)
        local = []
        if size:
            live_bytes = int(self.bytes[position]) - self.op_bytes[self.op_of[anchor]]
            for index, op in enumerate(chain):
                live_bytes += inner[index]
                local.append(live_bytes + self.costs.scratch_bytes[op])
        low, delta = self._spread(marks)
        area = sum(max(0, bytes_ - self.limit) for bytes_ in local)
        if len(delta):
            over = self.bytes[low : low + len(delta)] - self.limit
            area += int((np.maximum(over + delta, 0) - np.maximum(over, 0)).sum())
        for run in dropped:
            where = self.position(run)
            inside = int(delta[where - low]) if low <= where < low + len(delta) else 0
            area -= max(0, int(self.bytes[where]) + inside - self.limit)
        seconds = sum(self.costs.seconds[op] for op in chain) - sum(
            self.costs.seconds[self.op_of[run]] for run in dropped
        )
        return OrderEdit(anchor, chain, dropped, area, seconds, low, delta, tuple(local), events)

    @staticmethod
    def _spread(marks: dict[int, int]) -> tuple[int, Bytes]:
        places = [place for place, amount in marks.items() if amount]
        if not places:
            return 0, np.zeros(0, dtype=np.int64)
        low, high = min(places), max(places)
        delta = np.zeros(high - low, dtype=np.int64)
        for place in places:
            if place < high:
                delta[place - low] += marks[place]
        return low, np.cumsum(delta)

    # -- applying an edit ------------------------------------------------------------------------------------------

    def apply(self, edit: OrderEdit) -> list[int]:
        """Apply an edit that was weighed against the current state, and return the new runs of its chain."""
        fresh = list(range(len(self.op_of), len(self.op_of) + len(edit.chain)))
        self.op_of.extend(edit.chain)
        if len(edit.delta):
            self.bytes[edit.low : edit.low + len(edit.delta)] += edit.delta
        for value, value_events in edit.events.items():
            self.events[value] = [fresh[~run] if run < 0 else run for run in value_events]
        self._position = np.concatenate([self._position, np.zeros(len(fresh), dtype=np.int64)])
        if fresh:
            position = self.position(edit.anchor)
            self.sequence = np.insert(self.sequence, position, fresh)
            self.bytes = np.insert(self.bytes, position, edit.local)
        for run, op in zip(fresh, edit.chain, strict=True):
            self.runs[op].append(run)
        self._position[self.sequence] = np.arange(len(self.sequence))
        if edit.removed:
            places = [self.position(run) for run in edit.removed]
            self.sequence = np.delete(self.sequence, places)
            self.bytes = np.delete(self.bytes, places)
            self._position[self.sequence] = np.arange(len(self.sequence))
            for run in edit.removed:
                self.runs[self.op_of[run]].remove(run)
                self._position[run] = -1
        for op in edit.chain:
            self.runs[op].sort(key=self._position.item)
        return fresh
