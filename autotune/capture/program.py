"""Define a captured step: a graph, and the callables and arguments behind its ops."""

import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer import Updates
from autotune.capture.python.step_trace import StepGuards
from autotune.ir.allocation import allocated_bytes
from autotune.ir.graph import Op, TrainGraph


@dataclass(frozen=True, slots=True)
class Read:
    """A value as an argument of a call."""

    value: int


@dataclass(frozen=True, slots=True)
class View:
    """A view of values as an argument of a call. Every op that reads the view creates it again."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """The call behind an op: a target and its arguments, in which `Read` and `View` stand for tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[int | None, ...] | int | None = None
    """The value of a returned tensor, or one entry for each part of a returned tuple; None where nothing is a tensor."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape, strides, dtype and device of a value's tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Program:
    """A captured step. Ids of values and ops are those of `graph`."""

    graph: TrainGraph
    calls: tuple[Call, ...]
    metas: tuple[Meta | None, ...]
    """Description of each value; None for optimizer state, which consists of several tensors."""
    tensors: dict[int, torch.Tensor]
    """The user's parameters and buffers, and constants, by value."""
    batch: tuple[int, ...]
    """Values of the batch's tensors, in the order of its leaves."""
    free: tuple[tuple[int, Callable[[], torch.Tensor]], ...]
    """Values from outside of model and batch, such as a closure's tensor, each with a function that reads the current one."""
    tangent: int | None
    """Value of the loss's gradient: one, or a scaler's factor. None for inference."""
    results: tuple[Any, ...]
    """`Read`, `View` or a constant for each leaf of the step's result, and for each of `gradients`."""
    result_spec: pytree.TreeSpec
    """Structure of the step's result, without the gradients."""
    gradients: tuple[int, ...]
    """Parameters, by value, whose gradients are the last of `results`: for a step of gradients alone, else empty."""
    updates: Updates | None
    device: torch.device
    guards: StepGuards
    """Conditions on the user's Python values. While they hold, the program computes the user's step."""
    recorded: bool
    """The step's Python ran once on fake tensors, because Dynamo refused to trace it."""
    attached: tuple[bool, ...] = ()
    """For each leaf of the step's result: it has a gradient in eager, which a captured step does not give."""
    passed: tuple[tuple[int, Callable[[], Any]], ...] = ()
    """Leaves of the result that are words of the batch which the step does not read, each with a function that returns the word."""
    opened: "Program | None" = None
    """This step with the ops of its recurrent layers one by one, for kernels that fuse them; None where it has no such layer.

    Here the ops of a layer are one op each for forward and backward, because they have eager's bits only together.
    """

    def share_of_steps(self, op: Op) -> float:
        """Return the share of steps in which an op does its work: an accumulating loop updates in one of several."""
        call = self.calls[op.id]
        is_update = self.updates is not None and bool(self.updates.gradient_uses(call.target, call.args))
        return 1 / self.updates.loop.accumulate if self.updates is not None and is_update else 1.0


def round_values(program: Program) -> Program:
    """Return a step whose values have the bytes of their blocks on a GPU; on a CPU the program itself.

    Tensors of the step that lie on the CPU keep their bytes, and optimizer state is counted per tensor already. Sizes are
    rounded once the step is read, because kernels may write over a buffer of the same exact size only.
    """
    if program.device.type != "cuda":
        return program
    values = tuple(
        value if meta is None else replace(value, nbytes=allocated_bytes(value.nbytes, meta.device.type))
        for value, meta in zip(program.graph.values, program.metas, strict=True)
    )
    return replace(program, graph=replace(program.graph, values=values))


def reads(argument: Any) -> Iterator[int]:
    """Yield the values that an argument reads; a tuple or list of arguments is searched too."""
    match argument:
        case Read(value):
            yield value
        case View(_, args, kwargs):
            yield from reads(args)
            yield from reads([part for _, part in kwargs])
        case tuple() | list():
            for part in argument:
                yield from reads(part)


def view_part(source: Any, number: int) -> View:
    """Return a view of one part of a tensor. A reader of one part of `unbind` would compute all parts, so it selects."""
    match source:
        case View(torch.ops.aten.unbind.int, (tensor, *dim), ()):
            return View(torch.ops.aten.select.int, (tensor, dim[0] if dim else 0, number))
    return View(operator.getitem, (source, number))


def argument_text(argument: Any, metas: Sequence[Meta | None]) -> str:
    """Return an argument as text, equal for tensors of one shape, dtype, layout and kind of device."""
    match argument:
        case Read(value):
            meta = metas[value]
            return f"<{meta.dtype}{meta.shape}{meta.stride}{meta.device.type}>" if meta else "<state>"
        case View(target, args, kwargs):
            return f"{stable_text(target)}{argument_text(args, metas)}{argument_text(kwargs, metas)}"
        case tuple() | list():
            return "(" + ",".join(argument_text(part, metas) for part in argument) + ")"
        case torch.device() if argument.index is not None:
            # a plan fits any GPU of its kind; index 0 for all of them keeps the digests of existing plans
            return repr(torch.device(argument.type, 0))
        case torch.nn.Parameter():
            return "<parameter>"
        case _:
            return stable_text(repr(argument))


def stable_text(value: object) -> str:
    """Return a value as text without the addresses of functions and other objects, which differ between processes."""
    return _ADDRESS.sub("", str(value))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def hash_signature(description: object) -> str:
    """Return the signature of an op: 24 hexadecimal digits, equal for ops of equal description."""
    return hashlib.sha256(repr(description).encode()).hexdigest()[:24]
