"""An order of runs whose bytes are known at every position, and what one more or one less recomputation would change.

Liveness is `autotune.ir.schedule.lower`'s: readers take the latest run, and a version lives from its run to its last read
before the next run. All numbers are exact; nothing is estimated.
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
"""Stands for a read at the end of the step."""


def refuse_offload(plan: Plan) -> None:
    """Gaps of an offloaded value and runs in place are counted in one order: recomputation is decided before."""
    if plan.inplace:
        raise PlanError(f"the plan makes {len(plan.inplace)} outputs in place already; plan recompute before that")
    if plan.offload:
        raise PlanError(f"the plan offloads {len(plan.offload)} gaps already; plan recompute before offload")


@lru_cache(maxsize=4)
def spoilers(graph: TrainGraph) -> tuple[tuple[int, ...], ...]:
    """Per op the writers after which it cannot run again: they change what it reads, and came later in the trace."""
    writers: dict[int, list[int]] = {}
    for op in graph.ops:
        for value in op.writes:
            writers.setdefault(value, []).append(op.id)
    return tuple(
        tuple({writer for value in op.inputs for writer in writers.get(value, ()) if writer > op.id})
        for op in graph.ops
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A chain of ops run again before a position, runs taken out, and what that does to bytes and seconds."""

    anchor: int
    """Run before which the chain is put; -1 for none."""
    chain: tuple[int, ...]
    removed: tuple[int, ...]
    """Runs taken out."""
    area: int
    """Change of the bytes over the limit, summed over positions: negative is better."""
    seconds: float
    low: int
    delta: Bytes
    """Added to the bytes from position `low` on."""
    local: tuple[int, ...]
    """Bytes while each op of the chain runs."""
    events: dict[int, list[int]]
    """Per value touched its runs and reads; `~i` is the i-th of the chain."""


class Runs:
    """An order under change. A run keeps its number while others come and go; `at` gives its position."""

    def __init__(self, graph: TrainGraph, order: Sequence[int], costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        dynamic = [value.id not in graph.static for value in graph.values]
        self.nbytes = [value.nbytes for value in graph.values]
        self.reads = [tuple(value for value in op.inputs if dynamic[value]) for op in graph.ops]
        self.makes = [op.outputs for op in graph.ops]
        self.maker = [-1 if op is None else op for op in graph.producer]
        self.sources = [tuple(dict.fromkeys(self.maker[value] for value in reads)) for reads in self.reads]
        self.own = [
            sum(self.nbytes[value] for value in op.outputs) + scratch
            for op, scratch in zip(graph.ops, costs.scratch_bytes, strict=True)
        ]
        self.outputs = frozenset(graph.outputs)
        self.repeatable = [op.repeatable and not op.random and not op.writes and bool(op.outputs) for op in graph.ops]
        self.spoilers = spoilers(graph)
        self.limit = 0
        self._start(order)

    def _start(self, order: Sequence[int]) -> None:
        self.op_of = list(order)
        self._at: Bytes = np.arange(len(order), dtype=np.int64)
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
                steps[self.at(first)] += self.nbytes[value]
                steps[self._end(last)] -= self.nbytes[value]
        scratch = np.array([self.costs.scratch_bytes[op] for op in order], dtype=np.int64)
        self.bytes: Bytes = np.cumsum(steps)[:-1] + scratch + self.graph.static_bytes

    def copy(self) -> "Runs":
        """The same order, to be changed apart."""
        twin = object.__new__(Runs)
        twin.__dict__.update(self.__dict__)
        twin.op_of, twin._at, twin.sequence = self.op_of.copy(), self._at.copy(), self.sequence.copy()
        twin.bytes = self.bytes.copy()
        twin.events = [events.copy() for events in self.events]
        twin.runs = [runs.copy() for runs in self.runs]
        return twin

    # -- what stands now -------------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, ...]:
        """Ops as they run."""
        return tuple(self.op_of[run] for run in self.sequence.tolist())

    @property
    def peak(self) -> int:
        """Highest bytes."""
        return int(self.bytes.max()) if len(self.bytes) else self.graph.static_bytes

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return sum(self.costs.seconds[op] for op in self.order)

    def at(self, run: int) -> int:
        """Position of a run."""
        return self._at.item(run)

    def _end(self, last: int) -> int:
        """Position after the last read of a version; -1 stands for the end of the step."""
        return len(self.sequence) if last == NEVER else self._at.item(last) + 1

    def latest(self, op: int, position: int) -> int:
        """The last run of an op before `position`; -1 if none."""
        own = self.runs[op]
        index = bisect_left(own, position, key=self._at.item)
        return own[index - 1] if index else -1

    def is_repeat(self, run: int) -> bool:
        """Whether an op ran before this run of it."""
        return run != self.runs[self.op_of[run]][0]

    def repeats(self) -> list[int]:
        """All runs of ops that ran before."""
        return [run for own in self.runs for run in own[1:]]

    def last_event(self, value: int, position: int) -> int:
        """Position of the last run or read of a value before `position`; -1 if none."""
        events = self.events[value]
        index = bisect_left(events, position, key=self._at.item)
        return self.at(events[index - 1]) if index else -1

    def live(self, value: int, position: int) -> bool:
        """Whether a value that was made before stands in memory just before `position`: its next event is a read."""
        events = self.events[value]
        index = bisect_left(events, position, key=self._at.item)
        if index == len(events):
            return value in self.outputs
        return self.op_of[events[index]] != self.graph.producer[value]

    def may_run_before(self, op: int, position: int) -> bool:
        """Whether an op may be run again there: no side effect, and nothing it reads was changed in between."""
        if not self.repeatable[op]:
            return False
        return all(position <= self.at(self.runs[writer][0]) for writer in self.spoilers[op])

    def _intervals(self, value: int, events: Sequence[int], chain: Sequence[int] = ()) -> Iterable[tuple[int, int]]:
        """(run, last read) of every version."""
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

    # -- what a change would do ------------------------------------------------------------------------------------

    def change(self, anchor: int = -1, chain: Sequence[int] = (), removed: Iterable[int] = ()) -> Change | None:
        """Run `chain` again just before `anchor`, take `removed` out, and all runs that nobody reads then.

        None where a run that is needed would go.
        """
        position = self.at(anchor) if anchor >= 0 else len(self.sequence)
        events: dict[int, list[int]] = {}
        suspects: list[tuple[int, int]] = []  # (value, event): its version may have lost its last reader

        def mine(value: int) -> list[int]:
            if value not in events:
                events[value] = self.events[value].copy()
            return events[value]

        slots: dict[int, int] = {}
        for index, op in enumerate(chain):
            for value in (*self.reads[op], *self.makes[op]):
                own = mine(value)
                slot = slots.get(value)
                if slot is None:
                    slot = bisect_left(own, position, key=self._at.item)
                own.insert(slot, ~index)
                slots[value] = slot + 1
        for op in chain:
            run = self.latest(op, position)
            if run >= 0:
                suspects.append((op, run))
        gone: list[int] = []
        pending = list(removed)
        while pending or suspects:
            if pending:
                run = pending.pop()
                op = self.op_of[run]
                gone.append(run)
                for value in (*self.makes[op], *self.reads[op]):
                    own = mine(value)
                    slot = own.index(run)
                    del own[slot]
                    maker = self.graph.producer[value]
                    if maker == op or maker is None:
                        continue
                    while slot > 0:
                        slot -= 1
                        before = own[slot]
                        if (chain[~before] if before < 0 else self.op_of[before]) == maker:
                            suspects.append((maker, before))
                            break
                continue
            op, run = suspects.pop()
            if run in gone or run in pending or not self._dead(op, run, chain, mine):
                continue
            if run < 0:
                return None  # the chain makes something that nobody reads
            pending.append(run)
        for run in gone:
            op = self.op_of[run]
            left = [other for other in self.runs[op] if other not in gone]
            if not left and op not in chain:
                return None
        if not self._made_before_read(events, chain):
            return None
        return self._weigh(anchor, position, tuple(chain), tuple(gone), events)

    def _dead(self, op: int, run: int, chain: Sequence[int], mine: Callable[[int], list[int]]) -> bool:
        """Whether nobody reads what this run makes."""
        for value in self.makes[op]:
            own = mine(value)
            following = own.index(run) + 1
            if following == len(own):
                if value in self.outputs:
                    return False
                continue
            after = own[following]
            if (chain[~after] if after < 0 else self.op_of[after]) != op:
                return False
        return True

    def _made_before_read(self, events: Mapping[int, list[int]], chain: Sequence[int]) -> bool:
        for value, own in events.items():
            if own:
                first = chain[~own[0]] if own[0] < 0 else self.op_of[own[0]]
                if first != self.graph.producer[value]:
                    return False
        return True

    def _weigh(
        self, anchor: int, position: int, chain: tuple[int, ...], gone: tuple[int, ...], events: dict[int, list[int]]
    ) -> Change:
        """Bytes and seconds of a change whose events are known."""
        size = len(chain)
        marks: dict[int, int] = {}
        inner = [0] * (size + 1)

        def mark(value: int, first: int, last: int, sign: int) -> None:
            amount = sign * self.nbytes[value]
            begin = position if first < 0 else self._at.item(first)
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

        for value, own in events.items():
            old = list(self._intervals(value, self.events[value]))
            new = list(self._intervals(value, own, chain))
            if len(new) > 1 or len(old) > 1:
                known = set(old)
                old = [version for version in old if version not in new]
                new = [version for version in new if version not in known]
            for first, last in old:
                mark(value, first, last, -1)
            for first, last in new:
                mark(value, first, last, +1)
        local = []
        if size:
            standing = int(self.bytes[position]) - self.own[self.op_of[anchor]]
            for index, op in enumerate(chain):
                standing += inner[index]
                local.append(standing + self.costs.scratch_bytes[op])
        low, delta = self._spread(marks)
        area = sum(max(0, bytes_ - self.limit) for bytes_ in local)
        if len(delta):
            over = self.bytes[low : low + len(delta)] - self.limit
            area += int((np.maximum(over + delta, 0) - np.maximum(over, 0)).sum())
        for run in gone:
            where = self.at(run)
            inside = int(delta[where - low]) if low <= where < low + len(delta) else 0
            area -= max(0, int(self.bytes[where]) + inside - self.limit)
        seconds = sum(self.costs.seconds[op] for op in chain) - sum(self.costs.seconds[self.op_of[run]] for run in gone)
        return Change(anchor, chain, gone, area, seconds, low, delta, tuple(local), events)

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

    # -- doing it --------------------------------------------------------------------------------------------------

    def apply(self, change: Change) -> list[int]:
        """Make a change, which must have been weighed against this very order; returns the chain's new runs."""
        fresh = list(range(len(self.op_of), len(self.op_of) + len(change.chain)))
        self.op_of.extend(change.chain)
        if len(change.delta):
            self.bytes[change.low : change.low + len(change.delta)] += change.delta
        for value, own in change.events.items():
            self.events[value] = [fresh[~run] if run < 0 else run for run in own]
        self._at = np.concatenate([self._at, np.zeros(len(fresh), dtype=np.int64)])
        if fresh:
            position = self.at(change.anchor)
            self.sequence = np.insert(self.sequence, position, fresh)
            self.bytes = np.insert(self.bytes, position, change.local)
        for run, op in zip(fresh, change.chain, strict=True):
            self.runs[op].append(run)
        self._at[self.sequence] = np.arange(len(self.sequence))
        if change.removed:
            places = [self.at(run) for run in change.removed]
            self.sequence = np.delete(self.sequence, places)
            self.bytes = np.delete(self.bytes, places)
            self._at[self.sequence] = np.arange(len(self.sequence))
            for run in change.removed:
                self.runs[self.op_of[run]].remove(run)
                self._at[run] = -1
        for op in change.chain:
            self.runs[op].sort(key=self._at.item)
        return fresh
