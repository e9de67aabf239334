"""The order of a graph's ops as a problem in plain lists: which ops precede which, and which values live in between."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.predict.reachability import reverse_edges


@dataclass(frozen=True, slots=True)
class Ordering:
    """Ordering problem. Ops are positions in lists, numbered in a valid order.

    A value is live from the first op that touches it to the last. Seen so, an order and its reverse need the same
    bytes: `reverse` returns the same problem from its other end.
    """

    before: list[list[int]]
    """Per op its direct predecessors."""
    after: list[list[int]]
    """Per op its direct successors."""
    touches: list[list[int]]
    """Per op the values that it creates or reads."""
    ends: list[list[int]]
    """Per value the ops that touch it; its producer first, unless it is live from the start."""
    nbytes: list[int]
    """Per value its bytes."""
    scratch: list[int]
    """Per op the bytes that are live only while it runs: scratch, and outputs that nothing reads."""
    live_at_start: frozenset[int]
    """Values that are live from the start, whichever op touches them first."""
    live_at_end: frozenset[int]
    """Values that are live until the end."""
    base: int
    """Bytes that are live throughout."""

    @property
    def traced(self) -> tuple[int, ...]:
        """The ops in the order of their numbers, which is always valid."""
        return tuple(range(len(self.before)))

    def profile(self, order: Sequence[int]) -> list[int]:
        """Return the live bytes while each op of an order runs."""
        left = [len(ends) + (value in self.live_at_end) for value, ends in enumerate(self.ends)]
        untouched = [-1 if value in self.live_at_start else count for value, count in enumerate(left)]
        live = self.base + sum(self.nbytes[value] for value in self.live_at_start)
        touches, nbytes, scratch = self.touches, self.nbytes, self.scratch
        during = []
        for op in order:
            freed = 0
            for value in touches[op]:
                count = left[value]
                if count == untouched[value]:
                    live += nbytes[value]
                left[value] = count - 1
                if count == 1:
                    freed += nbytes[value]
            during.append(live + scratch[op])
            live -= freed
        return during

    def peak(self, order: Sequence[int]) -> int:
        """Return the peak bytes of an order."""
        return max(self.profile(order), default=self.base + sum(self.nbytes[value] for value in self.live_at_start))

    def reverse(self) -> "Ordering":
        """Return the reverse problem, with its ops numbered from the last."""
        last = len(self.before) - 1

        def mirror(neighbours: list[list[int]]) -> list[list[int]]:
            return [[last - op for op in ops] for ops in reversed(neighbours)]

        return Ordering(
            before=mirror(self.after),
            after=mirror(self.before),
            touches=self.touches[::-1],
            ends=[[last - op for op in reversed(ends)] for ends in self.ends],
            nbytes=self.nbytes,
            scratch=self.scratch[::-1],
            live_at_start=self.live_at_end,
            live_at_end=self.live_at_start,
            base=self.base,
        )

    def subproblem(self, earlier: Collection[int], ops: Sequence[int]) -> "Ordering":
        """Return the problem of `ops` alone, listed in a valid order, after all of `earlier` and before all others."""
        number = {op: position for position, op in enumerate(ops)}
        touched = dict.fromkeys(value for op in ops for value in self.touches[op])
        local = {value: position for position, value in enumerate(touched)}
        live_at_start, live_at_end, base = set(), set(), self.base
        for value, ends in enumerate(self.ends):
            begun = value in self.live_at_start or any(op in earlier for op in ends)
            needed = value in self.live_at_end or any(op not in earlier and op not in number for op in ends)
            if value not in local:
                base += self.nbytes[value] if begun and needed else 0
                continue
            if begun:
                live_at_start.add(local[value])
            if needed:
                live_at_end.add(local[value])
        return Ordering(
            before=[[number[other] for other in self.before[op] if other in number] for op in ops],
            after=[[number[other] for other in self.after[op] if other in number] for op in ops],
            touches=[[local[value] for value in self.touches[op]] for op in ops],
            ends=[sorted(number[op] for op in self.ends[value] if op in number) for value in touched],
            nbytes=[self.nbytes[value] for value in touched],
            scratch=[self.scratch[op] for op in ops],
            live_at_start=frozenset(live_at_start),
            live_at_end=frozenset(live_at_end),
            base=base,
        )


def reverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """Convert an order of `Ordering.reverse` to an order of the problem itself, or back."""
    last = len(order) - 1
    return tuple(last - op for op in reversed(order))


def ordering_problem(graph: TrainGraph, costs: Costs) -> Ordering:
    """Return the ordering problem of a graph's ops, each run once. The graph's inputs are its base."""
    static, outputs = graph.static, frozenset(graph.outputs)
    scratch = list(costs.scratch_bytes)
    touches: list[list[int]] = [[] for _ in graph.ops]
    ends: list[list[int]] = []
    nbytes: list[int] = []
    live_at_end = set()
    for value, readers, producer in zip(graph.values, graph.consumers, graph.producer, strict=True):
        if producer is None or value.id in static or not value.nbytes:
            continue
        if not readers and value.id not in outputs:
            scratch[producer] += value.nbytes
            continue
        if value.id in outputs:
            live_at_end.add(len(ends))
        for op in (producer, *readers):
            touches[op].append(len(ends))
        ends.append([producer, *readers])
        nbytes.append(value.nbytes)
    before = [sorted(earlier) for earlier in graph.predecessors]
    return Ordering(
        before=before,
        after=reverse_edges(before),
        touches=touches,
        ends=ends,
        nbytes=nbytes,
        scratch=scratch,
        live_at_start=frozenset(),
        live_at_end=frozenset(live_at_end),
        base=graph.static_bytes,
    )
