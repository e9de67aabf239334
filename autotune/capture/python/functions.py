"""Find the function objects behind the frames of a recorded run, and the names that their code reads."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from autotune.capture.python.code_facts import is_internal, is_own, is_recordable
from autotune.capture.python.state_places import CONTAINERS, MISSING, Place


class Functions:
    """Functions that a recorded run may call, and the code that it has run."""

    def __init__(self) -> None:
        self._known: dict[types.CodeType, list[types.FunctionType]] = {}
        self._codes: set[types.CodeType] = set()
        self._closures: set[tuple[types.CodeType, tuple[int, ...]]] = set()
        self._keep: list[Any] = []  # ids stay unique while the objects live

    def __contains__(self, code: types.CodeType) -> bool:
        return code in self._known

    def add(self, function: types.FunctionType) -> None:
        """Remember a function that the step can reach."""
        known = self._known.setdefault(function.__code__, [])
        if function not in known:
            known.append(function)

    def is_new(self, frame: Any) -> bool:
        """Remember the frame's code, and return whether its function starts for the first time.

        Functions with the same code differ if their closures hold other objects. Code of torch, numpy, Python and autotune is
        never new.
        """
        code = frame.f_code
        is_first = code not in self._codes
        self._codes.add(code)
        if is_internal(code.co_filename):
            return False
        if not (free := free_names(code)):
            return is_first
        values = [frame.f_locals.get(name) for name in free]
        closure = code, tuple(map(id, values))
        if closure in self._closures:
            return False
        self._closures.add(closure)
        self._keep.append(values)
        return True

    def find(self, frame: Any) -> list[types.FunctionType]:
        """Return the functions passed to `add` that have the frame's code and closure values.

        The list is empty for a function that the step itself defines, because nothing adds it.
        """
        return [function for function in self._known.get(frame.f_code, []) if _has_cells(function, frame)]

    def attribute_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return two sets: all names in the run's code that may be attributes, and those that an object may lack.

        The second set is part of the first. It has the strings in code that names `getattr` or `hasattr`. Code of torch, numpy,
        Python and autotune is left out.
        """
        names, optional = set[str](), set[str]()
        for code in self._codes:
            if is_internal(code.co_filename):
                continue
            names.update(code.co_names)
            if {"getattr", "hasattr"} & set(code.co_names):
                optional.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
        return frozenset(names | optional), frozenset(optional)


class Unreported:
    """Objects that report no reads of their attributes: each `SimpleNamespace`, and the user's own classes and modules.

    Their attributes count as read where the step's code names them.
    """

    def __init__(self) -> None:
        self._namespaces: list[tuple[types.SimpleNamespace, str, dict[str, Any]]] = []
        self._scopes: dict[Any, dict[str, Any]] = {}

    def add_namespace(self, space: types.SimpleNamespace, name: str) -> None:
        """Remember a namespace and its attributes before the step."""
        self._namespaces.append((space, name, dict(vars(space))))

    def add_scope(self, scope: Any) -> list[tuple[str, Any]]:
        """Remember a class with its bases, or a module; return the objects in those that are new and the user's own."""
        objects: list[tuple[str, Any]] = []
        for each in scope.__mro__ if isinstance(scope, type) else (scope,):
            module = each.__module__ if isinstance(each, type) else each.__name__
            if is_own(module) and each not in self._scopes:
                self._scopes[each] = dict(vars(each))
                objects += [(key, part) for key, part in self._scopes[each].items() if not _is_member(part)]
        return objects

    def find_reads(self, names: frozenset[str], optional: frozenset[str]) -> Iterator[tuple[Place, Any, Any]]:
        """Return the attributes that are read, each with its values before and after the step; `optional` may be missing."""
        for space, name, before in self._namespaces:
            after = dict(vars(space))
            keys = {*before, *after} if names & {"vars", "__dict__"} else names & {*before, *after} | optional
            for key in sorted(keys):
                place = Place(space, key, "attribute", f"{name}.{key}", "")
                yield place, before.get(key, MISSING), after.get(key, MISSING)
        for scope, before in self._scopes.items():
            for key in sorted(names & before.keys()):
                if not _is_member(before[key]):
                    place = Place(scope, key, "attribute", f"{scope.__name__}.{key}", "")
                    yield place, before[key], vars(scope).get(key, MISSING)


FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)
"""Types of functions whose code, or that of the function that they wrap, is Python's."""
METHODS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
"""Types of functions that a class has as its members."""


def _is_member(part: Any) -> bool:
    return isinstance(part, (*METHODS, type, types.ModuleType)) or hasattr(part, "__get__")


def original_method(kind: type, name: str) -> Callable[..., Any]:
    """Return a class's method, without recorders of its bases."""
    members = (vars(base)[name] for base in kind.__mro__ if name in vars(base))
    method: Callable[..., Any] = next(member for member in members if not hasattr(member, "recorder"))
    return method


def stateful_defaults(function: types.FunctionType) -> list[str]:
    """Return the attributes of a function whose default values may change: those with containers or objects."""
    defaults = {
        "__defaults__": function.__defaults__ or (),
        "__kwdefaults__": (function.__kwdefaults__ or {}).values(),
    }
    return [
        key
        for key, parts in defaults.items()
        if any(isinstance(part, CONTAINERS) or is_recordable(type(part)) for part in parts)
    ]


def wrapped_functions(function: Any) -> list[Any]:
    """Return the functions that another one wraps: those of its `__wrapped__`, and in the closure of a library's wrapper."""
    candidates = [getattr(function, "__wrapped__", None)]
    if isinstance(function, types.FunctionType) and is_internal(function.__code__.co_filename):
        candidates += [_content(cell) for cell in function.__closure__ or ()]
    return [each for each in candidates if isinstance(each, (types.FunctionType, types.MethodType))]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def free_names(code: types.CodeType) -> list[str]:
    """Return the variables that code reads from the closure of its function."""
    return [name for name in code.co_freevars if name != "__class__"]


def _has_cells(function: types.FunctionType, frame: Any) -> bool:
    """Return whether the function's closure holds the values that the frame sees."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            return False
        if name in frame.f_locals and frame.f_locals[name] is not value:
            return False
    return True
