"""Take a batch apart into tensors and constants, and rebuild it: nested containers, mappings, dataclasses, numpy arrays."""

import dis
import functools
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch

Build = Callable[[Any, Any], Any]
"""Function that rebuilds a batch from its tensors and its constants."""


@dataclass(frozen=True, slots=True)
class Node:
    """Part of a batch's structure. Equal structures are rebuilt alike."""

    kind: Literal["tensor", "array", "constant", "sequence", "mapping", "items", "object"]
    container: Any = None
    """Class of a container."""
    keys: tuple[Any, ...] = ()
    """Keys of a mapping, attributes of an object."""
    children: tuple["Node", ...] = ()
    factory: Any = field(default=None, compare=False)
    """Function of a defaultdict that makes missing items."""
    factory_code: Any = None
    """Code of `factory`; the function itself where it also has a closure or defaults."""


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch in parts."""

    structure: Node
    tensors: list[torch.Tensor]
    """Tensors of the batch; those of numpy arrays share their memory."""
    constants: list[Any]
    """Parts without tensors, such as numbers, strings and None."""

    def names(self) -> tuple[list[str], list[str]]:
        """Return the user's expressions for the tensors and for the constants, such as `batch['x'][0]`."""
        tensors: list[str] = []
        constants: list[str] = []
        for node, name in _leaves(self.structure, "batch"):
            (constants if node.kind == "constant" else tensors).append(name)
        return tensors, constants


def flatten_batch(batch: Any, *, list_as_tuple: bool = False) -> FlatBatch:
    """Return the parts of a batch.

    Tuples, lists, dicts, other mappings, dataclasses and objects with tensors among their attributes are containers.
    Everything else is a constant, as is a container without tensors. `list_as_tuple`: treat a list as a tuple.

    >>> flat = flatten_batch({"x": torch.ones(2), "name": "a.png"})
    >>> len(flat.tensors), flat.constants, flat.names()
    (1, ['a.png'], (["batch['x']"], ["batch['name']"]))
    """
    tensors: list[torch.Tensor] = []
    constants: list[Any] = []
    structure = _flatten(tuple(batch) if list_as_tuple and type(batch) is list else batch, tensors, constants, set())
    return FlatBatch(structure, tensors, constants)


def tensor_names(structure: Node) -> list[str]:
    """Return the user's expressions for the tensors of a batch."""
    return [name for node, name in _leaves(structure, "batch") if node.kind != "constant"]


def structure_difference(structure: Node, other: Node, name: str = "batch") -> str:
    """Return in words the first part in which two structures differ; empty if they are equal."""
    if structure == other:
        return ""
    if structure.kind != other.kind or structure.container is not other.container:
        return f"{name} is {_describe(structure)}, not {_describe(other)}"
    if structure.keys != other.keys or len(structure.children) != len(other.children):
        absent = [key for key in other.keys if key not in structure.keys]
        added = [key for key in structure.keys if key not in other.keys]
        if absent or added:
            return f"{name} has no {absent[0]!r}" if absent else f"{name} has {added[0]!r}, too"
        if structure.keys != other.keys:
            return f"{name} has its keys in another order"
        return f"{name} has {len(structure.children)} parts, not {len(other.children)}"
    if structure.factory_code != other.factory_code:
        return f"{name} makes its missing items by another function"
    parts = zip(structure.children, other.children, _child_names(structure, name), strict=True)
    return next(filter(None, (structure_difference(part, before, inner) for part, before, inner in parts)))


def _describe(node: Node) -> str:
    words = {"tensor": "a tensor", "array": "a numpy array", "constant": "no tensor"}
    return words.get(node.kind) or f"a {node.container.__name__}"


def map_batch(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch of the same structure with a function applied to each tensor.

    >>> map_batch(torch.neg, (torch.ones(1), "a"))
    (tensor([-1.]), 'a')
    """
    flat = flatten_batch(batch)
    return make_build(flat.structure)(list(map(function, flat.tensors)), flat.constants)


def rebuild_batch(batch: Any) -> Any:
    """Return a batch of the same tensors in containers of its own, for a loss function that takes parts out of them.

    A container without tensors stays the same one.
    """
    return map_batch(lambda tensor: tensor, batch)


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, in order; those of numpy arrays share their memory."""
    return flatten_batch(batch).tensors


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor: of a slice of a data set, those of the slice.

    >>> span_bytes(torch.zeros(1000, 4)[:8])
    128
    """
    if not tensor.numel():
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span * tensor.itemsize


def spans_of_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes that the tensors of a batch span of each storage, by the storage's identity."""
    spans: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        spans[storage._cdata] = min(storage.nbytes(), spans.get(storage._cdata, 0) + span_bytes(tensor))
    return spans


def _flatten(part: Any, tensors: list[torch.Tensor], constants: list[Any], outer: set[int]) -> Node:
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return _TENSOR
    if isinstance(part, np.ndarray) and part.dtype.kind in "biufc" and (array := _shared(part)) is not None:
        tensors.append(array)
        return _ARRAY
    shape = None if id(part) in outer else _open(part)
    if shape is not None:
        kind, keys, children = shape
        before = len(tensors), len(constants)
        outer.add(id(part))
        nodes = tuple([_flatten(child, tensors, constants, outer) for child in children])
        outer.discard(id(part))
        if len(tensors) > before[0]:
            factory = getattr(part, "default_factory", None) if kind == "mapping" else None
            return Node(kind, type(part), keys, nodes, factory, _code_of(factory))
        del constants[before[1] :]
    constants.append(part)
    return _CONSTANT


def _code_of(factory: Any) -> Any:
    """Return a function's code, which all functions of one `lambda` share; with a closure or defaults the function itself."""
    if isinstance(factory, types.FunctionType) and not (factory.__closure__ or factory.__defaults__):
        return factory.__code__
    return factory


_TENSOR, _ARRAY, _CONSTANT = Node("tensor"), Node("array"), Node("constant")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, range, type, types.ModuleType)
"""Types of constants that are never searched for tensors."""


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return an array's memory as a tensor; None for a layout or a byte order that torch does not support."""
    try:
        return torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        return None


def _open(part: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Return kind, keys and children of a container; None for anything else."""
    if isinstance(part, _PLAIN) or callable(part):
        return None
    if isinstance(part, (tuple, list)):
        return "sequence", (), part
    if isinstance(part, dict):
        return ("mapping" if type(part) in _DICTS else "items"), tuple(part), part.values()
    attributes = _attributes(part)
    return ("object", tuple(attributes), attributes.values()) if attributes else None


_DICTS = (dict, OrderedDict, defaultdict)


def _attributes(part: Any) -> dict[str, Any]:
    """Return the attributes of an object that can be made again without its `__init__`, by name; else nothing."""
    kind = type(part)
    if isinstance(part, torch.nn.Module) or not (
        getattr(kind, "__new__", None) is object.__new__ or isinstance(part, _OBJECTS)
    ):
        return {}
    slots: dict[str, Any] = {name: getattr(part, name) for name in _slots(kind) if hasattr(part, name)}
    return slots | getattr(part, "__dict__", {})


_OBJECTS = (Mapping, types.SimpleNamespace)


def _slots(kind: Any) -> tuple[str, ...]:
    slots: list[str] = []
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        slots += (names,) if isinstance(names, str) else names
    return tuple(name for name in slots if not name.startswith("__"))


def _leaves(node: Node, name: str) -> Iterator[tuple[Node, str]]:
    if node.kind in ("tensor", "array", "constant"):
        yield node, name
    for child, inner in zip(node.children, _child_names(node, name), strict=True):
        yield from _leaves(child, inner)


def _child_names(node: Node, name: str) -> list[str]:
    if node.kind == "object":
        # users read the items of a UserDict, such as a BatchEncoding, as those of a dictionary
        data = "data" if issubclass(node.container, UserDict) else None
        return [name if key == data else f"{name}.{key}" for key in node.keys]
    fields = getattr(node.container, "_fields", None) if node.kind == "sequence" else None
    if fields:
        return [f"{name}.{field}" for field in fields]
    return [f"{name}[{key!r}]" for key in (node.keys or range(len(node.children)))]


@lru_cache(maxsize=256)
def make_build(structure: Node) -> Build:
    """Return the function that rebuilds a batch of a structure; its code has no branch, so that a tracer reads each part once."""
    scope: dict[str, Any] = {"fill": _fill}
    counts = {"tensor": 0, "constant": 0}
    source = f"def build(tensors, constants):\n    return {_source(structure, scope, counts)}\n"
    exec(compile(source, "<batch>", "exec"), scope)
    build: Build = scope["build"]
    return build


def _source(node: Node, scope: dict[str, Any], counts: dict[str, int]) -> str:
    """Return the expression that rebuilds a part of a batch."""
    match node.kind:
        case "tensor" | "array":
            counts["tensor"] += 1
            return f"tensors[{counts['tensor'] - 1}]" + (".numpy()" if node.kind == "array" else "")
        case "constant":
            counts["constant"] += 1
            return f"constants[{counts['constant'] - 1}]"
    parts = [_source(child, scope, counts) for child in node.children]
    if node.kind == "sequence":
        return _sequence_source(node, parts, scope)
    if node.kind == "object":
        return _object_source(node, parts, scope)
    keys = [repr(key) if type(key) in (str, int) else _name(scope, key) for key in node.keys]
    items = "{" + ", ".join(f"{key}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
    if node.container is dict:
        return items
    kind = _name(scope, node.container)
    match node.kind:
        case "mapping" if node.container is defaultdict:
            return f"{kind}({_name(scope, node.factory)}, {items})"
        case "items" if all(type(key) is str for key in node.keys):
            return f"{kind}(**{items})"
    return f"{kind}({items})"


def _sequence_source(node: Node, parts: list[str], scope: dict[str, Any]) -> str:
    joined = ", ".join(parts)
    if node.container is list:
        return f"[{joined}]"
    if node.container is tuple:
        return f"({joined},)"
    kind = _name(scope, node.container)
    return f"{kind}({joined})" if hasattr(node.container, "_fields") else f"{kind}([{joined}])"


def _object_source(node: Node, parts: list[str], scope: dict[str, Any]) -> str:
    slots = _slots(node.container)
    in_slots: list[str] = []
    in_dict: list[str] = []
    for key, part in zip(node.keys, parts, strict=True):
        (in_slots if key in slots else in_dict).append(f"{key!r}: {part}")
    return f"fill({_name(scope, node.container)}, {{{', '.join(in_slots)}}}, {{{', '.join(in_dict)}}})"


def _name(scope: dict[str, Any], value: Any) -> str:
    name = f"value_{len(scope)}"
    scope[name] = value
    return name


def _fill(kind: Any, slots: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return an object with these attributes, whose `__init__` does not run again.

    A tracer passes on what an update of `__dict__` stores, but reads what a slot or `setattr` stores.
    """
    filled = kind.__new__(kind)
    for name, value in slots.items():
        object.__setattr__(filled, name, value)
    if attributes:
        filled.__dict__.update(attributes)
    return filled


def ignores_list_type(loss_fn: Any) -> bool:
    """Return whether a loss function cannot distinguish a batch that is a list from a tuple.

    It cannot where it only unpacks the batch, or reads its items; nothing is assumed where the batch is passed on.
    """
    if loss_fn is None:
        return True  # the parts are the model's arguments
    while isinstance(loss_fn, functools.partial) and not loss_fn.keywords:
        if loss_fn.args:
            return False
        loss_fn = loss_fn.func
    code = getattr(loss_fn, "__code__", None)
    return isinstance(code, types.CodeType) and _only_unpacks(code, 2 if hasattr(loss_fn, "__self__") else 1)


@lru_cache(maxsize=256)
def _only_unpacks(code: types.CodeType, position: int) -> bool:
    if code.co_argcount <= position:
        return False
    batch = code.co_varnames[position]
    instructions = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "RESUME", "NOP")]
    if batch in code.co_cellvars:
        return False
    for step, following, third in zip(
        instructions, [*instructions[1:], None], [*instructions[2:], None, None], strict=False
    ):
        if "FAST" not in step.opname:
            continue
        if isinstance(step.argval, tuple) and batch in step.argval:  # Python 3.13 loads two variables at once
            return False
        if step.argval != batch:
            continue
        unpacked = following is not None and following.opname == "UNPACK_SEQUENCE"
        indexed = (
            following is not None
            and following.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
            and isinstance(following.argval, int)
            and third is not None
            and (third.opname == "BINARY_SUBSCR" or third.argrepr == "[]")
        )
        if not (
            step.opname in ("LOAD_FAST", "LOAD_FAST_BORROW") and (unpacked or indexed)
        ):  # the second since Python 3.14
            return False
    return True
