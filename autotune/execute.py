"""Run a schedule for real: straight-line Python, generated once, that frees every value at its last use."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from autotune.arena import Arena
from autotune.inplace import overwriting
from autotune.program import Call, Program, Read, View
from autotune.schedule import Free, Offload, Prefetch, Run, Schedule


class Store(Protocol):
    """The part of a store that a step talks to; see `autotune.stores`."""

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]": ...

    def fetch(self, key: int) -> "Future[torch.Tensor]": ...


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
        self.stall_seconds = 0.0
        """Of the last step: waited for the store."""
        self.transfer_bytes = 0
        """Of the last step: handed to and asked from the store."""
        self.tangent = seed_gradient(program)
        writer = _Writer(program, schedule)
        self.source = writer.source(traced=after_instruction is not None)
        scope: dict[str, Any] = {
            **writer.names,
            "wait": self._wait,
            "put": None,
            "fetch": None,
            "after": after_instruction,
        }
        if store is not None:
            scope |= {"put": self._counted(store.put), "fetch": self._counted(store.fetch)}
        exec(compile(self.source, f"<step of {program.graph.name}>", "exec"), scope)
        self._step: Callable[..., tuple[Any, ...]] = scope["step"]

    def __call__(self, batch: list[torch.Tensor]) -> Any:
        """Run the step; what it returns has the structure that the workload's loss function returned."""
        self.stall_seconds, self.transfer_bytes = 0.0, 0
        with torch.no_grad(), self._arena.step() if self._arena else nullcontext():
            results = self._step(self.tangent, *batch)
        return pytree.tree_unflatten(list(results), self.program.result_spec)

    def _wait(self, future: "Future[Any]") -> Any:
        if future.done():
            return future.result()
        start = time.perf_counter()
        try:
            return future.result()
        finally:
            self.stall_seconds += time.perf_counter() - start

    def _counted(self, transfer: Callable[..., "Future[Any]"]) -> Callable[..., "Future[Any]"]:
        def counted(key: int, *tensor: torch.Tensor) -> "Future[Any]":
            self.transfer_bytes += self.program.graph.values[key].nbytes
            return transfer(key, *tensor)

        return counted


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
        self.names: dict[str, Any] = {f"v{value}": tensor for value, tensor in program.tensors.items()}

    def source(self, *, traced: bool) -> str:
        parameters = [f"v{value}" for value in self._program.batch]
        tangent = f"v{self._program.tangent}" if self._program.tangent is not None else "tangent"
        lines = [f"def step({', '.join([tangent, *parameters])}):"]
        loading: set[int] = set()
        leaving: set[int] = set()
        for index, instruction in enumerate(self._schedule.instructions):
            match instruction:
                case Run(op, takes):
                    due = [value for value in self._program.graph.ops[op].inputs if value in loading]
                    lines += [f" v{value} = wait(f{value}); del f{value}" for value in due]
                    loading.difference_update(due)
                    lines.append(f" {self._call(self._program.calls[op], takes)}")
                case Offload(value):
                    lines.append(f" w{value} = put({value}, v{value})")
                    leaving.add(value)
                case Free(value) if value in leaving:
                    lines.append(f" wait(w{value}); del w{value}, v{value}")
                    leaving.remove(value)
                case Free(value):
                    lines.append(f" del v{value}")
                case Prefetch(value):
                    lines.append(f" f{value} = fetch({value})")
                    loading.add(value)
            if traced:
                lines.append(f" after({index})")
        results = "".join(self._text(result) + ", " for result in self._program.results)
        lines.append(f" return ({results})")
        return "\n".join(lines) + "\n"

    def _call(self, call: Call, takes: int | None) -> str:
        if takes is not None:
            return f"{self._text_of(overwriting(call, takes))}; del v{takes}"
        return self._text_of(call)

    def _text_of(self, call: Call) -> str:
        arguments = [self._text(part) for part in call.args] + [
            f"{key}={self._text(part)}" for key, part in call.kwargs
        ]
        text = f"{self._name(call.target)}({', '.join(arguments)})"
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
                return f"{self._name(target)}({', '.join(parts)})"
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


def open_slots(program: Program, schedule: Schedule) -> Mapping[int, int]:
    """What a store must hold for a schedule: bytes per value."""
    values = program.graph.values
    return {made.value: values[made.value].nbytes for made in schedule.instructions if isinstance(made, Offload)}
