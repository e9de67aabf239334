"""Eviction: which result to throw away next, by what it frees over the limit for the seconds that it costs."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autotune.planners.recompute.editable_order import Change, Runs

LONGEST_CHAIN = 400
"""Ops that are run again for one reader, at most."""
LONGEST_ORDER = 8
"""Runs of an order over runs at its start, at most."""


class Eviction:
    """Candidates, an op and a run that reads it, in a heap by an upper bound of what they give for their price.

    A bound is replaced by the exact score when it comes up, so that few candidates are ever weighed.
    """

    def __init__(self, runs: Runs, greed: float, taste: Sequence[float] | None = None) -> None:
        self.runs, self.greed = runs, greed
        self.taste = taste
        """Factor of the score per op: local moves look away from the answer they come from."""
        self.price = 0.0
        """Seconds that the last eviction paid for a byte over the limit at one position."""
        seconds = runs.costs.seconds
        self.smallest = 1e-4 * sum(seconds) / max(1, len(seconds)) or 1.0  # where no op takes any time
        self.heap: list[tuple[float, bool, int, int]] = []
        self.latest: dict[tuple[int, int], float] = {}

    def fit(self, limit: int) -> None:
        """Evict until nothing is over the limit, or nothing helps."""
        runs = self.runs
        runs.limit = limit
        longest = LONGEST_ORDER * len(runs.sequence) + 64
        fresh = False
        while runs.peak > limit and len(runs.sequence) < longest:
            change = self._next()
            if change is None:
                if fresh:
                    return
                self._fill()  # scores may have risen since they were bounded
                fresh = True
                continue
            fresh = False
            self.price = max(0.0, change.seconds / -change.area)
            made = runs.apply(change)
            self._refresh_sums()
            self._push_all(self._touched(change, made))

    def _fill(self) -> None:
        self.heap, self.latest = [], {}
        self._refresh_sums()
        self._push_all(pair for reader in self.runs.sequence.tolist() for pair in self._pairs(reader))

    def _refresh_sums(self) -> None:
        over = np.maximum(self.runs.bytes - self.runs.limit, 0)
        self._over = np.concatenate([[0], np.cumsum(over)])
        self._places = np.concatenate([[0], np.cumsum(over > 0)])

    def _pairs(self, reader: int) -> Iterator[tuple[int, int]]:
        """(op, run) of all that a run reads and that can be made again."""
        runs = self.runs
        for maker in runs.sources[runs.op_of[reader]]:
            if runs.repeatable[maker]:
                yield maker, reader

    def _touched(self, change: Change, made: Iterable[int]) -> set[tuple[int, int]]:
        """Candidates whose score a change may have raised."""
        runs = self.runs
        found = {pair for run in made for pair in self._pairs(run)}
        for value in change.events:
            maker = runs.graph.producer[value]
            assert maker is not None
            for run in runs.events[value]:
                op = runs.op_of[run]
                if op != maker and runs.repeatable[maker]:
                    found.add((maker, run))
                if runs.repeatable[op]:
                    found.update(
                        (op, reader)
                        for other in runs.makes[op]
                        for reader in runs.events[other]
                        if runs.op_of[reader] != op
                    )
        return found

    def _push_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        for pair in sorted(pairs):
            bound = self._bound(*pair)
            if bound > 0.0:
                self._push(bound, False, *pair)

    def _push(self, score: float, exact: bool, op: int, reader: int) -> None:
        self.latest[op, reader] = score
        heapq.heappush(self.heap, (-score, exact, op, reader))

    def _bound(self, op: int, reader: int) -> float:
        """More than the score can be, as far as the op's own results tell."""
        runs = self.runs
        position = runs.at(reader)
        if not runs.may_run_before(op, position):
            return 0.0
        gain = 0
        for value in runs.makes[op]:
            begin = runs.last_event(value, position) + 1
            if begin < position and runs.live(value, position):
                over = self._over.item(position) - self._over.item(begin)
                places = self._places.item(position) - self._places.item(begin)
                gain += min(over, places * runs.nbytes[value])
        return self._score(op, gain, runs.costs.seconds[op])

    def _score(self, op: int, gain: int, seconds: float) -> float:
        if gain <= 0:
            return 0.0
        taste = self.taste[op] if self.taste is not None else 1.0
        return taste * math.exp(self.greed * math.log(gain)) / max(seconds, self.smallest)

    def _next(self) -> Change | None:
        """The best change now."""
        while self.heap:
            negated, _exact, op, reader = heapq.heappop(self.heap)
            if self.runs.at(reader) < 0 or self.latest.get((op, reader)) != -negated:
                continue
            change, score = self._weigh(op, reader)
            if change is None:
                continue
            if not self.heap or score >= -self.heap[0][0] * 0.999:
                return change
            self._push(score, True, op, reader)
        return None

    def _weigh(self, op: int, reader: int) -> tuple[Change | None, float]:
        """The best way to make an op's results again just before a reader; None if it brings nothing."""
        runs = self.runs
        position = runs.at(reader)
        if not runs.may_run_before(op, position):
            return None, 0.0
        best, best_score = None, 0.0
        tried = set()
        for price in (self.price, 0.0, float("inf")):
            chain = self._chain(op, position, price)
            if chain is None or chain in tried:
                continue
            tried.add(chain)
            change = runs.change(reader, chain)
            if change is not None and change.area < 0:
                score = self._score(op, -change.area, change.seconds)
                if score > best_score:
                    best, best_score = change, score
        return best, best_score

    def _chain(self, op: int, position: int, price: float) -> tuple[int, ...] | None:
        """What to run, in order, to have an op's results at a position: missing inputs live longer or are made too.

        An input lives longer where that costs nothing over the limit, or less at `price` than its own op.
        """
        runs = self.runs
        found: list[int] = []
        seen: set[int] = set()

        def need(maker: int) -> bool:
            seen.add(maker)
            if len(seen) > LONGEST_CHAIN:
                return False
            for value in runs.reads[maker]:
                source = runs.maker[value]
                if source in seen or runs.live(value, position) or not runs.may_run_before(source, position):
                    continue
                over = self._longer(value, position)
                dearer = over and (price == float("inf") or over * price > runs.costs.seconds[source])
                if dearer and not need(source):
                    return False
            found.append(maker)
            return True

        return tuple(found) if need(op) else None

    def _longer(self, value: int, position: int) -> int:
        """Bytes over the limit, summed over positions, if a value lived on to a position."""
        runs = self.runs
        begin = runs.last_event(value, position) + 1
        if self._places.item(position) == self._places.item(begin) and begin < position:
            room = runs.limit - int(runs.bytes[begin:position].max())
            if room >= runs.nbytes[value]:
                return 0
        over = runs.bytes[begin:position] + (runs.nbytes[value] - runs.limit)
        return int(np.minimum(np.maximum(over, 0), runs.nbytes[value]).sum())


def undo(runs: Runs, limit: int) -> None:
    """Take back what is computed again without need, the dearest first."""
    runs.limit = limit
    again = True
    while again:
        again = False
        seconds = runs.costs.seconds
        repeats = sorted(runs.repeats(), key=lambda run: (-seconds[runs.op_of[run]], run))
        for run in repeats:
            if runs.at(run) < 0 or run == runs.runs[runs.op_of[run]][0] or not _fits_longer(runs, run):
                continue
            change = runs.change(removed=[run])
            if change is not None and change.area <= 0 and change.seconds < 0:
                runs.apply(change)
                again = True


def _fits_longer(runs: Runs, run: int) -> bool:
    """Whether what a run makes might as well have been kept; a cheap look that never says no wrongly."""
    op = runs.op_of[run]
    position = start = runs.at(run)
    while start and runs.is_repeat(int(runs.sequence[start - 1])):
        start -= 1  # what stands here may go with the run
    for value in runs.makes[op]:
        begin = runs.last_event(value, position) + 1
        gap = runs.bytes[begin:start]
        if len(gap) and runs.live(value, position + 1) and int(gap.max()) + runs.nbytes[value] > runs.limit:
            return False
    return True
