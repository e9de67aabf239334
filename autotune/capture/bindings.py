"""Call ATen ops through torch's functions and methods, which parse their arguments in half the time of `torch.ops`.

A function replaces an overload only if a trial on the meta device dispatches that overload with the same arguments. The
choice depends on the types and dtypes of the arguments and on which tensors have no dimension, so it is made once for each
such combination.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autotune.capture.program import Meta, Read, View, reads

_CHOICES: dict[Any, Callable[..., Any]] = {}
"""Callables by op and kinds of arguments."""


class Bindings:
    """Callables for the ops of one program. `metas` describe its values by id."""

    def __init__(self, metas: Sequence[Meta | None]) -> None:
        self._metas = metas

    def bind(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """Return the callable to use for `target`; often `target` itself.

        `args` and `kwargs` are those of a call: `Read` and `View` stand for tensors.
        """
        if not _is_aten(target) or next(reads((args, kwargs)), None) is None:
            return target  # without a tensor the example would not run on the meta device
        try:
            kinds = (target, self._kind(args), self._kind(kwargs))
        except _UnknownError:
            return target
        if kinds not in _CHOICES:
            _CHOICES[kinds] = self._choose(target, args, kwargs)
        return _CHOICES[kinds]

    def _choose(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Callable[..., Any]:
        candidates = _candidates(target)
        if not candidates:
            return target
        with warnings.catch_warnings(), torch.no_grad(), _disable_current_modes():
            warnings.simplefilter("ignore")
            try:
                arguments, named = self.example(args), {key: self.example(part) for key, part in kwargs}
                expected = _dispatched(target, arguments, named)
                if len(expected) != 1:  # of several ops the later ones have arguments that cannot be compared
                    return target
            except Exception:  # noqa: BLE001 - a kernel without support for meta tensors raises anything
                return target
            for candidate in candidates:
                try:
                    if _are_equal(_dispatched(candidate, arguments, named), expected):
                        return candidate
                except Exception:  # noqa: BLE001 - the function may take other arguments
                    continue
        return target

    def _kind(self, argument: Any) -> Any:
        """Describe the properties of an argument that decide which overload a function dispatches."""
        match argument:
            case Read(value):
                meta = self._metas[value]
                if meta is None:
                    raise _UnknownError
                return (meta.dtype, meta.device.type, meta.shape == ())
            case View(target, args, _):
                source = next((self._kind(part) for part in args if isinstance(part, (Read, View))), None)
                if source is None or not (target is operator.getitem or _is_aten(target)):
                    raise _UnknownError
                # a view may have no dimension, and its dtype may be another: the op decides with these, too
                return ("view", target, len(args), source)
            case tuple() | list():
                return (type(argument), *map(self._kind, argument))
            case _:
                return type(argument)

    def example(self, argument: Any) -> Any:
        """Return a tensor without memory for an argument, with its shape, strides and dtype."""
        match argument:
            case Read(value):
                meta = self._metas[value]
                assert meta is not None
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            case View(target, args, kwargs):
                return target(*self.example(args), **{key: self.example(part) for key, part in kwargs})
            case tuple() | list():
                return type(argument)(map(self.example, argument))
            case _:
                return argument


class _UnknownError(Exception):
    """An argument is neither a constant nor a tensor of known shape and dtype."""


def _is_aten(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _candidates(target: torch._ops.OpOverload) -> list[Callable[..., Any]]:
    """Return the functions and methods in C++ that have the op's name; those in Python may do more."""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return []
    name = target._schema.name.partition("::")[2]
    homes = (torch._C._VariableFunctions, torch.Tensor, torch._C._nn)
    functions: list[Any] = [getattr(home, name, None) for home in homes]
    return [
        function
        for function in functions
        if type(function).__name__ in ("builtin_function_or_method", "method_descriptor")
    ]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dispatched(function: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[Any, Any, Any]]:
    """Return the ops that a call dispatches, with their arguments."""
    recorder = _Recorder()
    with recorder:
        function(*args, **kwargs)
    return recorder.calls


def _are_equal(calls: Any, expected: Any) -> bool:
    """Compare two lists of calls: constants by type and value, tensors by identity."""
    leaves, spec = pytree.tree_flatten(calls)
    others, other_spec = pytree.tree_flatten(expected)
    return bool(spec == other_spec) and all(
        leaf is other or (not isinstance(leaf, torch.Tensor) and type(leaf) is type(other) and leaf == other)
        for leaf, other in zip(leaves, others, strict=True)
    )
