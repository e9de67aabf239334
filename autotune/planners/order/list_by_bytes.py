"""Run the ready op that frees the most bytes: list scheduling, as compilers do it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob
from autotune.planners.order.lowest import lowest
from autotune.predict.ordering import Ordering, backwards, ordering


@dataclass(frozen=True, slots=True)
class ListByBytes:
    """Of list schedules, from either end of the step, and the given order the one with the lowest peak; on a tie the
    given one.

    All take the ready op that leaves the fewest bytes behind; on a tie scratch decides, then the traced order. One rule
    looks at nothing else (XLA's list rule); the other first at ops that stay under the peak so far, and when none does
    takes the one that raises it least (Inductor's LPMF).
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        return lowest(graph, plan, ordering(graph, costs), lists)


def lists(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """By both rules, from the start and from the end."""
    for under_peak in (False, True):
        yield _Ready(problem).order(under_peak=under_peak)
    reverse = problem.backwards()
    for under_peak in (False, True):
        yield backwards(_Ready(reverse).order(under_peak=under_peak))


class _Ready:
    """Ready ops in heaps by the bytes that they leave behind and that they take: both fall as others run."""

    def __init__(self, problem: Ordering) -> None:
        self._problem = problem
        self._waits_for = [len(before) for before in problem.before]
        self._left = [len(ends) + (value in problem.stays) for value, ends in enumerate(problem.ends)]
        self._others = [sum(ends) for ends in problem.ends]  # of one that is left, the op itself
        self._touched = [value in problem.stands for value in range(len(problem.ends))]
        # bytes that stay after the op, and bytes that it takes while it runs, as of now
        self._net = [0] * len(problem.before)
        self._during = problem.scratch.copy()
        for op, touches in enumerate(problem.touches):
            for value in touches:
                if not self._touched[value]:
                    self._net[op] += problem.nbytes[value]
                    self._during[op] += problem.nbytes[value]
                if self._left[value] == 1:
                    self._net[op] -= problem.nbytes[value]
        self._ready = {op for op, count in enumerate(self._waits_for) if not count}
        self._by_net = [self._key(op) for op in self._ready]
        self._by_during = [(self._during[op], op) for op in self._ready]
        heapify(self._by_net)
        heapify(self._by_during)

    def order(self, *, under_peak: bool) -> tuple[int, ...]:
        live = peak = 0
        order: list[int] = []
        while self._ready:
            op = self._pick(peak - live if under_peak else None)
            order.append(op)
            peak = max(peak, live + self._during[op])
            live += self._net[op]
            self._run(op)
        return tuple(order)

    def _key(self, op: int) -> tuple[int, int, int]:
        # of ops that leave as much behind, the hungrier runs before there is much, or after as much as can be is gone
        net, during = self._net[op], self._during[op]
        return net, -during if net > 0 else during, op

    def _pick(self, room: int | None) -> int:
        """The ready op with the lowest net bytes among those that fit the room; else the one that needs least."""
        if room is not None:
            while (found := self._by_during[0])[1] not in self._ready or found[0] != self._during[found[1]]:
                heappop(self._by_during)
            if found[0] > room:
                return found[1]
        passed_over: list[tuple[int, int, int]] = []
        while True:
            key = heappop(self._by_net)
            op = key[2]
            if op not in self._ready or key != self._key(op):
                continue  # it ran, or stands elsewhere in the heap with fewer bytes
            passed_over.append(key)
            if room is None or self._during[op] <= room:
                break
        for key in passed_over:
            heappush(self._by_net, key)
        return op

    def _push(self, op: int) -> None:
        heappush(self._by_net, self._key(op))
        heappush(self._by_during, (self._during[op], op))

    def _run(self, op: int) -> None:
        problem, ready = self._problem, self._ready
        ready.remove(op)
        lighter: set[int] = set()
        for value in problem.touches[op]:
            nbytes = problem.nbytes[value]
            self._others[value] -= op
            self._left[value] -= 1
            if not self._touched[value]:
                self._touched[value] = True
                for other in problem.ends[value]:
                    self._net[other] -= nbytes
                    self._during[other] -= nbytes
                    lighter.add(other)
            if self._left[value] == 1 and value not in problem.stays:
                last = self._others[value]
                self._net[last] -= nbytes
                lighter.add(last)
        for other in lighter & ready:
            self._push(other)
        for later in problem.after[op]:
            self._waits_for[later] -= 1
            if not self._waits_for[later]:
                ready.add(later)
                self._push(later)
