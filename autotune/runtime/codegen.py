"""Write the Python source of a step from its schedule."""

from typing import Any

import torch

from autotune.capture.bindings import Bindings
from autotune.capture.inplace_kernels import overwriting
from autotune.capture.program import Call, Program, Read, View
from autotune.ir.graph import Op
from autotune.ir.schedule import Free, Offload, Prefetch, Run, Schedule

AT_RUN_TIME: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Views that kernels may not allow: some lay their output out otherwise than the tracer expects, and eager copies there."""


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
