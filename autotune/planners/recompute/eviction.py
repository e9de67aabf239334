"""Evict results: choose the next one to recompute by the bytes freed over the limit per second of recomputation."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autotune.planners.recompute.editable_order import EditableOrder, OrderEdit

LONGEST_CHAIN = 400
"""Maximum number of ops to recompute for one reader."""
LONGEST_ORDER = 8
"""Maximum growth of an order, as a multiple of its length at the start."""


class Eviction:
    """Eviction candidates, pairs of an op and a run that reads it, in a heap by an upper bound of their score.

    A bound is replaced by the exact score when it reaches the top, so few candidates are weighed.
    """

    def __init__(self, runs: EditableOrder, greed: float, perturbation: Sequence[float] | None = None) -> None:
        self.runs, self.greed = runs, greed
        self.perturbation = perturbation
        """Factor of the score per op, so that local moves leave the order they start from; None for 1."""
        self.price = 0.0
        """Seconds per byte over the limit and position that the last eviction cost."""
        seconds = runs.costs.seconds
        self.smallest = 1e-4 * sum(seconds) / max(1, len(seconds)) or 1.0  # 1.0 if no op takes any time
        self.heap: list[tuple[float, bool, int, int]] = []
        self.latest: dict[tuple[int, int], float] = {}

    def fit(self, limit: int) -> None:
        """Evict until no position exceeds the limit, or no eviction helps."""
        runs = self.runs
        runs.limit = limit
        longest = LONGEST_ORDER * len(runs.sequence) + 64
        fresh = False
        while runs.peak > limit and len(runs.sequence) < longest:
            edit = self._next()
            if edit is None:
                if fresh:
                    return
                self._fill()  # scores may have risen since they were bounded
                fresh = True
                continue
            fresh = False
            self.price = max(0.0, edit.seconds / -edit.area)
            new_runs = runs.apply(edit)
            self._refresh_sums()
            self._push_all(self._touched(edit, new_runs))

    def _fill(self) -> None:
        self.heap, self.latest = [], {}
        self._refresh_sums()
        self._push_all(pair for reader in self.runs.sequence.tolist() for pair in self._pairs(reader))

    def _refresh_sums(self) -> None:
        over = np.maximum(self.runs.bytes - self.runs.limit, 0)
        self._over = np.concatenate([[0], np.cumsum(over)])
        self._places = np.concatenate([[0], np.cumsum(over > 0)])

    def _pairs(self, reader: int) -> Iterator[tuple[int, int]]:
        """Yield (op, reader) for each recomputable op whose results a run reads."""
        runs = self.runs
        for maker in runs.sources[runs.op_of[reader]]:
            if runs.repeatable[maker]:
                yield maker, reader

    def _touched(self, edit: OrderEdit, new_runs: Iterable[int]) -> set[tuple[int, int]]:
        """Return the candidates whose score an edit may have raised."""
        runs = self.runs
        pairs = {pair for run in new_runs for pair in self._pairs(run)}
        for value in edit.events:
            maker = runs.graph.producer[value]
            assert maker is not None
            for run in runs.events[value]:
                op = runs.op_of[run]
                if op != maker and runs.repeatable[maker]:
                    pairs.add((maker, run))
                if runs.repeatable[op]:
                    pairs.update(
                        (op, reader)
                        for other in runs.makes[op]
                        for reader in runs.events[other]
                        if runs.op_of[reader] != op
                    )
        return pairs

    def _push_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        for pair in sorted(pairs):
            bound = self._bound(*pair)
            if bound > 0.0:
                self._push(bound, False, *pair)

    def _push(self, score: float, exact: bool, op: int, reader: int) -> None:
        self.latest[op, reader] = score
        heapq.heappush(self.heap, (-score, exact, op, reader))

    def _bound(self, op: int, reader: int) -> float:
        """Return an upper bound of the score, from the op's own results alone."""
        runs = self.runs
        position = runs.position(reader)
        if not runs.may_run_before(op, position):
            return 0.0
        gain = 0
        for value in runs.makes[op]:
            begin = runs.last_event(value, position) + 1
            if begin < position and runs.is_live(value, position):
                over = self._over.item(position) - self._over.item(begin)
                places = self._places.item(position) - self._places.item(begin)
                gain += min(over, places * runs.nbytes[value])
        return self._score(op, gain, runs.costs.seconds[op])

    def _score(self, op: int, gain: int, seconds: float) -> float:
        if gain <= 0:
            return 0.0
        perturbation = self.perturbation[op] if self.perturbation is not None else 1.0
        return perturbation * math.exp(self.greed * math.log(gain)) / max(seconds, self.smallest)

    def _next(self) -> OrderEdit | None:
        """Return the edit with the best score; None if no candidate is left."""
        while self.heap:
            negated, _exact, op, reader = heapq.heappop(self.heap)
            if self.runs.position(reader) < 0 or self.latest.get((op, reader)) != -negated:
                continue
            edit, score = self._weigh(op, reader)
            if edit is None:
                continue
            if not self.heap or score >= -self.heap[0][0] * 0.999:
                return edit
            self._push(score, True, op, reader)
        return None

    def _weigh(self, op: int, reader: int) -> tuple[OrderEdit | None, float]:
        """Return the best edit that recomputes an op just before a reader, and its score; None if it frees nothing."""
        runs = self.runs
        position = runs.position(reader)
        if not runs.may_run_before(op, position):
            return None, 0.0
        best, best_score = None, 0.0
        tried = set()
        for price in (self.price, 0.0, float("inf")):
            chain = self._chain(op, position, price)
            if chain is None or chain in tried:
                continue
            tried.add(chain)
            edit = runs.weigh_edit(reader, chain)
            if edit is not None and edit.area < 0:
                score = self._score(op, -edit.area, edit.seconds)
                if score > best_score:
                    best, best_score = edit, score
        return best, best_score

    def _chain(self, op: int, position: int, price: float) -> tuple[int, ...] | None:
        """Return the ops to run, in order, to recompute an op at a position; None if there are too many.

        A missing input is kept live longer if that costs nothing over the limit, or at `price` less than its own op.
        Otherwise it is recomputed too.
        """
        runs = self.runs
        chain: list[int] = []
        visited: set[int] = set()

        def extend(maker: int) -> bool:
            visited.add(maker)
            if len(visited) > LONGEST_CHAIN:
                return False
            for value in runs.reads[maker]:
                source = runs.maker[value]
                if source in visited or runs.is_live(value, position) or not runs.may_run_before(source, position):
                    continue
                over = self._longer(value, position)
                dearer = over and (price == float("inf") or over * price > runs.costs.seconds[source])
                if dearer and not extend(source):
                    return False
            chain.append(maker)
            return True

        return tuple(chain) if extend(op) else None

    def _longer(self, value: int, position: int) -> int:
        """Return the bytes over the limit, summed over positions, if a value stayed live up to a position."""
        runs = self.runs
        begin = runs.last_event(value, position) + 1
        if self._places.item(position) == self._places.item(begin) and begin < position:
            room = runs.limit - int(runs.bytes[begin:position].max())
            if room >= runs.nbytes[value]:
                return 0
        over = runs.bytes[begin:position] + (runs.nbytes[value] - runs.limit)
        return int(np.minimum(np.maximum(over, 0), runs.nbytes[value]).sum())


def undo(runs: EditableOrder, limit: int) -> None:
    """Undo recomputations that the limit does not need, the most expensive first."""
    runs.limit = limit
    again = True
    while again:
        again = False
        seconds = runs.costs.seconds
        repeats = sorted(runs.repeats(), key=lambda run: (-seconds[runs.op_of[run]], run))
        for run in repeats:
            if runs.position(run) < 0 or run == runs.runs[runs.op_of[run]][0] or not _fits_longer(runs, run):
                continue
            edit = runs.weigh_edit(removed=[run])
            if edit is not None and edit.area <= 0 and edit.seconds < 0:
                runs.apply(edit)
                again = True


def _fits_longer(runs: EditableOrder, run: int) -> bool:
    """Return false only if keeping the results of a run would exceed the limit: a cheap necessary condition."""
    op = runs.op_of[run]
    position = start = runs.position(run)
    while start and runs.is_repeat(int(runs.sequence[start - 1])):
        start -= 1  # these runs may be removed together with it
    for value in runs.makes[op]:
        begin = runs.last_event(value, position) + 1
        gap = runs.bytes[begin:start]
        if len(gap) and runs.is_live(value, position + 1) and int(gap.max()) + runs.nbytes[value] > runs.limit:
            return False
    return True
