"""Sequence of ops that read and write blobs by name, as in Caffe2's nets.

A blob, unlike a value, may be written more than once: by an op that also reads it (in place), and by one that does not.
A recurrent net has its steps unrolled, or one op that contains them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autotune.errors import PlanError
from experiments.claims.memonger.sharing.objects import Life

ALIAS = "alias"
"""Kind of the ops whose output shares the memory of their input."""
HOST = "cpu"


@dataclass(frozen=True, slots=True)
class NetOp:
    """Op by the names of its blobs; an absent output, like the mask of a disabled dropout, is `""`."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    device: str = HOST
    host: tuple[str, ...] = ()
    """Outputs in host memory on every device: a copy to the host, a list of lengths."""

    @property
    def touches(self) -> tuple[str, ...]:
        """Blobs that the op reads or writes, each once."""
        return tuple(dict.fromkeys(blob for blob in (*self.inputs, *self.outputs) if blob))


@dataclass(frozen=True)
class Net:
    """Ops in a valid order; independent branches may run in any order."""

    ops: tuple[NetOp, ...]
    inputs: tuple[str, ...] = ()
    """Blobs that exist before the net runs; they belong to the caller."""
    outputs: tuple[str, ...] = ()
    """Blobs that the caller reads afterwards."""

    def __post_init__(self) -> None:
        defined = {"", *self.inputs}
        for op in self.ops:
            for blob in op.inputs:
                if blob not in defined:
                    raise PlanError(f"{op.kind} reads {blob}, which is no input of the net and no op made yet")
            defined.update(op.outputs)
        for blob in self.outputs:
            if blob not in defined:
                raise PlanError(f"nothing makes {blob}, an output of the net")

    @cached_property
    def touched(self) -> dict[str, tuple[int, ...]]:
        """Ops that read or write each blob."""
        touching: dict[str, list[int]] = {}
        for number, op in enumerate(self.ops):
            for blob in op.touches:
                touching.setdefault(blob, []).append(number)
        return {blob: tuple(ops) for blob, ops in touching.items()}

    @cached_property
    def device(self) -> dict[str, str]:
        """Device of each blob that an op makes: that of its first writer."""
        devices: dict[str, str] = {}
        for op in self.ops:
            for blob in filter(None, op.outputs):
                devices.setdefault(blob, HOST if blob in op.host else op.device)
        return devices

    @cached_property
    def movable(self) -> frozenset[str]:
        """Blobs that only the net uses: made by its ops, without aliases, not the caller's."""
        aliased = {blob for op in self.ops if op.kind == ALIAS for blob in op.touches}
        return frozenset(self.device.keys() - {*self.inputs, *self.outputs} - aliased)

    @cached_property
    def before(self) -> tuple[frozenset[int], ...]:
        """Earlier ops that each op must not overtake, since one of the two writes a blob that the other touches."""
        earlier: list[set[int]] = [set() for _ in self.ops]
        for blob, ops in self.touched.items():
            touching: list[int] = []
            writers: list[int] = []
            for number in ops:
                writes = blob in self.ops[number].outputs
                earlier[number].update(touching if writes else writers)
                touching.append(number)
                if writes:
                    writers.append(number)
        return tuple(map(frozenset, earlier))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Ops that precede each op in every valid order, as a bit set."""
        masks: list[int] = []
        for earlier in self.before:
            mask = 0
            for number in earlier:
                mask |= masks[number] | 1 << number
            masks.append(mask)
        return tuple(masks)

    def reordered(self, order: Sequence[int]) -> "Net":
        """Return the net with its ops in another order."""
        return replace(self, ops=tuple(self.ops[number] for number in order))


def blob_lives(net: Net, nbytes: Mapping[str, int] | None = None) -> tuple[Life, ...]:
    """Return the first and last op that touches each blob, in the order of the net.

    The caller's blobs live throughout, and unread blobs live until the end.
    """
    read = {blob for op in net.ops for blob in op.inputs}
    inputs, outputs = frozenset(net.inputs), frozenset(net.outputs)
    return tuple(
        Life(
            blob,
            -inf if blob in inputs else ops[0],
            inf if blob in inputs or blob in outputs or blob not in read else ops[-1],
            1 if nbytes is None else nbytes[blob],
        )
        for blob, ops in net.touched.items()
    )


def count_bytes(nbytes: Mapping[str, int], shared: Mapping[str, str] | None = None) -> int:
    """Sum the bytes of all blobs; blobs that share a name count as the largest of them."""
    largest: dict[str, int] = {}
    for blob, size in nbytes.items():
        name = (shared or {}).get(blob, blob)
        largest[name] = max(largest.get(name, 0), size)
    return sum(largest.values())
