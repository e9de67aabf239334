"""Copy an optimizer onto other parameters, with all that it holds, so that a trial step leaves the user's own untouched.

`copy.deepcopy` does not serve: `Optimizer.__getstate__` drops every attribute beyond groups and state, such as an inner
optimizer, and the copy would hold the memory of all parameters once more.
"""

import copy
import enum
import functools
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with callbacks of the user's, which a trial step must not call."""
MOST_OBJECTS = 200_000
"""Objects that an optimizer may hold; one that refers to a whole trainer is not copied."""
_HEAP_TYPE = 1 << 9
"""Flag of a class that a `class` statement made."""
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.ModuleType, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, weakref.ref,
)  # fmt: skip


_CHANGEABLE = (torch.Tensor, torch.Generator, torch.optim.Optimizer, dict, list, set)


class CannotCopyError(Exception):
    """An optimizer that holds something of which no copy can be made."""


class Copier:
    """Copies that share nothing which a step can change.

    `images` maps the id of a parameter to the parameter that stands for it; every other tensor is copied by `tensor`.
    """

    def __init__(self, images: dict[int, torch.Tensor], tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._memo: dict[int, Any] = dict(images)
        self._tensor = tensor
        self._alive: list[Any] = []  # an id is an object's own for as long as the object lives

    def copied(self, thing: Any) -> Any:
        """Return the copy of anything that an optimizer may hold; CannotCopyError names the type of what has none."""
        if isinstance(thing, _ATOMS) or _is_stateless_function(thing):
            return thing
        if id(thing) in self._memo:
            return self._memo[id(thing)]
        if len(self._alive) > MOST_OBJECTS:
            raise CannotCopyError(f"it holds more than {MOST_OBJECTS:,} objects")
        self._alive.append(thing)
        return self._made(thing)

    def _made(self, thing: Any) -> Any:
        made: Any
        match thing:
            case torch.Tensor():
                made = self._remember(thing, self._tensor(thing))
            case torch.Generator():
                made = self._remember(thing, thing.clone_state())
            case torch.optim.Optimizer():
                made = self._remember(thing, object.__new__(type(thing)))
                vars(made).update(self._attributes(thing))
            case dict():
                made = self._remember(thing, _empty_like(thing))
                made.update((self.copied(key), self.copied(part)) for key, part in thing.items())
            case list() | set():
                made = self._remember(thing, type(thing)())
                (made.extend if isinstance(thing, list) else made.update)([self.copied(part) for part in thing])
            case tuple() | frozenset():
                parts = [self.copied(part) for part in thing]
                made = self._remember(thing, type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts))
            case types.MethodType():
                made = self._remember(thing, types.MethodType(thing.__func__, self.copied(thing.__self__)))
            case functools.partial():
                parts = self.copied((thing.func, thing.args, thing.keywords))
                made = self._remember(thing, functools.partial(parts[0], *parts[1], **parts[2]))
            case _ if _is_plain(thing):
                made = self._remember(thing, object.__new__(type(thing)))
                for key, part in _fields(thing):
                    object.__setattr__(made, key, self.copied(part))
            case _:
                made = self._remember(thing, _deep_copy(thing, self._memo))
        return made

    def _remember(self, thing: Any, made: Any) -> Any:
        self._memo[id(thing)] = made
        return made

    def _attributes(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return copies of an optimizer's attributes, past its properties and without its hooks."""
        held = {key: part for key, part in vars(optimizer).items() if key not in HOOKS}
        if not step_is_replaced(optimizer):
            held.pop("step", None)  # a scheduler's wrapper, which refers to the user's own
        made = {key: self.copied(part) for key, part in held.items()}
        return made | {key: {} for key in HOOKS if key in vars(optimizer)}


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has a `step` of its own other than its class's or a scheduler's wrapper of that."""
    own = vars(optimizer).get("step")
    if own is None:
        return False
    inner = getattr(own, "__wrapped__", None) if hasattr(own, "_wrapped_by_lr_sched") else own
    return getattr(inner, "__func__", inner) is not type(optimizer).step


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the class's `step` without torch's wrapper, which runs hooks and marks a range for the profiler."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def reached(thing: Any) -> Iterator[torch.Tensor | torch.optim.Optimizer]:
    """Walk all tensors and optimizers that an optimizer holds, itself first; a module's own are left out."""
    return (held for held in holders(thing) if isinstance(held, (torch.Tensor, torch.optim.Optimizer)))


def holders(thing: Any) -> Iterator[Any]:
    """Walk every object within an optimizer that a step may change, itself first; a module's own are left out."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting and len(seen) <= MOST_OBJECTS:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, (*_ATOMS, torch.nn.Module)):
            continue
        seen.add(id(current))
        if isinstance(current, _CHANGEABLE) or _is_plain(current):
            yield current
        waiting.extend(reversed(_parts(current)))


def _parts(thing: Any) -> list[Any]:
    match thing:
        case torch.Tensor():
            return []
        case dict():
            return [part for pair in thing.items() for part in pair]
        case list() | set() | tuple() | frozenset():
            return list(thing)
        case types.MethodType():
            return [thing.__self__]
        case torch.optim.Optimizer():
            return [part for key, part in vars(thing).items() if key not in HOOKS]
        case _ if _is_plain(thing):
            return [part for _, part in _fields(thing)]
    return []


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one holds beside itself, as a wrapper does."""
    return [
        other for other in reached(optimizer) if isinstance(other, torch.optim.Optimizer) and other is not optimizer
    ]


def owned_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer or one within it updates, each once, in the order of the groups."""
    return parameters_of([optimizer, *inner_optimizers(optimizer)])


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters in the groups of several optimizers, each once, in the order of the groups."""
    found = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return list(found.values())


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set every `.grad` to None; a wrapper's own `zero_grad` may know no `set_to_none`."""
    for parameter in owned_parameters(optimizer):
        parameter.grad = None


def held_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return one tensor for each storage that an optimizer holds beside its parameters and their gradients."""
    owned = owned_parameters(optimizer)
    theirs = [*owned, *(p.grad for p in owned if p.grad is not None)]
    seen = {tensor.untyped_storage()._cdata for tensor in theirs}
    found = []
    for tensor in reached(optimizer):
        if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()._cdata) not in seen:
            seen.add(storage)
            found.append(tensor)
    return found


def fingerprint(thing: Any, names: dict[int, str]) -> Any:
    """Return something comparable that differs where a step changed `thing`; `names` stand for parameters by id."""
    return _printed(thing, names, set())


def _printed(thing: Any, names: dict[int, str], above: set[int]) -> Any:
    if id(thing) in names:
        return names[id(thing)]
    if isinstance(thing, _ATOMS) or id(thing) in above:
        return repr(thing) if isinstance(thing, (int, float, complex, str, bytes, type(None))) else type(thing).__name__
    above = above | {id(thing)}
    match thing:
        case torch.Tensor():
            return "tensor", tuple(thing.shape), str(thing.dtype), _bits(thing)
        case torch.Generator():
            return "generator", _bits(thing.get_state())
        case dict():
            return "dict", [(_printed(k, names, above), _printed(part, names, above)) for k, part in thing.items()]
        case list() | tuple():
            return type(thing).__name__, [_printed(part, names, above) for part in thing]
        case set() | frozenset():
            return "set", sorted(map(repr, (_printed(part, names, above) for part in thing)))
        case _ if callable(getattr(thing, "getstate", None)):  # random.Random
            return type(thing).__name__, repr(thing.getstate())
        case _ if _is_plain(thing):
            return type(thing).__name__, [(key, _printed(part, names, above)) for key, part in _fields(thing)]
    return type(thing).__name__, repr(getattr(thing, "__reduce__", str)()) if _is_array(thing) else ""


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _is_array(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "numpy"


def _is_stateless_function(thing: Any) -> bool:
    """Return whether calling it can change nothing that it holds; a closure over anything but numbers may."""
    match thing:
        case types.BuiltinFunctionType():
            return thing.__self__ is None or isinstance(thing.__self__, types.ModuleType)
        case types.FunctionType():
            return all(
                isinstance(cell.cell_contents, (*_ATOMS, types.FunctionType)) for cell in thing.__closure__ or ()
            )
    return False


def _is_plain(thing: Any) -> bool:
    """Return whether it is an object of a Python class whose attributes are all of it."""
    kind: Any = type(thing)
    defined_in_python = bool(kind.__flags__ & _HEAP_TYPE)
    same = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__"))
    return defined_in_python and same and not hasattr(kind, "__deepcopy__") and not _is_array(thing)


def _fields(thing: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)]
    return [*getattr(thing, "__dict__", {}).items(), *((name, getattr(thing, name)) for name in slots)]


def _slots(kind: type) -> list[str]:
    found = kind.__dict__.get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _empty_like(thing: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(thing, defaultdict):
        return defaultdict(thing.default_factory)
    made: dict[Any, Any] = type(thing).__new__(type(thing))
    return made


def _deep_copy(thing: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(thing, memo)
    except Exception as error:
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        raise CannotCopyError(f"it holds a {kind}, which cannot be copied") from error


def random_states() -> list[Any]:
    """Return the states of the generators that a step may draw from: torch's on the CPU, Python's and numpy's."""
    import random

    found: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        found.append(repr(sys.modules["numpy"].random.get_state()))
    return found
