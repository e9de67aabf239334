"""Run the ready op that frees the most bytes: list scheduling, as compilers do it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import ClassVar

from autotune.costs import Costs
from autotune.graph import TrainGraph
from autotune.knobs import Knob
from autotune.plan import Plan
from autotune.planners.contract import refuse_later_decisions
from autotune.simulate import peak_bytes


@dataclass(frozen=True, slots=True)
class ListByBytes:
    """Of two list schedules and the given order the one with the lowest peak; on a tie the given one.

    Both take the ready op that leaves the fewest bytes behind; on a tie scratch decides, then the traced order. One looks at nothing else
    (XLA's list rule); the other first at ops that stay under the peak so far, and when none does takes the one that
    raises it least (Inductor's LPMF).
    """

    knobs: ClassVar[Mapping[str, Knob]] = {}

    def plan(self, graph: TrainGraph, plan: Plan, budget_bytes: int, costs: Costs) -> Plan:
        refuse_later_decisions(graph, plan)
        orders = (_Ready(graph, costs).order(under_peak=under_peak) for under_peak in (False, True))
        plans = [plan, *(replace(plan, order=order) for order in orders)]
        return min(plans, key=lambda made: peak_bytes(graph, made, costs))


class _Ready:
    """Ready ops in a heap by the bytes that they would leave behind, which fall as their inputs lose other readers."""

    def __init__(self, graph: TrainGraph, costs: Costs) -> None:
        self._graph = graph
        self._kept = graph.static.union(graph.outputs)
        self._readers = [set(readers) for readers in graph.consumers]
        self._waits_for = [len(before) for before in graph.predecessors]
        self._successors: list[list[int]] = [[] for _ in graph.ops]
        for op, before in enumerate(graph.predecessors):
            for earlier in before:
                self._successors[earlier].append(op)
        made = [sum(graph.values[value].nbytes for value in op.outputs) for op in graph.ops]
        self._during = [nbytes + scratch for nbytes, scratch in zip(made, costs.scratch_bytes, strict=True)]
        # bytes that stay after the op: its outputs that someone reads, less the inputs that it reads last
        self._net = [
            sum(graph.values[v].nbytes for v in op.outputs if self._readers[v] or v in self._kept) for op in graph.ops
        ]
        self._by_net: list[tuple[int, int, int]] = []
        self._by_during: list[tuple[int, int]] = []
        for value, readers in enumerate(self._readers):
            self._last_reader(value, readers)
        self._ready = {op for op, count in enumerate(self._waits_for) if not count}
        for op in self._ready:
            self._push(op)

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

    def _push(self, op: int) -> None:
        heappush(self._by_net, self._key(op))
        heappush(self._by_during, (self._during[op], op))

    def _pick(self, room: int | None) -> int:
        """The ready op with the lowest net bytes among those that fit the room; else the one that needs least."""
        while self._by_during[0][1] not in self._ready:
            heappop(self._by_during)
        least, smallest = self._by_during[0]
        if room is not None and least > room:
            return smallest
        passed_over: list[tuple[int, int, int]] = []
        while True:
            net, _, op = heappop(self._by_net)
            if op not in self._ready or net != self._net[op]:
                continue  # it ran, or stands elsewhere in the heap with fewer bytes
            passed_over.append(self._key(op))
            if room is None or self._during[op] <= room:
                break
        for entry in passed_over:
            heappush(self._by_net, entry)
        return op

    def _run(self, op: int) -> None:
        self._ready.remove(op)
        for value in self._graph.ops[op].inputs:
            readers = self._readers[value]
            readers.discard(op)
            self._last_reader(value, readers)
        for later in self._successors[op]:
            self._waits_for[later] -= 1
            if not self._waits_for[later]:
                self._ready.add(later)
                self._push(later)

    def _last_reader(self, value: int, readers: set[int]) -> None:
        """When one reader is left it will free the value: its net bytes fall."""
        if len(readers) == 1 and value not in self._kept:
            (op,) = readers
            self._net[op] -= self._graph.values[value].nbytes
            if not self._waits_for[op]:
                heappush(self._by_net, self._key(op))
