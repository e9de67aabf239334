"""Run a schedule for real: straight-line Python, generated once, that frees every value at its last use."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune import malloc
from autotune.arena import Arena
from autotune.bindings import Bindings
from autotune.engine import Engine, Store, slot
from autotune.errors import PlanError
from autotune.graph import Op, Role, TrainGraph
from autotune.inplace import overwriting
from autotune.measurement import Lanes
from autotune.program import Call, Program, Read, View, reads
from autotune.schedule import Free, Offload, Prefetch, Run, Schedule

AT_RUN_TIME: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Views that kernels may not allow: some lay their output out otherwise than the tracer expects, and eager copies there."""


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


def own_bytes(graph: TrainGraph, schedule: Schedule) -> int:
    """The most that the step's own take beyond what is away of the user's own: the step's peak beside the static bytes,
    kernels' scratch not counted.
    """
    live = most = 0
    for instruction in schedule.instructions:
        match instruction:
            case Run(op, takes):
                live += sum(graph.values[value].nbytes for value in graph.ops[op].outputs)
                live -= graph.values[takes].nbytes if takes is not None else 0
            case Free(value):
                live -= graph.values[value].nbytes
            case Prefetch(value):
                live += graph.values[value].nbytes
            case Offload(_):
                pass
        most = max(most, live)
    return most


def seed_gradient(program: Program) -> torch.Tensor:
    """The loss's own gradient: one, in the loss's dtype and shape."""
    meta = program.metas[program.tangent] if program.tangent is not None else None
    if meta is None:
        return torch.ones((), device=program.device)
    return torch.ones(meta.shape, dtype=meta.dtype, device=meta.device)


class _Writer:
    """Writes the step's source; everything that it names is in `names`."""

    def __init__(self, program: Program, schedule: Schedule) -> None:
        self._program = program
        self._schedule = schedule
        self._targets: dict[int, str] = {}
        self._bindings = Bindings(program.metas)
        self.names: dict[str, Any] = {f"v{value}": tensor for value, tensor in program.tensors.items()}

    def source(self, *, traced: bool) -> str:
        inputs = (*self._program.batch, *(value for value, _ in self._program.free))
        parameters = [f"v{value}" for value in inputs]
        tangent = f"v{self._program.tangent}" if self._program.tangent is not None else "tangent"
        lines = [f"def step({', '.join([tangent, *parameters])}):"]
        loading: set[int] = set()
        leaving: set[int] = set()
        static = self._program.graph.static
        for index, instruction in enumerate(self._schedule.instructions):
            match instruction:
                case Run(number, takes):
                    op = self._program.graph.ops[number]
                    due = [value for value in dict.fromkeys((*op.inputs, *op.writes)) if value in loading]
                    # the user's own have no name here: they are the same objects, with their memory back
                    lines += [f" {'' if value in static else f'v{value} = '}engine.arrived({value})" for value in due]
                    loading.difference_update(due)
                    lines.append(f" {self._call(op, takes)}")
                case Offload(value):
                    lines.append(f" engine.save({value}{'' if value in static else f', v{value}'})")
                    leaving.add(value)
                case Free(value):
                    if value in leaving:
                        lines.append(f" engine.gone({value})")
                        leaving.remove(value)
                    if value not in static:
                        lines.append(f" del v{value}")
                case Prefetch(value):
                    lines.append(f" engine.load({value})")
                    loading.add(value)
            if traced:
                lines.append(f" after({index})")
        results = "".join(self._text(result) + ", " for result in self._program.results)
        lines.append(f" return ({results})")
        return "\n".join(lines) + "\n"

    def _call(self, op: Op, takes: int | None) -> str:
        call = self._program.calls[op.id]
        if takes is not None and takes == op.given:
            return f"v{op.outputs[0]} = v{takes}; del v{takes}"
        if takes is not None:
            return f"{self._text_of(overwriting(call, takes))}; del v{takes}"
        return self._text_of(call)

    def _text_of(self, call: Call) -> str:
        arguments = [self._text(part) for part in call.args] + [
            f"{key}={self._text(part)}" for key, part in call.kwargs
        ]
        target = self._bindings.of(call.target, call.args, call.kwargs)
        text = f"{self._name(target)}({', '.join(arguments)})"
        match call.outputs:
            case None:
                return text
            case int(value):
                return f"v{value} = {text}"
            case parts:
                names = [f"v{value}" if value is not None else f"_{index}" for index, value in enumerate(parts)]
                unused = [name for name in names if name.startswith("_")]
                return f"{', '.join(names)}, = {text}" + (f"; del {', '.join(unused)}" if unused else "")

    def _text(self, argument: Any) -> str:
        match argument:
            case Read(value):
                return f"v{value}"
            case View(target, args, kwargs):
                parts = [self._text(part) for part in args] + [f"{key}={self._text(part)}" for key, part in kwargs]
                called = self._bindings.of(AT_RUN_TIME.get(target, target), args, kwargs)
                return f"{self._name(called)}({', '.join(parts)})"
            case tuple() | list():
                inside = "".join(self._text(part) + ", " for part in argument)
                return f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
            case None | bool() | int() | str():
                return repr(argument)
            case _:
                return self._name(argument)

    def _name(self, thing: Any) -> str:
        """A name in the step's scope for a callable or a constant."""
        if id(thing) not in self._targets:
            name = f"c{len(self._targets)}"
            self._targets[id(thing)] = name
            self.names[name] = thing
        return self._targets[id(thing)]


def open_slots(program: Program, *schedules: Schedule) -> Mapping[int, int]:
    """What a store must hold for schedules of one program: bytes per slot."""
    values = program.graph.values
    found: dict[int, int] = {}
    for schedule in schedules:
        for value in offloaded(schedule):
            parts = [values[value].nbytes]
            if values[value].role is Role.STATE and program.updates is not None:
                parts = program.updates.state_sizes(_parameter_of(program, value))
            found |= {slot(value, part, len(values)): nbytes for part, nbytes in enumerate(parts)}
    return found


def offloaded(schedule: Schedule) -> list[int]:
    """Values that leave memory at all."""
    return list(dict.fromkeys(made.value for made in schedule.instructions if isinstance(made, Offload)))


def own_tensors(program: Program, schedule: Schedule) -> Mapping[int, Callable[[], list[torch.Tensor]]]:
    """For what leaves of the user's own, how to get at its tensors; state may come to be in the first step only.

    PlanError for a weight whose memory is not its own to give back.
    """
    found: dict[int, Callable[[], list[torch.Tensor]]] = {}
    for value in offloaded(schedule):
        match program.graph.values[value].role:
            case Role.PARAM:
                _refuse_shared(program, value)
                found[value] = partial(list, (program.tensors[value],))
            case Role.STATE if program.updates is not None:
                found[value] = partial(program.updates.state_tensors, _parameter_of(program, value))
    return found


def _parameter_of(program: Program, state: int) -> torch.Tensor:
    """The parameter whose optimizer state a value is."""
    update = program.calls[program.graph.consumers[state][0]]
    return program.tensors[next(reads(update.args))]


def _refuse_shared(program: Program, value: int) -> None:
    named, storage = program.graph.values[value], program.tensors[value].untyped_storage()
    others = [v for v, t in program.tensors.items() if v != value and t.untyped_storage()._cdata == storage._cdata]
    problem = ""
    if others:
        problem = f"shares its memory with {program.graph.values[others[0]].name}"
    elif storage.nbytes() != named.nbytes:
        problem = "is a part of something larger"
    if problem:
        raise PlanError(f"{named.name} {problem}: it cannot leave; tune with offload's what: activations, or clone it")
