"""Ops in a row that read and write blobs by name, as Caffe2's nets do.

A blob, unlike a value, may be written more than once: by an op that reads it too (in place), and by one that does not.
A recurrent net is one whose steps are unrolled, or one op that has its steps inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autotune.errors import PlanError
from experiments.memonger.sharing.objects import Life

ALIAS = "alias"
"""The kind of ops that make an output in their input's memory."""
HOST = "cpu"


@dataclass(frozen=True, slots=True)
class NetOp:
    """An op by the names of its blobs. An output that does not exist, like the mask of a dropout that is off, is `""`."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    device: str = HOST
    host: tuple[str, ...] = ()
    """Outputs that lie in the host's memory wherever the op runs: a copy to the host, a list of lengths."""

    @property
    def touches(self) -> tuple[str, ...]:
        """What it reads or writes, each once."""
        return tuple(dict.fromkeys(blob for blob in (*self.inputs, *self.outputs) if blob))


@dataclass(frozen=True)
class Net:
    """Ops in an order in which they may run; where branches depend on nothing of each other they may run in any."""

    ops: tuple[NetOp, ...]
    inputs: tuple[str, ...] = ()
    """Blobs that stand before the net runs: the caller's own."""
    outputs: tuple[str, ...] = ()
    """Blobs that the caller reads afterwards."""

    def __post_init__(self) -> None:
        made = {"", *self.inputs}
        for op in self.ops:
            for blob in op.inputs:
                if blob not in made:
                    raise PlanError(f"{op.kind} reads {blob}, which is no input of the net and no op made yet")
            made.update(op.outputs)
        for blob in self.outputs:
            if blob not in made:
                raise PlanError(f"nothing makes {blob}, an output of the net")

    @cached_property
    def touched(self) -> dict[str, tuple[int, ...]]:
        """Per blob of an op the ops that read or write it."""
        found: dict[str, list[int]] = {}
        for number, op in enumerate(self.ops):
            for blob in op.touches:
                found.setdefault(blob, []).append(number)
        return {blob: tuple(ops) for blob, ops in found.items()}

    @cached_property
    def device(self) -> dict[str, str]:
        """Where the blobs lie that ops make: with the op that writes them first."""
        found: dict[str, str] = {}
        for op in self.ops:
            for blob in filter(None, op.outputs):
                found.setdefault(blob, HOST if blob in op.host else op.device)
        return found

    @cached_property
    def movable(self) -> frozenset[str]:
        """Blobs that the net alone sees: made by its ops, no other name for their memory, not the caller's."""
        aliased = {blob for op in self.ops if op.kind == ALIAS for blob in op.touches}
        return frozenset(self.device.keys() - {*self.inputs, *self.outputs} - aliased)

    @cached_property
    def before(self) -> tuple[frozenset[int], ...]:
        """Per op all earlier ones that it must not overtake: one of the two writes what the other touches."""
        found: list[set[int]] = [set() for _ in self.ops]
        for blob, ops in self.touched.items():
            seen: list[int] = []
            writers: list[int] = []
            for number in ops:
                writes = blob in self.ops[number].outputs
                found[number].update(seen if writes else writers)
                seen.append(number)
                if writes:
                    writers.append(number)
        return tuple(map(frozenset, found))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per op a set of bits: all ops that have run whenever it runs, in whatever order."""
        found: list[int] = []
        for earlier in self.before:
            mine = 0
            for number in earlier:
                mine |= found[number] | 1 << number
            found.append(mine)
        return tuple(found)

    def reordered(self, order: Sequence[int]) -> "Net":
        """The net with its ops in another order."""
        return replace(self, ops=tuple(self.ops[number] for number in order))


def lives(net: Net, nbytes: Mapping[str, int] | None = None) -> tuple[Life, ...]:
    """When each blob is first and last touched, run as the net stands. What the caller owns lives throughout, and what
    nobody reads until the end."""
    read = {blob for op in net.ops for blob in op.inputs}
    own, wanted = frozenset(net.inputs), frozenset(net.outputs)
    return tuple(
        Life(
            blob,
            -inf if blob in own else ops[0],
            inf if blob in own or blob in wanted or blob not in read else ops[-1],
            1 if nbytes is None else nbytes[blob],
        )
        for blob, ops in net.touched.items()
    )


def held_bytes(nbytes: Mapping[str, int], shared: Mapping[str, str] | None = None) -> int:
    """Bytes of all blobs together; of those that share a name only the largest counts."""
    largest: dict[str, int] = {}
    for blob, size in nbytes.items():
        name = (shared or {}).get(blob, blob)
        largest[name] = max(largest.get(name, 0), size)
    return sum(largest.values())
