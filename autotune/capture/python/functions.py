"""Find the functions behind the frames of a recorded run, and the attributes that their code reads of classes and modules."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from autotune.capture.python.code_facts import imported_modules, is_installed, is_internal, is_own, is_recordable
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

    def attribute_names(self, *, own: bool = False) -> tuple[frozenset[str], frozenset[str]]:
        """Return two sets: all names in the run's code that may be attributes, and those that an object may lack.

        The second set is part of the first. It has the strings in code that names `getattr` or `hasattr`. Code of torch, numpy,
        Python and autotune is left out; with `own` that of installed packages, too.
        """
        names, optional = set[str](), set[str]()
        for code in self._codes:
            if is_internal(code.co_filename) or (own and is_installed(code.co_filename)):
                continue
            names.update(code.co_names)
            if {"getattr", "hasattr"} & set(code.co_names):
                optional.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
        return frozenset(names | optional), frozenset(optional)


class Unreported:
    """Objects that report no reads of their attributes: each `SimpleNamespace`, and the user's own classes and modules.

    Their attributes count as read where the step's code names them: those of an imported module, where the code of the function
    does that imports it.
    """

    def __init__(self) -> None:
        self._namespaces: list[tuple[types.SimpleNamespace, str, dict[str, Any]]] = []
        self._scopes: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Classes and modules, each with its attributes before the step."""
        self._named: dict[int, set[str]] = {}
        """Names by which functions read the modules that they import."""
        self._late: list[tuple[str, tuple[str, ...]]] = []
        """Modules that were not imported before the step, each with the names in the code that imports it."""

    def add_namespace(self, space: types.SimpleNamespace, name: str) -> None:
        """Remember a namespace and its attributes before the step."""
        self._namespaces.append((space, name, dict(vars(space))))

    def add_imports(self, code: types.CodeType, scope: dict[str, Any]) -> list[tuple[Any, str, Any]]:
        """Remember the modules that a function imports; return the parts of them that it names, each with its owner."""
        parts: list[tuple[Any, str, Any]] = []
        for module in imported_modules(code, str(scope.get("__package__") or "")):
            if isinstance(sys.modules.get(module), types.ModuleType):
                parts += self.add_scope(sys.modules[module], code.co_names)
            elif module not in sys.modules:
                self._late.append((module, code.co_names))
        return parts

    def add_scope(self, scope: Any, names: tuple[str, ...] | None = None) -> list[tuple[Any, str, Any]]:
        """Remember a class or a module of the user's own, and the classes in it; return its other parts the first time.

        `names` are those that are read of an imported module; by default any name in the step's code may be.
        """
        if not is_own(scope.__module__ if isinstance(scope, type) else scope.__name__):
            return []
        is_new = id(scope) not in self._scopes
        _, attributes = self._scopes.setdefault(id(scope), (scope, dict(vars(scope))))
        if names is None:
            keys = set(attributes) if is_new else set()
        else:
            keys = set(names) & attributes.keys() - self._named.get(id(scope), set())
            self._named.setdefault(id(scope), set()).update(keys)
        parts: list[tuple[Any, str, Any]] = []
        for key in sorted(keys):
            part = attributes[key]
            if isinstance(part, type):
                parts += self.add_scope(part)
            elif isinstance(part, types.ModuleType):
                parts += [] if names is None else self.add_scope(part, names)
            elif not _is_member(part):
                parts.append((scope, key, part))
        for base in scope.__mro__[1:] if isinstance(scope, type) else ():
            parts += self.add_scope(base)
        return parts

    def find_reads(self, functions: Functions) -> Iterator[tuple[Place, Any, Any]]:
        """Return the attributes that are read, each with its values before and after the step."""
        names, optional = functions.attribute_names()
        for space, name, before in self._namespaces:
            after = dict(vars(space))
            keys = {*before, *after} if names & {"vars", "__dict__"} else names & {*before, *after} | optional
            for key in sorted(keys):
                place = Place(space, key, "attribute", f"{name}.{key}", "")
                yield place, before.get(key, MISSING), after.get(key, MISSING)
        for module, read in self._late:
            if isinstance(sys.modules.get(module), types.ModuleType):
                self.add_scope(sys.modules[module], read)
        names, optional = functions.attribute_names(own=True)
        for scope, before in list(self._scopes.values()):
            inherited = {key: part for base in _own_bases(scope) for key, part in vars(base).items()}
            keys = self._named.get(id(scope), names & {*before, *inherited} | optional)
            for key in sorted(keys):
                value = before.get(key, inherited.get(key, MISSING))
                if not _is_member(value):
                    place = Place(scope, key, "attribute", f"{scope.__name__}.{key}", "")
                    yield place, value, vars(scope).get(key, MISSING) if key in before else value


def _own_bases(scope: Any) -> list[type]:
    """Return the user's own bases of a class, the nearest last; none of a module."""
    bases = reversed(scope.__mro__[1:]) if isinstance(scope, type) else ()
    return [base for base in bases if is_own(base.__module__)]


FUNCTIONS = (types.FunctionType, functools._lru_cache_wrapper)
"""Types of functions whose code, or that of the function that they wrap, is Python's."""
METHODS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
"""Types of functions that a class has as its members."""


def _is_member(part: Any) -> bool:
    return isinstance(part, (*METHODS, type, types.ModuleType)) or hasattr(type(part), "__get__")


def cached_properties(kind: type) -> set[str]:
    """Return the names of a class's cached properties, whose values go into an object's dictionary without `__setattr__`."""
    return {
        name for name, _ in inspect.getmembers_static(kind, lambda each: isinstance(each, functools.cached_property))
    }


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
