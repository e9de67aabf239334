"""Group the fusible ops of a graph so that each group can run as one op."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from autotune.ir.graph import TrainGraph

LARGE_BYTES = 1 << 16
"""Size in bytes from which two readers of a value are fused, so that it is read from memory once."""


def group_ops(graph: TrainGraph, fusible: Sequence[bool]) -> list[list[int]]:
    """Return groups of fusible ops, each in traced order; every fusible op is in one group.

    A group consists of ops of one phase. No path leaves a group and enters it again. An op joins the group of the
    producers of its inputs, and of the other readers of a large input, unless a longer life of other inputs would take
    more bytes than that saves.

    >>> from autotune.testing.graphs import chain
    >>> graph = chain([64, 64, 64])
    >>> group_ops(graph, [True] * len(graph.ops))[0]
    [0, 1, 2]
    """
    groups = _Groups(graph)
    for op in graph.ops:
        if fusible[op.id]:
            producers = (graph.producer[value] for value in op.inputs)
            for producer in producers:
                if producer is not None and fusible[producer]:
                    groups.try_to_merge(producer, op.id)
    for value in graph.values:
        if value.id in graph.static or value.nbytes < LARGE_BYTES:
            continue
        readers = [op for op in graph.consumers[value.id] if fusible[op]]
        for first, second in itertools.pairwise(readers):
            groups.try_to_merge(first, second)
    return [members for members in groups.members() if fusible[members[0]]]


class _Groups:
    """Groups of ops and the paths between them. Sets of groups are integers, whose bit `n` stands for group `n`."""

    def __init__(self, graph: TrainGraph) -> None:
        self._graph = graph
        self._group_of = list(range(len(graph.ops)))
        self._members = {op: {op} for op in self._group_of}
        self._ancestors = [0] * len(graph.ops)
        self._descendants = [0] * len(graph.ops)
        for op, before in enumerate(graph.predecessors):
            for other in before:
                self._ancestors[op] |= self._ancestors[other] | 1 << other
        for op in reversed(range(len(graph.ops))):
            for other in graph.predecessors[op]:
                self._descendants[other] |= self._descendants[op] | 1 << op

    def members(self) -> Iterable[list[int]]:
        """Return the ops of each group, in traced order."""
        return [sorted(ops) for ops in self._members.values()]

    def try_to_merge(self, op: int, other: int) -> None:
        """Merge the groups of two ops of one phase, if that is possible and saves memory."""
        first, second = self._group_of[op], self._group_of[other]
        if first == second or self._graph.ops[op].phase is not self._graph.ops[other].phase:
            return
        ahead, behind = (
            self._descendants[first] & self._ancestors[second],
            self._descendants[second] & self._ancestors[first],
        )
        leads_through_a_third = (ahead | behind) & ~(1 << first | 1 << second)
        if not leads_through_a_third and self._delayed_bytes(first, second) <= self._fused_bytes(first, second):
            self._merge(first, second)

    def _delayed_bytes(self, first: int, second: int) -> int:
        """Return the bytes of inputs that one group would free, but must hold until the other group's inputs exist."""
        both = self._members[first] | self._members[second]
        return sum(
            self._graph.values[value].nbytes
            for group, other in ((first, second), (second, first))
            if self._runs_later(other, max(self._members[group]), both)
            for value in self._freed(group)
        )

    def _runs_later(self, group: int, position: int, both: set[int]) -> bool:
        """Return whether a group has an input from outside of both that is produced after a position."""
        producers = (self._graph.producer[value] for op in self._members[group] for value in self._graph.ops[op].inputs)
        return any(producer is not None and producer > position and producer not in both for producer in producers)

    def _freed(self, group: int) -> set[int]:
        """Return the inputs of a group that no op after it reads."""
        members = self._members[group]
        last = max(members)
        return {
            value
            for op in members
            for value in self._graph.ops[op].inputs
            if value not in self._graph.static
            and self._graph.producer[value] not in members
            and all(reader in members or reader < last for reader in self._graph.consumers[value])
        }

    def _fused_bytes(self, first: int, second: int) -> int:
        """Return the bytes of values that pass between the two groups and that nothing else reads."""
        both = self._members[first] | self._members[second]
        return sum(
            self._graph.values[value].nbytes
            for group in (first, second)
            for op in self._members[group]
            for value in self._graph.ops[op].outputs
            if value not in self._graph.outputs
            and both.issuperset(self._graph.consumers[value])
            and not self._members[group].issuperset(self._graph.consumers[value])
        )

    def _merge(self, first: int, second: int) -> None:
        for op in self._members[second]:
            self._group_of[op] = first
        self._members[first] |= self._members.pop(second)
        both = 1 << first | 1 << second
        before = (self._ancestors[first] | self._ancestors[second]) & ~both
        after = (self._descendants[first] | self._descendants[second]) & ~both
        self._ancestors[first], self._descendants[first] = before, after
        for group in _positions(before):
            self._descendants[group] = self._descendants[group] & ~(1 << second) | 1 << first | after
        for group in _positions(after):
            self._ancestors[group] = self._ancestors[group] & ~(1 << second) | 1 << first | before


def _positions(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
