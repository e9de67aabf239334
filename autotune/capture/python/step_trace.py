"""Define a traced step: a joint graph of forward and backward, whichever way its Python was traced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autotune.capture.python.guards import GuardFailure
from autotune.capture.python.python_trace import FreeInput


class StepGuards(Protocol):
    """Conditions on Python values. While they hold, a captured step computes the user's step."""

    def hold(self, tensors: list[torch.Tensor], constants: list[Any]) -> bool:
        """Return whether all conditions hold for a step on the batch's parts."""
        ...

    def first_failure(self, tensors: list[torch.Tensor], constants: list[Any]) -> GuardFailure | None:
        """Return the first value that differs from its value at capture; None where all conditions hold."""
        ...


@dataclass(frozen=True)
class StepTrace:
    """A joint graph with what it depends on."""

    owner: torch.nn.Module
    """Module whose parameters and buffers the graph's inputs name."""
    free: tuple[FreeInput, ...]
    """Inputs from outside of model and batch."""
    joint: Any
    """AOTAutograd's result."""
    unrepeated: tuple[tuple[str, str], ...]
    """Names of changes that a captured step does not repeat and the user may miss, each with ` at` the line, if known."""
    make_guards: Callable[[], StepGuards]
    attached: tuple[bool, ...]
    """For each leaf of the result: it has a gradient in eager, before the step detaches it."""
    recorded: bool
    """The step's Python ran once on fake tensors; Dynamo refused to trace it."""
    passed: tuple[tuple[int, Callable[[], Any]], ...] = ()
    """Leaves of the result that are words of the batch which the step does not read: positions, and functions that return them."""
