"""One training step as a graph of operators and the buffers that they read and make."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from autotune.errors import CaptureError


class Role(StrEnum):
    """Why a buffer exists. The first four are the user's own and live through every step."""

    PARAM = "param"
    STATE = "state"
    BUFFER = "buffer"
    BATCH = "batch"
    ACTIVATION = "activation"
    GRAD = "grad"


class Phase(StrEnum):
    """The part of the step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Value:
    """One buffer. A view is no value: the op that reads it makes it anew, from this buffer."""

    id: int
    name: str
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True)
class Op:
    """The smallest thing the executor runs: an operator, or the update of one parameter."""

    id: int
    name: str
    target: str
    inputs: tuple[int, ...]
    """Values read, each once."""
    outputs: tuple[int, ...]
    """Values made."""
    phase: Phase
    layer: str
    """Path of the leaf module, shared by its forward and backward ops."""
    signature: str = ""
    """Digest of target, arguments, shapes, dtypes and strides: ops that share it cost the same."""
    repeatable: bool = True
    """Running it again gives the same bits and changes nothing else."""
    random: bool = False
    """Draws from the generator: runs once, and in the traced order among its like."""
    writes: tuple[int, ...] = ()
    """Values of the user's own that it changes in place."""
    inplace: tuple[int, ...] = ()
    """Inputs in whose buffer its only output may be made, bit for bit the same, once nobody else reads them."""
    given: int | None = None
    """Value with the bits of its only output, made by an op that costs more: where that op ran right before, its value is
    taken, and nothing computed."""


@dataclass(frozen=True)
class TrainGraph:
    """A training step (without backward and update ops: an inference step). Ids are positions in `ops` and `values`."""

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    """Values that exist before the step and after it: parameters, state, buffers, batch."""
    outputs: tuple[int, ...]
    """Values that outlive the step: the loss, the extras."""

    def __post_init__(self) -> None:
        for position, value in enumerate(self.values):
            if value.id != position:
                raise CaptureError(f"{self.name}: value {value.name} has id {value.id} at position {position}")
        made = set(self.inputs)
        known = range(len(self.values))
        for position, op in enumerate(self.ops):
            if op.id != position:
                raise CaptureError(f"{self.name}: op {op.name} has id {op.id} at position {position}")
            stray = next((v for v in (*op.inputs, *op.outputs, *op.writes, *op.inplace) if v not in known), None)
            if stray is not None:
                raise CaptureError(f"{self.name}: {op.name} names value {stray}; the graph has {len(self.values)}")
            if not made.issuperset(op.inputs) or not made.issuperset(op.writes):
                missing = next(v for v in (*op.inputs, *op.writes) if v not in made)
                raise CaptureError(f"{self.name}: {op.name} reads {self.values[missing].name} before it is made")
            if not made.isdisjoint(op.outputs):
                raise CaptureError(f"{self.name}: {op.name} makes a value that exists already")
            made.update(op.outputs)
        unmade = next((value for value in self.outputs if value not in made), None)
        if unmade is not None:
            raise CaptureError(f"{self.name}: nothing makes the output {unmade}")
        self._check_given()

    def _check_given(self) -> None:
        """What an op is given is there for it alone, made before it, and of its one output's bytes."""
        given = [op for op in self.ops if op.given is not None]
        read = {value for op in self.ops for value in op.inputs} if given else set()
        for op in given:
            assert op.given is not None
            maker = self.producer[op.given] if op.given in range(len(self.values)) else None
            if maker is None or maker >= op.id:
                raise CaptureError(f"{self.name}: {op.name} is given value {op.given}, which no op before it makes")
            name, nbytes = self.values[op.given].name, self.values[op.given].nbytes
            if [self.values[value].nbytes for value in op.outputs] != [nbytes]:
                raise CaptureError(
                    f"{self.name}: {op.name} is given {name} of {nbytes} bytes, which its output has not"
                )
            if op.given in read or op.given in self.outputs:
                raise CaptureError(f"{self.name}: {op.name} is given {name}, which others read too")

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.ops, self.values, self.inputs, self.outputs))

    def __hash__(self) -> int:
        """Of everything, reckoned once: what is known of a graph is kept by it."""
        return self._hash

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Op that makes each value; None for an input."""
        made: list[int | None] = [None] * len(self.values)
        for op in self.ops:
            for value in op.outputs:
                made[value] = op.id
        return tuple(made)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that read each value, in traced order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in op.inputs:
                readers[value].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """Ops that must have run before each op: its inputs' producers; for a writer all readers of what it writes;
        for a reader of something written, the writers traced before it; for a random op the one before it."""
        before: list[set[int]] = [set() for _ in self.ops]
        readers: dict[int, list[int]] = {}
        writer: dict[int, int] = {}
        last_random: int | None = None
        for op in self.ops:
            mine = before[op.id]
            for value in op.inputs:
                maker = self.producer[value]
                if maker is not None:
                    mine.add(maker)
                if value in writer:
                    mine.add(writer[value])
                readers.setdefault(value, []).append(op.id)
            for value in op.writes:
                mine.update(reader for reader in readers.get(value, ()) if reader != op.id)
                if value in writer:
                    mine.add(writer[value])
                writer[value] = op.id
            if op.random:
                if last_random is not None:
                    mine.add(last_random)
                last_random = op.id
        return tuple(map(frozenset, before))

    @cached_property
    def static(self) -> frozenset[int]:
        """Values that occupy memory through the whole step, whatever the plan."""
        return frozenset(self.inputs)

    @cached_property
    def static_bytes(self) -> int:
        """Bytes of parameters, state, buffers and batch."""
        return sum(self.values[value].nbytes for value in self.inputs)

    @cached_property
    def digest(self) -> str:
        """Identity of the graph: targets, arguments, shapes, dtypes, strides and wiring; never names or costs.

        Nor what may run in place, which follows from these: `check` refuses a plan that does what this version cannot."""
        text = repr(
            (
                [(op.target, op.signature, op.inputs, op.outputs, op.writes, op.phase.value) for op in self.ops],
                [(value.nbytes, value.role.value) for value in self.values],
                self.inputs,
                self.outputs,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]
