"""Throw away what frees most over the budget per second of computing it again, until the step fits."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autotune.bounds import peak_lower_bound
from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Float, Knob
from autotune.plan import Plan
from autotune.planners.recompute.runs import Change, Runs, refuse_offload

LONGEST_CHAIN = 400
"""Ops that are run again for one reader, at most."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Evict at the peak, at the exact price: chain to run again, inputs that live longer, temporaries of the chain.

    Any op may run several times. Where the budget cannot be reached, the lowest peak that was found.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {"share": Float(0.0, 1.0), "greed": Float(0.5, 2.0)}
    share: float = 1.0
    """Part of the bytes over the budget that is removed here; what comes after (offload) is left the rest."""
    greed: float = 1.0
    """Exponent of the bytes in bytes per second: higher takes bigger, dearer results first."""

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """The plan with as little computed again as the budget allows."""
        refuse_offload(plan)
        runs = Runs(graph, plan.order, costs)
        peak = runs.peak
        limit = int(peak - self.share * (peak - budget_bytes))
        if peak <= limit:
            return plan
        low, _ = peak_lower_bound(graph, costs)
        if limit >= low:
            search = Search(runs, self.greed)
            search.fit(limit)
            search.undo(limit)
            if runs.peak <= limit:
                return replace(plan, order=runs.order)
        runs = Runs(graph, plan.order, costs)
        order = lowest(runs, max(low, limit), self.greed)
        made = Runs(graph, order, costs)
        return replace(plan, order=order) if made.peak < peak else plan


def lowest(runs: Runs, limit: int, greed: float) -> tuple[int, ...]:
    """The order with the lowest peak that sinking the limit step by step finds."""
    best, order = runs.peak, runs.order
    step = 0.1
    while step > 0.004 and best > limit:
        target = max(limit, int(best - step * (best - runs.graph.static_bytes)))
        Search(runs, greed).fit(target)
        if runs.peak < best:
            best, order = runs.peak, runs.order
            if best <= target:
                continue
        runs = Runs(runs.graph, order, runs.costs)
        step /= 2
    search = Search(runs, greed)
    search.undo(best)
    return runs.order


class Search:
    """Candidates by what they give for their price; stale scores are weighed again when they come up."""

    def __init__(self, runs: Runs, greed: float) -> None:
        self.runs, self.greed = runs, greed
        self.price = 0.0  # seconds that the last eviction paid for a byte over the limit at one position
        total = sum(runs.costs.seconds)
        self.smallest = 1e-4 * total / max(1, len(runs.costs.seconds)) or 1.0  # ops may cost nothing
        self.heap: list[tuple[float, int, int]] = []
        self.evaluations = 0

    def fit(self, limit: int) -> None:
        """Evict until nothing is over the limit, or nothing helps."""
        runs = self.runs
        runs.limit = limit
        most = 8 * len(runs.sequence) + 64
        self.fill()
        stuck = False
        while self.heap and runs.peak > limit and len(runs.sequence) < most:
            change, _ = self.next()
            if change is None:
                if stuck:
                    return
                stuck = True  # scores may have risen since they were taken: look at all once more
                self.fill()
                continue
            stuck = False
            self.price = change.seconds / -change.area
            self.apply(change)

    def fill(self) -> None:
        """Weigh every read of something that could be made again."""
        self.heap = []
        for op, reader in self.pairs(self.runs.sequence.tolist()):
            self.push(op, reader)
        heapq.heapify(self.heap)

    def pairs(self, readers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(op, run that reads it) of all that can be made again."""
        runs = self.runs
        for reader in readers:
            seen = set()
            for value in runs.reads[runs.op_of[reader]]:
                maker = runs.graph.producer[value]
                if maker is not None and runs.repeatable[maker] and maker not in seen:
                    seen.add(maker)
                    yield maker, reader

    def push(self, op: int, reader: int) -> None:
        change = self.weigh(op, reader)
        if change is not None:
            heapq.heappush(self.heap, (-self.score(change), op, reader))

    def score(self, change: Change) -> float:
        return float((-change.area) ** self.greed) / max(change.seconds, self.smallest)

    def next(self) -> tuple[Change | None, float]:
        """The best change now."""
        while self.heap:
            _, op, reader = heapq.heappop(self.heap)
            if self.runs.at(reader) < 0:
                continue
            change = self.weigh(op, reader)
            if change is None:
                continue
            score = self.score(change)
            if not self.heap or score >= -self.heap[0][0] * 0.999:
                return change, score
            heapq.heappush(self.heap, (-score, op, reader))
        return None, 0.0

    def weigh(self, op: int, reader: int) -> Change | None:
        """The best way to make an op's results again just before a reader; None if it brings nothing."""
        runs = self.runs
        position = runs.at(reader)
        if not runs.may_run_before(op, position) or not self.covers(op, position):
            return None
        best, best_score = None, 0.0
        tried = set()
        for price in (self.price, 0.0, float("inf")):
            chain = self.chain(op, position, price)
            if chain is None or chain in tried:
                continue
            tried.add(chain)
            self.evaluations += 1
            change = runs.change(reader, chain)
            if change is not None and change.area < 0:
                score = self.score(change)
                if score > best_score:
                    best, best_score = change, score
        return best

    def covers(self, op: int, position: int) -> bool:
        """Whether a gap of the op's results before a position stands over the limit anywhere."""
        runs = self.runs
        for value in runs.makes[op]:
            begin = runs.last_event(value, position) + 1
            if begin < position and int(runs.bytes[begin:position].max()) > runs.limit:
                return True
        return False

    def chain(self, op: int, position: int, price: float) -> tuple[int, ...] | None:
        """What to run, in order, to have an op's results at a position: missing inputs live longer or are made too.

        An input lives longer where that costs nothing over the limit, or less than `price` says its own chain does.
        """
        runs = self.runs
        found: list[int] = []
        state: dict[int, bool] = {}

        def seconds_of(maker: int) -> float:
            return runs.costs.seconds[maker]

        def need(maker: int) -> bool:
            if maker in state:
                return True
            if len(state) >= LONGEST_CHAIN:
                return False
            state[maker] = True
            for value in runs.reads[maker]:
                if runs.live(value, position):
                    continue
                source = runs.graph.producer[value]
                assert source is not None
                if source in state:
                    continue
                over = self.longer(value, position)
                if over == 0 or not runs.may_run_before(source, position):
                    continue
                if price != float("inf") and over * price <= seconds_of(source):
                    continue
                if not need(source):
                    return False
            found.append(maker)
            return True

        return tuple(found) if need(op) else None

    def longer(self, value: int, position: int) -> int:
        """Bytes over the limit, summed over positions, if a value lived on to a position."""
        runs = self.runs
        begin = runs.last_event(value, position) + 1
        over = runs.bytes[begin:position] + (runs.nbytes[value] - runs.limit)
        return int(over.clip(0, runs.nbytes[value]).sum())

    def apply(self, change: Change) -> None:
        """Make a change, and weigh what it touched again."""
        runs = self.runs
        fresh = runs.apply(change)
        seen = set()
        for op, reader in self.pairs(fresh):
            seen.add((op, reader))
        for value in change.events:
            for run in runs.events[value]:
                for pair in self.pairs([run]):
                    seen.add(pair)
            maker = runs.graph.producer[value]
            assert maker is not None
        for op, reader in sorted(seen):
            self.push(op, reader)

    def undo(self, limit: int) -> None:
        """Take back what is no longer needed, the dearest first."""
        runs = self.runs
        runs.limit = limit
        again = True
        while again:
            again = False
            repeats = [run for own in runs.runs for run in own[1:]]
            repeats.sort(key=lambda run: (-runs.costs.seconds[runs.op_of[run]], run))
            for run in repeats:
                if run not in runs.runs[runs.op_of[run]][1:]:
                    continue
                change = runs.change(removed=[run])
                if change is not None and change.area <= 0 and change.seconds < 0:
                    runs.apply(change)
                    again = True
