"""The order of a graph's ops as a problem in plain lists: which ops must run before which, and what lives between them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.predict.reachability import turned


@dataclass(frozen=True, slots=True)
class Ordering:
    """Ops are positions in lists, in an order that is allowed. A value lives from the first op that touches it to the last.

    Seen so, an order and its reverse take the same bytes: `backwards` is the same problem from its other end.
    """

    before: list[list[int]]
    """Per op those that must have run."""
    after: list[list[int]]
    touches: list[list[int]]
    """Per op the values that it makes or reads."""
    ends: list[list[int]]
    """Per value the ops that touch it; its maker first, unless it stands from the start."""
    nbytes: list[int]
    scratch: list[int]
    """Per op bytes that come and go with it: scratch, and what it makes that nobody reads."""
    stands: frozenset[int]
    """Values that live from the start, whoever touches them first."""
    stays: frozenset[int]
    """Values that live until the end."""
    base: int
    """Bytes that live throughout."""

    @property
    def traced(self) -> tuple[int, ...]:
        """The ops as they are numbered: always allowed."""
        return tuple(range(len(self.before)))

    def profile(self, order: Sequence[int]) -> list[int]:
        """Bytes while each op of an order runs."""
        left = [len(ends) + (value in self.stays) for value, ends in enumerate(self.ends)]
        untouched = [-1 if value in self.stands else count for value, count in enumerate(left)]
        live = self.base + sum(self.nbytes[value] for value in self.stands)
        touches, nbytes, scratch = self.touches, self.nbytes, self.scratch
        found = []
        for op in order:
            freed = 0
            for value in touches[op]:
                count = left[value]
                if count == untouched[value]:
                    live += nbytes[value]
                left[value] = count - 1
                if count == 1:
                    freed += nbytes[value]
            found.append(live + scratch[op])
            live -= freed
        return found

    def peak(self, order: Sequence[int]) -> int:
        """Highest bytes of an order."""
        return max(self.profile(order), default=self.base + sum(self.nbytes[value] for value in self.stands))

    def backwards(self) -> "Ordering":
        """The reverse, its ops numbered from the last."""
        last = len(self.before) - 1

        def turn(found: list[list[int]]) -> list[list[int]]:
            return [[last - op for op in ops] for ops in reversed(found)]

        return Ordering(
            before=turn(self.after),
            after=turn(self.before),
            touches=self.touches[::-1],
            ends=[[last - op for op in reversed(ends)] for ends in self.ends],
            nbytes=self.nbytes,
            scratch=self.scratch[::-1],
            stands=self.stays,
            stays=self.stands,
            base=self.base,
        )

    def part(self, earlier: Collection[int], ops: Sequence[int]) -> "Ordering":
        """The order of `ops` among themselves, in an order that is allowed, once all of `earlier` ran and the rest not."""
        number = {op: position for position, op in enumerate(ops)}
        touched = dict.fromkeys(value for op in ops for value in self.touches[op])
        local = {value: position for position, value in enumerate(touched)}
        stands, stays, base = set(), set(), self.base
        for value, ends in enumerate(self.ends):
            begun = value in self.stands or any(op in earlier for op in ends)
            needed = value in self.stays or any(op not in earlier and op not in number for op in ends)
            if value not in local:
                base += self.nbytes[value] if begun and needed else 0
                continue
            if begun:
                stands.add(local[value])
            if needed:
                stays.add(local[value])
        return Ordering(
            before=[[number[op] for op in self.before[own] if op in number] for own in ops],
            after=[[number[op] for op in self.after[own] if op in number] for own in ops],
            touches=[[local[value] for value in self.touches[own]] for own in ops],
            ends=[sorted(number[op] for op in self.ends[value] if op in number) for value in touched],
            nbytes=[self.nbytes[value] for value in touched],
            scratch=[self.scratch[op] for op in ops],
            stands=frozenset(stands),
            stays=frozenset(stays),
            base=base,
        )


def backwards(order: Sequence[int]) -> tuple[int, ...]:
    """An order of `Ordering.backwards` as one of the problem itself, and the other way."""
    last = len(order) - 1
    return tuple(last - op for op in reversed(order))


def ordering(graph: TrainGraph, costs: Costs) -> Ordering:
    """The problem of a graph's ops, each run once; parameters, state, buffers and batch are its base."""
    static, outputs = graph.static, frozenset(graph.outputs)
    scratch = list(costs.scratch_bytes)
    touches: list[list[int]] = [[] for _ in graph.ops]
    ends: list[list[int]] = []
    nbytes: list[int] = []
    stays = set()
    for value, readers, maker in zip(graph.values, graph.consumers, graph.producer, strict=True):
        if maker is None or value.id in static or not value.nbytes:
            continue
        if not readers and value.id not in outputs:
            scratch[maker] += value.nbytes
            continue
        if value.id in outputs:
            stays.add(len(ends))
        for op in (maker, *readers):
            touches[op].append(len(ends))
        ends.append([maker, *readers])
        nbytes.append(value.nbytes)
    before = [sorted(earlier) for earlier in graph.predecessors]
    return Ordering(
        before, turned(before), touches, ends, nbytes, scratch, frozenset(), frozenset(stays), graph.static_bytes
    )
