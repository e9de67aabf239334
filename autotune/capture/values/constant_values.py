"""Follow the values of tensors that a step makes from Python constants alone, such as a causal mask."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

MOST_ELEMENTS = 2**22
"""Largest number of elements of a tensor whose value is followed."""
READERS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "equal", "is_nonzero", "allclose")
"""Functions that return a tensor's value to Python."""
DRAWS = re.compile(
    r"rand|dropout|bernoulli|multinomial|normal(?!iz)|exponential|uniform|poisson|cauchy|geometric|empty|dirichlet|standard_gamma"
    r"|binomial"
)
"""Names of functions whose results differ in each step."""
_UNKNOWN = object()

_OPERATORS = r"i(add|sub|mul|matmul|truediv|floordiv|div|mod|pow|and|or|xor|lshift|rshift|concat)|setitem"
_IN_PLACE = re.compile(rf".*[^_]_|({_OPERATORS})|__({_OPERATORS}|set)__")
"""Names of methods and functions that change a tensor, those of `operator` included."""

WITH_STATISTICS = ("batch_norm", "instance_norm", "native_batch_norm", "fused_moving_avg_obs_fake_quant")
"""Names of functions that change statistics among their arguments."""


def writes(name: str, kwargs: Mapping[str, Any], function: Any = None, args: Sequence[Any] = ()) -> bool:
    """Return whether a call changes a tensor in place; `function` and `args` show an `inplace` that has no name in the call."""
    if (schema := schema_of(function)) is not None and schema.is_mutable:
        return True
    is_named = _IN_PLACE.fullmatch(name) or name in WITH_STATISTICS or "out" in kwargs or kwargs.get("inplace")
    return bool(is_named) or (any(argument is True for argument in args) and _passes_inplace(function, args, kwargs))


def _passes_inplace(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        return bool(inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):  # a kernel in C++ has no signature, and no such argument
        return False


def without_draws(compute: Callable[[], Any]) -> Any:
    """Return what a call computes; raise ValueError for one that draws from torch's generator, which stays as it was."""
    generator = torch.default_generator
    before = generator.get_state()
    value = compute()
    if not torch.equal(before, generator.get_state()):
        generator.set_state(before)
        raise ValueError("the call draws random numbers")
    return value


def written(name: str, args: Any, kwargs: Mapping[str, Any], function: Any = None) -> list[torch.Tensor]:
    """Return the tensors that a call in place may change."""
    parts: Any = (args, kwargs) if name in WITH_STATISTICS else (args[:1], kwargs.get("out"))
    if (schema := schema_of(function)) is not None and schema.is_mutable:
        parts = written_arguments(schema, args, kwargs)
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


def written_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an op changes according to its schema."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def schema_of(function: Any) -> Any:
    """Return the schema of an op that is called by its full name, such as `torch.ops.aten.neg_.default`; None for others."""
    packet: Any = function if isinstance(function, torch._ops.OpOverloadPacket) else None
    if packet is not None and packet.overloads() == ["default"]:
        function = packet.default
    return function._schema if isinstance(function, torch._ops.OpOverload) else None


def share_memory(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of a trace lie in one storage; False where that cannot be told."""
    try:
        with torch._C.DisableTorchFunction():
            return bool(first.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return False


class ConstantValues:
    """Values of the tensors that depend on constants alone. A fake tensor has none of its own."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor; None if it is unknown."""
        return self._values.get(id(tensor))

    def read(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what a reader of known values returns, in a tuple; None where a value is unknown."""
        if getattr(function, "__name__", "") not in READERS:
            return None
        arguments = self._known_arguments(args, kwargs)
        if arguments is None:
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return (function(*arguments[0], **arguments[1]),)

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the value of a call's result, if those of its arguments are known."""
        name = getattr(function, "__name__", "")
        arguments = self._known_arguments(args, kwargs)
        is_write = writes(name, kwargs, function, args)
        if is_write and (arguments is None or DRAWS.search(name)):
            for tensor in written(name, args, kwargs, function):
                self._forget(tensor)
        if arguments is None or DRAWS.search(name):
            return
        leaves = pytree.tree_leaves(result)
        parts = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if (not is_write and not parts) or any(part.numel() > MOST_ELEMENTS or part.requires_grad for part in parts):
            return
        try:
            with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                value = without_draws(lambda: function(*arguments[0], **arguments[1]))
        except Exception:  # noqa: BLE001 - a call that fails on values has no value to follow
            for tensor in written(name, args, kwargs, function) if is_write else ():  # it may have begun to write
                self._forget(tensor)
            return
        for leaf, content in zip(leaves, pytree.tree_leaves(value), strict=False):
            if isinstance(leaf, torch.Tensor) and isinstance(content, torch.Tensor):
                self._values[id(leaf)] = content
                self._keep.append(leaf)  # its id stays unique

    def _known_arguments(self, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [self._values.get(id(leaf), _UNKNOWN) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(value is _UNKNOWN for value in values):
            return None
        return pytree.tree_unflatten(values, spec)

    def _forget(self, written: torch.Tensor) -> None:
        """Forget the values in the memory of a tensor that the step overwrites with unknown ones."""
        # a view that unknown values have shaped has no value of its own
        same = (
            [written] if id(written) in self._values else [kept for kept in self._keep if share_memory(kept, written)]
        )
        storages = {self._values[id(each)].untyped_storage()._cdata for each in same if id(each) in self._values}
        if storages:
            self._values = {
                key: other for key, other in self._values.items() if other.untyped_storage()._cdata not in storages
            }
