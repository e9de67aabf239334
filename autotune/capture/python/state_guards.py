"""Check before a step that the Python state which its recorded run read is unchanged."""

import array
import ctypes
import math
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.capture.python.guards import GLOBAL_HOOKS, GuardFailure, other_branch
from autotune.capture.python.python_trace import FreeInput
from autotune.capture.python.state_places import CONTAINERS, MISSING, Place, StateReads, instance_dict, plain_content
from autotune.capture.python.step_module import CONSTANTS, StepModule
from autotune.capture.python.words import Words
from autotune.capture.values.batch_branches import BatchBranch

_SIMPLE = (
    bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size,
    torch.memory_format, np.generic,
)  # fmt: skip

_BUFFERS = (array.array, bytearray, ctypes.Array, ctypes.Structure)
"""Types of memory that other code may write, such as that of `multiprocessing.Array`; compared by their bytes."""

_CHANGING = ("container", "array", "any", "buffer", "tensor")
"""Kinds of parts that may change while the object stays: a tensor gets another shape by an assignment to `.data`."""


class StateGuards:
    """Conditions on the values that a step read. While they hold, its recorded ops compute the user's step.

    A value is compared by identity first, which takes some ten nanoseconds; one that is another object is compared by
    type and content.
    """

    def __init__(
        self,
        step: StepModule,
        reads: StateReads,
        words: Words,
        parameters: set[int],
        *,
        branches: Sequence[BatchBranch] = (),
        twins: Sequence[tuple[FreeInput, FreeInput]] = (),
    ) -> None:
        """`words` are the words of the batch that the step read. `parameters` has ids of the model's own tensors.

        `twins` are pairs of places that held the same tensor. The captured step has one input for both, so the guards fail once
        the two places hold different tensors.
        """
        self._step, self._words, self._branches, self._twins = step, words, tuple(branches), tuple(twins)
        self._constants = [_freeze(part) for part in step.constants]
        self._forwards = reads.forwards
        self._entries = [
            (place, _freeze(value, parameters))
            for place, value in reads.reads.values()
            if not _is_covered(place, step) and not isinstance(value, types.ModuleType)
        ]
        self._global_state = _global_state()
        self._check: Callable[[], bool]
        self._compile()

    @property
    def count(self) -> int:
        """Number of values that are compared."""
        return len(self._entries) + len(self._constants) + len(self._forwards) + len(self._twins)

    def hold(self, tensors: list[torch.Tensor], constants: list[Any]) -> bool:
        """Return whether all conditions hold for a step on the batch's parts."""
        self._step.constants[:] = constants  # a result may pass one on
        if _global_state() != self._global_state or self._changed_constant(constants) is not None:
            return False
        return (
            self._values_hold() and self._parted() is None and all(branch.holds(tensors) for branch in self._branches)
        )

    def _values_hold(self) -> bool:
        """Return whether the values at all places are equal; branches read tensors from these places."""
        try:
            if self._check():
                return True
        except (AttributeError, LookupError, ValueError):
            return False
        if self._first_changed() is not None:
            return False
        self._name_values(self._scope)  # other objects of equal content
        return True

    def first_failure(self, tensors: list[torch.Tensor], constants: list[Any]) -> GuardFailure | None:
        """Return the first value that differs from its value in the recorded run; None where all conditions hold."""
        position = self._changed_constant(constants)
        if position is not None:
            source = f"{CONSTANTS}[{position}]"
            return _failure(source, self._step.spell(source), self._constants[position], constants[position], "")
        for kind, forward in self._forwards.items():
            if getattr(kind, "forward", None) is not forward:
                name = f"{kind.__qualname__}.forward"
                return GuardFailure(f"{kind.__module__}.{name}", name, f"{name} being the same function", None, "")
        changed = self._first_changed()
        if changed is not None:
            place, frozen = changed
            return _failure(place.name, place.name, frozen, place.read(), place.line)
        if (pair := self._parted()) is not None:
            first, other = (twin.name for twin in pair)
            return GuardFailure(other, other, f"{other} being the same tensor as {first}", None, "")
        if _global_state() != self._global_state:
            return GuardFailure("", "global state of torch", "the settings of its capture", None, "")
        return other_branch(self._branches, tensors)

    def _parted(self) -> tuple[FreeInput, FreeInput] | None:
        """Return the first pair of places that no longer hold one tensor."""
        return next((pair for pair in self._twins if pair[0].read() is not pair[1].read()), None)

    def _changed_constant(self, constants: list[Any]) -> int | None:
        for position, (frozen, part) in enumerate(zip(self._constants, constants, strict=True)):
            if not self._words.is_unread(position, part) and not frozen.matches(part):
                return position
        return None

    def _first_changed(self) -> "tuple[Place, Frozen] | None":
        return next(((place, frozen) for place, frozen in self._entries if not frozen.matches(place.read())), None)

    def _compile(self) -> None:
        """Write a function that compares all values by identity."""
        self._scope = scope = dict[str, Any](MISSING=MISSING)
        conditions = []
        for number, (kind, forward) in enumerate(self._forwards.items()):
            scope[f"k{number}"], scope[f"f{number}"] = kind, forward
            conditions.append(f"k{number}.forward is f{number}")
        conditions += self._name_values(scope)
        source = "def check():\n    return (" + "\n        and ".join(conditions or ["True"]) + ")\n"
        exec(compile(source, "<guards>", "exec"), scope)
        self._check = scope["check"]

    def _name_values(self, scope: dict[str, Any]) -> list[str]:
        """Return conditions that each value is the present one; `scope` gets these values, by the names in the conditions."""
        conditions = []
        for number, (place, frozen) in enumerate(self._entries):
            conditions += frozen.conditions(f"{number}", place, scope)
        return conditions


class Frozen:
    """A value as it was, to compare with another one."""

    __slots__ = ("kind", "parts", "value")

    def __init__(self, kind: str, value: Any, parts: tuple[Any, ...] = ()) -> None:
        self.kind, self.value, self.parts = kind, value, parts

    def matches(self, value: Any) -> bool:
        """Return whether a value is equal to this one, for the step."""
        match self.kind:
            case "same":
                return value is self.value
            case "simple":
                return type(value) is type(self.value) and bool(
                    value == self.value or (_is_nan(value) and _is_nan(self.value))
                )
            case "tensor":
                return isinstance(value, torch.Tensor) and _form(value) == self.value
            case "any":
                return isinstance(value, self.value)
            case "array":
                return (
                    isinstance(value, np.ndarray)
                    and value.dtype == self.value.dtype
                    and np.array_equal(value, self.value, equal_nan=value.dtype.kind in "fc")
                )
            case "buffer":
                return isinstance(value, _BUFFERS) and bytes(value) == self.value
        if type(value) is not self.value or len(parts := _parts(value)) != len(self.parts):
            return False
        return all(frozen.matches(part) for frozen, part in zip(self.parts, parts, strict=True))

    def conditions(self, number: str, place: Place, scope: dict[str, Any]) -> list[str]:
        """Return conditions by which the value at a place is surely equal; `scope` gets the objects that they name."""
        read = _read_source(place, number, scope)
        value = place.read()
        if self.kind in ("same", "simple"):
            scope[f"v{number}"] = self.value if self.kind == "same" else value
            return [f"{read} is v{number}"]
        if self.kind == "container" and not self.parts:
            scope[f"v{number}"] = value
            return [f"{read} is v{number}", f"not v{number}"]
        scope[f"v{number}"] = self._quick_check(value)
        return [f"v{number}({read})"]

    def _quick_check(self, current: Any) -> Callable[[Any], bool]:
        """Return a function that compares the parts of a container by identity first."""
        if self.kind != "container" or any(part.kind in _CHANGING for part in self.parts):
            return self.matches
        kind = type(current)
        if kind in (dict, OrderedDict):
            keys, values = tuple(current), tuple(current.values())

            def check_items(value: Any) -> bool:
                if type(value) is not kind:
                    return False
                if len(value) == len(keys) and all(map(is_, value, keys)) and all(map(is_, value.values(), values)):
                    return True
                return self.matches(value)

            return check_items
        if kind not in (list, tuple):
            return self.matches
        elements = tuple(current)

        def check_elements(value: Any) -> bool:
            if type(value) is kind and len(value) == len(elements) and all(map(is_, value, elements)):
                return True
            return self.matches(value)

        return check_elements

    def describe(self, name: str) -> str:
        """Return the condition in words."""
        match self.kind:
            case "same" if self.value is MISSING:
                return f"{name} being absent, or that of the class"
            case "same":
                return f"{name} being the same object"
            case "simple":
                return f"{name} == {self.value!r}"
            case "tensor":
                return f"{name} of its shape, dtype and device at capture"
        return (
            f"{name} being empty"
            if self.kind == "container" and not self.parts
            else f"{name} of its content at capture"
        )


def _is_covered(place: Place, step: StepModule) -> bool:
    """Return whether other checks cover a place: the batch's parts, and the model's tensors, which the signature compares."""
    if place.owner is step:
        return True
    return place.kind == "attribute" and place.key in ("_parameters", "_buffers") and place.name.startswith("model.")


def _freeze(value: Any, parameters: Iterable[int] = (), depth: int = 0) -> Frozen:
    if isinstance(value, _SIMPLE):
        return Frozen("simple", value)
    if isinstance(value, torch.Tensor):
        return Frozen("same", value) if id(value) in parameters else Frozen("tensor", _form(value))
    if isinstance(value, np.ndarray):
        return Frozen("array", value.copy())
    if isinstance(value, _BUFFERS):
        return Frozen("buffer", bytes(value))
    if isinstance(value, weakref.ref):  # of layers that keep references to their weights
        return Frozen("any", weakref.ref)
    if isinstance(value, CONTAINERS) and depth < 12:
        parts = tuple(_freeze(part, parameters, depth + 1) for part in _parts(value))
        return Frozen("container", type(value), parts)
    return Frozen("same", value)


def _parts(value: Any) -> list[Any]:
    content = plain_content(value)
    if isinstance(content, dict):
        return [*content.keys(), *content.values()]
    return sorted(content, key=repr) if isinstance(content, set) else content


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _read_source(place: Place, number: str, scope: dict[str, Any]) -> str:
    scope[f"o{number}"] = place.owner
    if place.kind == "method":
        scope[f"o{number}"] = instance_dict(place.owner)
        return f"o{number}.get({place.key!r}, MISSING)"
    if place.kind == "cell":
        return f"o{number}.cell_contents"
    if place.kind in ("item", "entry"):
        return f"o{number}.get({place.key!r}, MISSING)"
    if place.read() is MISSING or not place.key.isidentifier():
        return f"getattr(o{number}, {place.key!r}, MISSING)"
    return f"o{number}.{place.key}"


def _failure(source: str, name: str, frozen: Frozen, current: Any, line: str) -> GuardFailure:
    # a value that becomes an input is read again by its source, and the recorded run has constants only
    return GuardFailure(source, name, frozen.describe(name), None if current is MISSING else current, line)


def _global_state() -> tuple[Any, ...]:
    """Return the modes of torch that a trace depends on."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        *(tuple(hooks.items()) for hooks in GLOBAL_HOOKS),
        nn.Module.__call__,
    )
