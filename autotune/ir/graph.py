"""One training step as a graph of ops and the buffers that they read and write."""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from autotune.errors import CaptureError


class Role(StrEnum):
    """Purpose of a buffer. The first four belong to the user and live through every step."""

    PARAM = "param"
    STATE = "state"
    BUFFER = "buffer"
    BATCH = "batch"
    ACTIVATION = "activation"
    GRAD = "grad"


class Phase(StrEnum):
    """Part of the step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Value:
    """One buffer. A view is not a value: the op that reads the view creates it again from this buffer."""

    id: int
    name: str
    nbytes: int
    """Bytes of its block: those requested on a CPU, whole blocks of the caching allocator on a GPU."""
    role: Role


@dataclass(frozen=True, slots=True)
class Op:
    """Smallest unit that the executor runs: an operator, or the update of one parameter."""

    id: int
    name: str
    target: str
    inputs: tuple[int, ...]
    """Values that the op reads, each listed once."""
    outputs: tuple[int, ...]
    """Values that the op creates."""
    phase: Phase
    layer: str
    """Path of the leaf module, the same for its forward and backward ops."""
    signature: str = ""
    """Digest of target, arguments, shapes, dtypes and strides. Ops with equal signatures cost the same."""
    repeatable: bool = True
    """True if a second run produces the same bits and changes nothing else."""
    random: bool = False
    """True if the op draws random numbers: it runs once, and random ops keep their traced order."""
    writes: tuple[int, ...] = ()
    """Graph inputs that the op changes in place."""
    inplace: tuple[int, ...] = ()
    """Inputs whose buffer an output may reuse, with the same bits, once no other op reads them.

    That output is the op's first of as many bytes as the input.
    """
    alias_of: int | None = field(default=None, metadata={"key": "given"})
    """Value with the bits of the op's only output, produced by a more expensive op.

    Where that op ran right before, its value becomes the output and nothing is computed.
    """

    @property
    def only_raises(self) -> bool:
        """True if the op has no result and changes nothing: it can only raise an error, as an assertion does."""
        return not self.outputs and not self.writes and self.phase is not Phase.UPDATE


@dataclass(frozen=True)
class TrainGraph:
    """One training step. Without backward and update ops it is an inference step. Ids are positions in `ops` and `values`.

    Raises:
        CaptureError: An id is out of place, or an op reads a value before it exists.
    """

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    """Values that exist before and after the step: parameters, optimizer state, buffers and batch."""
    outputs: tuple[int, ...]
    """Values that outlive the step: the loss and the extras."""

    def __post_init__(self) -> None:
        for position, value in enumerate(self.values):
            if value.id != position:
                raise CaptureError(f"{self.name}: value {value.name} has id {value.id} at position {position}")
        ready = set(self.inputs)
        ids = range(len(self.values))
        for position, op in enumerate(self.ops):
            if op.id != position:
                raise CaptureError(f"{self.name}: op {op.name} has id {op.id} at position {position}")
            stray = next((v for v in (*op.inputs, *op.outputs, *op.writes, *op.inplace) if v not in ids), None)
            if stray is not None:
                raise CaptureError(f"{self.name}: {op.name} names value {stray}; the graph has {len(self.values)}")
            if not ready.issuperset(op.inputs) or not ready.issuperset(op.writes):
                missing = next(v for v in (*op.inputs, *op.writes) if v not in ready)
                raise CaptureError(f"{self.name}: {op.name} reads {self.values[missing].name} before it exists")
            if not ready.isdisjoint(op.outputs):
                raise CaptureError(f"{self.name}: {op.name} creates a value that exists already")
            ready.update(op.outputs)
        missing_output = next((value for value in self.outputs if value not in ready), None)
        if missing_output is not None:
            raise CaptureError(f"{self.name}: no op creates the output {missing_output}")
        self._check_aliases()

    def _check_aliases(self) -> None:
        """Check that an alias is read by its op alone, exists before the op, and has the size of the op's one output."""
        aliases = [op for op in self.ops if op.alias_of is not None]
        read = {value for op in self.ops for value in op.inputs} if aliases else set()
        for op in aliases:
            assert op.alias_of is not None
            producer = self.producer[op.alias_of] if op.alias_of in range(len(self.values)) else None
            if producer is None or producer >= op.id:
                raise CaptureError(
                    f"{self.name}: {op.name} is an alias of value {op.alias_of}, which no op before it creates"
                )
            name, nbytes = self.values[op.alias_of].name, self.values[op.alias_of].nbytes
            if [self.values[value].nbytes for value in op.outputs] != [nbytes]:
                raise CaptureError(
                    f"{self.name}: {op.name} is an alias of {name}, but has no single output of {nbytes} bytes"
                )
            if op.alias_of in read or op.alias_of in self.outputs:
                raise CaptureError(f"{self.name}: {op.name} is an alias of {name}, which is also read elsewhere")

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.ops, self.values, self.inputs, self.outputs))

    def __hash__(self) -> int:
        """Hash every field, once: results per graph are cached under it."""
        return self._hash

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """Op that creates each value; None for an input."""
        producers: list[int | None] = [None] * len(self.values)
        for op in self.ops:
            for value in op.outputs:
                producers[value] = op.id
        return tuple(producers)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that read each value, in traced order."""
        readers: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for value in op.inputs:
                readers[value].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def assertions(self) -> tuple[int, ...]:
        """Ops that can only raise an error, in traced order."""
        return tuple(op.id for op in self.ops if op.only_raises)

    @cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """Ops that must run before each op.

        These are the producers of its inputs and the writers, traced earlier, of the values that it reads. A writer also
        waits for all earlier readers of the values that it writes, and a random op for the random op before it. Writers
        and assertions wait for the assertion before them: as in eager, a step that raises has changed nothing later.
        """
        before: list[set[int]] = [set() for _ in self.ops]
        readers: dict[int, list[int]] = {}
        writer: dict[int, int] = {}
        last_random: int | None = None
        last_assertion: int | None = None
        for op in self.ops:
            earlier = before[op.id]
            for value in op.inputs:
                producer = self.producer[value]
                if producer is not None:
                    earlier.add(producer)
                if value in writer:
                    earlier.add(writer[value])
                readers.setdefault(value, []).append(op.id)
            for value in op.writes:
                earlier.update(reader for reader in readers.get(value, ()) if reader != op.id)
                if value in writer:
                    earlier.add(writer[value])
                writer[value] = op.id
            if op.random:
                if last_random is not None:
                    earlier.add(last_random)
                last_random = op.id
            if last_assertion is not None and (op.writes or op.only_raises):
                earlier.add(last_assertion)
            if op.only_raises:
                last_assertion = op.id
        return tuple(map(frozenset, before))

    @cached_property
    def static(self) -> frozenset[int]:
        """Values that exist before and after the step, whatever the plan: the inputs as a set."""
        return frozenset(self.inputs)

    @cached_property
    def static_bytes(self) -> int:
        """Bytes of parameters, state, buffers and batch."""
        return sum(self.values[value].nbytes for value in self.inputs)

    @cached_property
    def digest(self) -> str:
        """Identity of the graph: targets, arguments, shapes, dtypes, strides and wiring, without names or costs.

        Options to run in place follow from these and are left out: `check` refuses a plan that this version cannot run.
        """
        text = repr(
            (
                [(op.target, op.signature, op.inputs, op.outputs, op.writes, op.phase.value) for op in self.ops],
                [(value.nbytes, value.role.value) for value in self.values],
                self.inputs,
                self.outputs,
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:32]
