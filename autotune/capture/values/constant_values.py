"""Follow the values of tensors that a step makes from Python constants alone, such as a causal mask."""

import re
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

MOST_ELEMENTS = 2**22
"""Largest number of elements of a tensor whose value is followed."""
READERS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "equal", "is_nonzero", "allclose")
"""Functions that return a tensor's value to Python."""
DRAWS = re.compile(r"rand|dropout|bernoulli|multinomial|normal|exponential|uniform|poisson|cauchy|geometric|empty")
"""Names of functions whose results differ in each step."""
_UNKNOWN = object()


_IN_PLACE = re.compile(
    r".*[^_]_|__(i(add|sub|mul|truediv|floordiv|div|mod|pow|and|or|xor|lshift|rshift)|set|setitem)__"
)


_WITH_STATISTICS = ("batch_norm", "instance_norm", "native_batch_norm", "fused_moving_avg_obs_fake_quant")
"""Names of functions that change statistics among their arguments."""


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes a tensor in place."""
    return bool(_IN_PLACE.fullmatch(name) or name in _WITH_STATISTICS or "out" in kwargs or kwargs.get("inplace"))


def written(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call in place may change."""
    parts = (args, kwargs) if name in _WITH_STATISTICS else (args[:1], kwargs.get("out"))
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


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
        is_write = writes(name, kwargs)
        if is_write and (arguments is None or DRAWS.search(name)):
            for tensor in written(name, args, kwargs):
                self._forget(tensor)
        if arguments is None or DRAWS.search(name):
            return
        if not is_write and not isinstance(result, torch.Tensor):
            return
        if isinstance(result, torch.Tensor) and (result.numel() > MOST_ELEMENTS or result.requires_grad):
            return
        try:
            with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                value = function(*arguments[0], **arguments[1])
        except Exception:  # noqa: BLE001 - a call that fails on values has no value to follow
            return
        if isinstance(result, torch.Tensor) and isinstance(value, torch.Tensor):
            self._values[id(result)] = value
            self._keep.append(result)  # its id stays unique

    def _known_arguments(self, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [self._values.get(id(leaf), _UNKNOWN) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(value is _UNKNOWN for value in values):
            return None
        return pytree.tree_unflatten(values, spec)

    def _forget(self, written: torch.Tensor) -> None:
        """Forget the values in the memory of a tensor that the step overwrites with unknown ones."""
        value = self._values.get(id(written))
        if value is not None:
            storage = value.untyped_storage()._cdata
            self._values = {
                key: other for key, other in self._values.items() if other.untyped_storage()._cdata != storage
            }
