"""Order ops by list scheduling: run the ready op that frees the most bytes, as compilers do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.planners.base import refuse_later_decisions
from autotune.planners.knobs import Knob
from autotune.planners.order.lowest import choose_lowest
from autotune.predict.ordering import Ordering, ordering_problem, reverse_order


@dataclass(frozen=True, slots=True)
class ListByBytes:
    """Planner that always runs the ready op that leaves the fewest bytes live, from either end of the step.

    This is list scheduling, by two rules. The input order is unchanged if it peaks as low. In both rules, ties
    are broken by scratch, then by the traced order. The first rule is XLA's list rule. The second is Inductor's LPMF:
    it prefers ops that stay under the peak so far, and otherwise takes the one that raises it least.
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        """Return the plan with the lowest list schedule."""
        refuse_later_decisions(graph, plan)
        return choose_lowest(graph, plan, ordering_problem(graph, costs), order_by_bytes)


def order_by_bytes(problem: Ordering) -> Iterator[tuple[int, ...]]:
    """Yield the list schedules of both rules, from the start and from the end."""
    for under_peak in (False, True):
        yield _ReadyOps(problem).order(under_peak=under_peak)
    reverse = problem.reverse()
    for under_peak in (False, True):
        yield reverse_order(_ReadyOps(reverse).order(under_peak=under_peak))


class _ReadyOps:
    """Ready ops in two heaps: by the bytes they leave live, and by the bytes they need. Both fall as other ops run."""

    def __init__(self, problem: Ordering) -> None:
        self._problem = problem
        self._waits_for = [len(before) for before in problem.before]
        self._left = [len(ends) + (value in problem.live_at_end) for value, ends in enumerate(problem.ends)]
        self._others = [sum(ends) for ends in problem.ends]  # sum of the op ids left: with one op left it is that op
        self._touched = [value in problem.live_at_start for value in range(len(problem.ends))]
        # change of the live bytes by each op, and bytes that it adds while it runs, in the current state
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
        """Return the schedule; `under_peak` selects the second rule."""
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
        # on a tie of net bytes an op with a large need runs early if bytes grow, and late if they fall
        net, during = self._net[op], self._during[op]
        return net, -during if net > 0 else during, op

    def _pick(self, room: int | None) -> int:
        """Return the ready op with the lowest net bytes that fits the room, or the one with the lowest need if none fits."""
        if room is not None:
            while (entry := self._by_during[0])[1] not in self._ready or entry[0] != self._during[entry[1]]:
                heappop(self._by_during)
            if entry[0] > room:
                return entry[1]
        passed_over: list[tuple[int, int, int]] = []
        while True:
            key = heappop(self._by_net)
            op = key[2]
            if op not in self._ready or key != self._key(op):
                continue  # a stale entry: the op ran, or was pushed again with fewer bytes
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
            if self._left[value] == 1 and value not in problem.live_at_end:
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
