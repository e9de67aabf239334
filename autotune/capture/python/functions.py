"""Find the function objects behind the frames of a recorded run, and the names that their code reads."""

import types
from typing import Any

from autotune.capture.python.code_facts import is_internal


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
