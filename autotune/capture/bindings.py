"""Call ATen ops through torch's functions and methods: they parse their arguments in half the time of `torch.ops`.

A function is taken only after it was seen to dispatch the very overload, with the very arguments, for tensors of the same
kind on the meta device. The choice depends on the arguments' types, dtypes and on which tensors are numbers, so it is made
once for each such combination.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autotune.capture.program import Meta, Read, View, reads

_KNOWN: dict[Any, Callable[..., Any]] = {}
"""The callable for each op and kind of arguments that was asked for."""


class Bindings:
    """Callables for the ops of one program. `metas` describe its values by id."""

    def __init__(self, metas: Sequence[Meta | None]) -> None:
        self._metas = metas

    def of(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """Return what to call instead of `target`, which may be `target` itself."""
        if not _is_aten(target) or next(reads((args, kwargs)), None) is None:
            return target  # without a tensor nothing leads the example to the meta device
        try:
            kinds = (target, self._kind(args), self._kind(kwargs))
        except _UnknownError:
            return target
        if kinds not in _KNOWN:
            _KNOWN[kinds] = self._choose(target, args, kwargs)
        return _KNOWN[kinds]

    def _choose(self, target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Callable[..., Any]:
        candidates = _candidates(target)
        if not candidates:
            return target
        with warnings.catch_warnings(), torch.no_grad(), _disable_current_modes():
            warnings.simplefilter("ignore")
            try:
                arguments, named = self._example(args), {key: self._example(part) for key, part in kwargs}
                expected = _dispatched(target, arguments, named)
                if len(expected) != 1:  # of several ops the later ones have arguments that cannot be compared
                    return target
            except Exception:  # noqa: BLE001 - a kernel without support for meta tensors raises anything
                return target
            for candidate in candidates:
                try:
                    if _same(_dispatched(candidate, arguments, named), expected):
                        return candidate
                except Exception:  # noqa: BLE001 - the function may take other arguments
                    continue
        return target

    def _kind(self, argument: Any) -> Any:
        """Describe an argument as far as it decides which overload a function dispatches."""
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

    def _example(self, argument: Any) -> Any:
        match argument:
            case Read(value):
                meta = self._metas[value]
                assert meta is not None
                return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            case View(target, args, kwargs):
                return target(*self._example(args), **{key: self._example(part) for key, part in kwargs})
            case tuple() | list():
                return type(argument)(map(self._example, argument))
            case _:
                return argument


class _UnknownError(Exception):
    """An argument is neither a tensor whose form is known nor a constant."""


def _is_aten(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"


def _candidates(target: torch._ops.OpOverload) -> list[Callable[..., Any]]:
    """List functions and methods implemented in C++ that have the op's name; those written in Python may do more."""
    if torch.Tag.nondeterministic_seeded in target.tags:
        return []
    name = target._schema.name.partition("::")[2]
    homes = (torch._C._VariableFunctions, torch.Tensor, torch._C._nn)
    found: list[Any] = [getattr(home, name, None) for home in homes]
    return [one for one in found if type(one).__name__ in ("builtin_function_or_method", "method_descriptor")]


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


def _same(calls: Any, expected: Any) -> bool:
    """Compare two lists of calls: constants by type and value, tensors by identity."""
    leaves, spec = pytree.tree_flatten(calls)
    others, other_spec = pytree.tree_flatten(expected)
    return bool(spec == other_spec) and all(
        one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and one == other)
        for one, other in zip(leaves, others, strict=True)
    )
