"""Copy an optimizer with its whole state onto other parameters, so that a trial step leaves the user's optimizer untouched.

`copy.deepcopy` does not suffice: `Optimizer.__getstate__` drops every attribute beyond groups and state, such as an inner
optimizer, and the copy would allocate the memory of all parameters a second time.
"""

import copy
import enum
import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with callbacks of the user's, which a trial step must not call."""
GLOBAL_HOOKS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
"""Callbacks of `register_optimizer_step_pre_hook` and `register_optimizer_step_post_hook`, which every step calls."""
MAX_OBJECTS = 200_000
"""Maximum number of objects in an optimizer that is copied; an optimizer that refers to a whole trainer is not."""
HEAP_TYPE = 1 << 9
"""Flag of a class that a `class` statement created."""
ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.ModuleType, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, weakref.ref,
)  # fmt: skip
"""Types of objects that a step cannot change; a copy shares them."""
_MUTABLE = (torch.Tensor, torch.Generator, torch.optim.Optimizer, dict, list, set)


class CannotCopyError(Exception):
    """An optimizer refers to an object that cannot be copied."""


class Copier:
    """Make copies that share nothing which a step can change.

    `images` maps the id of a parameter to the parameter that replaces it; `copy_tensor` copies every other tensor.
    """

    def __init__(self, images: dict[int, torch.Tensor], copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._memo: dict[int, Any] = dict(images)
        self._copy_tensor = copy_tensor
        self._originals: list[Any] = []  # an id is unique only as long as its object lives

    def copy(self, original: Any) -> Any:
        """Return a copy of an optimizer or of anything that it refers to.

        Raises:
            CannotCopyError: names the type of an object that cannot be copied.
        """
        if isinstance(original, ATOMS) or _is_stateless_function(original):
            return original
        if id(original) in self._memo:
            return self._memo[id(original)]
        if len(self._originals) > MAX_OBJECTS:
            raise CannotCopyError(f"it refers to more than {MAX_OBJECTS:,} objects")
        self._originals.append(original)
        return self._copy_object(original)

    def _copy_object(self, original: Any) -> Any:
        image: Any
        match original:
            case torch.Tensor():
                image = self._remember(original, self._copy_tensor(original))
            case torch.Generator():
                image = self._remember(original, original.clone_state())
            case torch.optim.Optimizer():
                image = self._remember(original, object.__new__(type(original)))
                vars(image).update(self._copy_attributes(original))
            case dict():
                image = self._remember(original, _empty_like(original))
                image.update((self.copy(key), self.copy(part)) for key, part in original.items())
            case list() | set():
                image = self._remember(original, type(original)())
                (image.extend if isinstance(original, list) else image.update)([self.copy(part) for part in original])
            case tuple() | frozenset():
                parts = [self.copy(part) for part in original]
                is_named = hasattr(original, "_fields")
                image = self._remember(original, type(original)(*parts) if is_named else type(original)(parts))
            case types.MethodType():
                image = self._remember(original, types.MethodType(original.__func__, self.copy(original.__self__)))
            case functools.partial():
                parts = self.copy((original.func, original.args, original.keywords))
                image = self._remember(original, functools.partial(parts[0], *parts[1], **parts[2]))
            case _ if is_plain(original):
                image = self._remember(original, object.__new__(type(original)))
                for key, part in object_fields(original):
                    object.__setattr__(image, key, self.copy(part))
            case _:
                image = self._remember(original, _deep_copy(original, self._memo))
        return image

    def _remember(self, original: Any, image: Any) -> Any:
        self._memo[id(original)] = image
        return image

    def _copy_attributes(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Copy the attributes in an optimizer's dictionary, which properties may hide, but none of its hooks."""
        attributes = {key: part for key, part in vars(optimizer).items() if key not in HOOKS}
        if not step_is_replaced(optimizer):
            attributes.pop("step", None)  # a scheduler's wrapper, which refers to the user's optimizer
        images = {key: self.copy(part) for key, part in attributes.items()}
        return images | {key: {} for key in HOOKS if key in vars(optimizer)}


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the object's `step` is neither that of its class nor a scheduler's wrapper of that."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    inner = getattr(step, "__wrapped__", None) if hasattr(step, "_wrapped_by_lr_sched") else step
    return getattr(inner, "__func__", inner) is not type(optimizer).step


def get_replaced_step(optimizer: torch.optim.Optimizer | None) -> object:
    """Return the function that replaces the object's `step`; None where it is that of the class."""
    return vars(optimizer)["step"] if optimizer is not None and step_is_replaced(optimizer) else None


def get_unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the class's `step` without torch's wrapper, which runs hooks and marks a range for the profiler."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def iter_tensors_and_optimizers(root: Any) -> Iterator[torch.Tensor | torch.optim.Optimizer]:
    """Yield all tensors and optimizers that an optimizer refers to, itself first; modules are not searched."""
    return (item for item in iter_mutable_objects(root) if isinstance(item, (torch.Tensor, torch.optim.Optimizer)))


def iter_mutable_objects(root: Any) -> Iterator[Any]:
    """Yield every object within an optimizer that a step may change, itself first; modules are not searched."""
    visited: set[int] = set()
    waiting = [root]
    while waiting and len(visited) <= MAX_OBJECTS:
        current = waiting.pop()
        if id(current) in visited or isinstance(current, (*ATOMS, torch.nn.Module)):
            continue
        visited.add(id(current))
        if isinstance(current, _MUTABLE) or is_plain(current):
            yield current
        waiting.extend(reversed(_parts(current)))


def _parts(item: Any) -> list[Any]:
    match item:
        case torch.Tensor():
            return []
        case dict():
            return [part for pair in item.items() for part in pair]
        case list() | set() | tuple() | frozenset():
            return list(item)
        case types.MethodType():
            return [item.__self__]
        case torch.optim.Optimizer():
            return [part for key, part in vars(item).items() if key not in HOOKS]
        case _ if is_plain(item):
            return [part for _, part in object_fields(item)]
    return []


def find_inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the other optimizers that an optimizer refers to, as a wrapper does."""
    return [
        other
        for other in iter_tensors_and_optimizers(optimizer)
        if isinstance(other, torch.optim.Optimizer) and other is not optimizer
    ]


def collect_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer or one within it updates, each once, in the order of the groups."""
    return collect_group_parameters([optimizer, *find_inner_optimizers(optimizer)])


def collect_group_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters in the groups of several optimizers, each once, in the order of the groups."""
    by_id = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return list(by_id.values())


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set every `.grad` to None; the `zero_grad` of a wrapper may not support `set_to_none`."""
    for parameter in collect_parameters(optimizer):
        parameter.grad = None


def collect_state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return one tensor for each storage that an optimizer refers to, without parameters and their gradients."""
    parameters = collect_parameters(optimizer)
    excluded = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    storages = {tensor.untyped_storage()._cdata for tensor in excluded}
    tensors = []
    for tensor in iter_tensors_and_optimizers(optimizer):
        if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()._cdata) not in storages:
            storages.add(storage)
            tensors.append(tensor)
    return tensors


def is_array(item: Any) -> bool:
    """Return whether an object is of a class of numpy."""
    return type(item).__module__.partition(".")[0] == "numpy"


def is_plain(item: Any) -> bool:
    """Return whether an object is of a Python class and its attributes are its whole content."""
    kind: Any = type(item)
    is_python_class = bool(kind.__flags__ & HEAP_TYPE)
    is_default = all(
        getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__getstate__")
    )
    return is_python_class and is_default and not hasattr(kind, "__deepcopy__") and not is_array(item)


def object_fields(item: Any) -> list[tuple[str, Any]]:
    """Return the attributes and slots of a plain object, by name."""
    slots = [name for name in slot_names(item) if hasattr(item, name)]
    return [*getattr(item, "__dict__", {}).items(), *((name, getattr(item, name)) for name in slots)]


def slot_names(item: Any) -> list[str]:
    """Return the names in the `__slots__` of an object's classes."""
    return [name for kind in type(item).__mro__ for name in _slots(kind)]


def _is_stateless_function(item: Any) -> bool:
    """Return whether a call can change nothing that the function refers to; a closure over anything but atoms may."""
    match item:
        case types.BuiltinFunctionType():
            return item.__self__ is None or isinstance(item.__self__, types.ModuleType)
        case types.FunctionType():
            return all(isinstance(cell.cell_contents, (*ATOMS, types.FunctionType)) for cell in item.__closure__ or ())
    return False


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _empty_like(original: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(original, defaultdict):
        return defaultdict(original.default_factory)
    empty: dict[Any, Any] = type(original).__new__(type(original))
    return empty


def _deep_copy(original: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(original, memo)
    except Exception as error:
        kind = f"{type(original).__module__}.{type(original).__qualname__}"
        raise CannotCopyError(f"it refers to a {kind}, which cannot be copied") from error
