"""Run a schedule for real: straight-line Python, generated once, that frees every value at its last use."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.program import Program
from autotune.ir.schedule import Schedule
from autotune.records.measurement import Lanes
from autotune.runtime import malloc
from autotune.runtime.arena import Arena
from autotune.runtime.codegen import _Writer
from autotune.runtime.offload_engine import Engine, Store
from autotune.runtime.offload_slots import own_bytes, own_tensors


class Executor:
    """One step of a program under a schedule. Calling it takes the batch's tensors and gives the results.

    `after_instruction`, called with each instruction's index, is for meters that compare bytes with the simulator.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        store: Store | None = None,
        *,
        arena: Arena | None = None,
        after_instruction: Callable[[int], None] | None = None,
    ) -> None:
        self.program = program
        self.schedule = schedule
        self._arena = arena
        own = {} if store is None else own_tensors(program, schedule)
        lends = own and arena is not None and arena.works and program.device.type == "cpu"
        # the user's own memory is not the arena's: while one of them has it the other must not hold it too
        self._memory: Lent | None = None
        if lends and arena is not None:
            self._memory = Lent(arena, own_bytes(program.graph, schedule))
        self._engine = None if store is None else Engine(store, own, len(program.graph.values), self._memory)
        self.tangent = seed_gradient(program)
        writer = _Writer(program, schedule)
        self.source = writer.source(traced=after_instruction is not None)
        scope: dict[str, Any] = {
            **writer.names,
            "engine": self._engine,
            "after": after_instruction,
        }
        exec(compile(self.source, f"<step of {program.graph.name}>", "exec"), scope)
        self._step: Callable[..., tuple[Any, ...]] = scope["step"]

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        """Run the step; what it returns has the structure that the workload's loss function returned."""
        with (
            torch.no_grad(),
            malloc.returning(self._memory is not None),
            self._arena.step() if self._arena else nullcontext(),
            self._engine or nullcontext(),
        ):
            results = self._step(self.tangent, *batch, *(read() for _, read in self.program.free))
        if self._memory is not None:
            self._memory.away(0)
        return pytree.tree_unflatten(list(results), self.program.result_spec)

    def use(self, store: Store) -> None:
        """Offload to another store from the next step on; it has the slots of the first."""
        if self._engine is not None:
            self._engine.store = store

    @property
    def lanes(self) -> Lanes:
        """Of the last step: what the store did beside it, and when the step waited for that."""
        return self._engine.lanes if self._engine else Lanes()

    @property
    def stall_seconds(self) -> float:
        """Of the last step: waited for the store."""
        return self.lanes.stall_seconds

    @property
    def transfer_bytes(self) -> int:
        """Of the last step: handed to and asked from the store."""
        return self._engine.transfer_bytes if self._engine else 0

    @property
    def problem(self) -> str:
        """Why something of the last step stayed in memory that was to leave; empty if nothing did."""
        return self._engine.problem if self._engine else ""


@dataclass
class Lent:
    """An arena's block may take what the step's own do at most, and the memory of the user's own that is away."""

    arena: Arena
    most: int
    """By `own_bytes`."""

    def away(self, nbytes: int) -> None:
        """So many bytes of the user's own are away."""
        self.arena.hold(self.most, nbytes)

    def take(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """One of them takes memory again."""
        self.arena.map(storage, nbytes)


def seed_gradient(program: Program) -> torch.Tensor:
    """The loss's own gradient: one, in the loss's dtype and shape."""
    meta = program.metas[program.tangent] if program.tangent is not None else None
    if meta is None:
        return torch.ones((), device=program.device)
    return torch.ones(meta.shape, dtype=meta.dtype, device=meta.device)
