"""A graph together with what it takes to run it: the callables and arguments behind its ops."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.optimizers.optimizer import Updates
from autotune.capture.python.guards import Guards
from autotune.ir.graph import TrainGraph


@dataclass(frozen=True, slots=True)
class Read:
    """A value, as an argument of a call."""

    value: int


@dataclass(frozen=True, slots=True)
class View:
    """A view of values, as an argument; every op that reads it makes it anew."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """How an op runs: its target, on arguments in which `Read` and `View` stand for tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[int | None, ...] | int | None = None
    """The value made, or per part of a returned tuple (None for a part that is no tensor); None returns nothing."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What a value's tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Program:
    """A captured step. Ids are those of `graph`."""

    graph: TrainGraph
    calls: tuple[Call, ...]
    metas: tuple[Meta | None, ...]
    """Per value; None for optimizer state, which is several tensors."""
    tensors: dict[int, torch.Tensor]
    """The user's own parameters and buffers, and constants, by value."""
    batch: tuple[int, ...]
    """Values of the batch's tensors, in the order of its leaves."""
    free: tuple[tuple[int, Callable[[], torch.Tensor]], ...]
    """Values from outside of model and batch, such as a closure's tensor, and how to read the current one."""
    tangent: int | None
    """Value of the loss's own gradient: one, or a scaler's factor. None for inference."""
    results: tuple[Any, ...]
    """`Read`, `View` or a constant for each leaf of what the step returns."""
    result_spec: pytree.TreeSpec
    updates: Updates | None
    device: torch.device
    guards: Guards
    """The conditions on the user's Python values under which this is the user's step."""


def reads(argument: Any) -> Iterator[int]:
    """Values that an argument, or a tuple or list of arguments, reads."""
    match argument:
        case Read(value):
            yield value
        case View(_, args, kwargs):
            yield from reads(args)
            yield from reads([part for _, part in kwargs])
        case tuple() | list():
            for part in argument:
                yield from reads(part)
