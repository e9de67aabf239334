"""Read facts about the code of a module's methods: the arguments and the gradients that it may read."""

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from autotune.capture.python.code_facts import is_library, is_own

_HARMLESS = frozenset(
    [
        "no_grad",
        "enable_grad",
        "set_grad_enabled",
        "is_grad_enabled",
        "requires_grad",
        "requires_grad_",
        "gradient_checkpointing",
    ]
)
"""Names with `grad` in them whose use neither reads nor keeps a gradient."""
_MOST_FUNCTIONS = 256
"""Number of functions whose code is read before a method counts as one that may read gradients."""


def may_read(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function, or a decorator around it, may read an argument that is passed by its name.

    False if their code never loads it, which is common for `batch_idx`. A decorator may pass its `**kwargs` on.
    """
    return any(_loads(getattr(layer, "__code__", None), name) for layer in _layers(function))


def may_read_gradients(module: torch.nn.Module, *names: str) -> bool:
    """Return whether methods of a module's class may read or keep gradients. True where code cannot be read.

    They may where their code, or that of a function of the user's which it names, has a name with `grad` in it.
    Such a function is a method of the module or a submodule, a global, a part of a module, or a closure's variable.
    """
    root = type(module).__module__.partition(".")[0]
    kinds = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)
    scopes = [vars(kind) for kind in kinds if _is_of_the_user(kind, root)]
    pending: list[Any] = [getattr(type(module), name) for name in names]
    visited: set[Any] = set()
    while pending:
        for layer in _layers(pending.pop()):
            code = getattr(layer, "__code__", None)
            if code is None or len(visited) > _MOST_FUNCTIONS:
                return True
            if layer in visited:
                continue
            visited.add(layer)
            words = {"forward", *_words(code)}  # a call of a module names no method
            if any("grad" in word.lower() for word in words - _HARMLESS):
                return True
            pending += [part for part in _named_functions(layer, words, scopes) if _is_of_the_user(part, root)]
    return False


def _layers(function: Any) -> list[Any]:
    """Return a function and those that it wraps, the outermost first."""
    layers = [function]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(wrapped)
    return layers


def _loads(code: CodeType | None, name: str) -> bool:
    """Return whether code may read an argument; False where it only passes the `**kwargs` on that may contain it."""
    if code is None or "locals" in code.co_names:
        return True
    names, rest, options = inspect.getargs(code)
    is_option = options is not None and name not in (*names, rest, options)
    variable = options if is_option else name
    return any(
        "LOAD" in step.opname
        and (step.argval == variable or (isinstance(step.argval, tuple) and variable in step.argval))
        and not (is_option and following.opname == "DICT_MERGE")
        for step, following in itertools.pairwise(dis.get_instructions(code))
    )


def _words(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes, globals and a closure's variables in code, and texts that may be such names."""
    yield from (*code.co_names, *code.co_freevars)
    pending: list[Any] = list(code.co_consts)
    while pending:
        match pending.pop():
            case CodeType() as inner:
                yield from _words(inner)
            case str(text) if text.isidentifier():
                yield text
            case tuple() | frozenset() as parts:
                pending += parts


def _named_functions(function: Any, words: set[str], scopes: Sequence[Mapping[str, Any]]) -> Iterator[FunctionType]:
    """Yield the functions that words name in the scopes of classes, in a function's globals and in modules.

    The functions in a function's closure are among them.
    """
    names = getattr(function, "__globals__", {})
    modules = [vars(module) for module in _named_modules(words, names)]
    parts = [scope[word] for scope in (*scopes, names, *modules) for word in words & scope.keys()]
    for part in (*parts, *_cell_contents(function)):
        if (helper := _function_in(part)) is not None:
            yield helper


def _named_modules(words: set[str], names: Mapping[str, Any]) -> list[ModuleType]:
    """Return the modules that words name: globals, modules that a function imports, and modules within these."""
    modules: dict[str, ModuleType] = {}
    pending: list[Any] = [part for word in words for part in (names.get(word), sys.modules.get(word))]
    while pending:
        part = pending.pop()
        if isinstance(part, ModuleType) and part.__name__ not in modules and not is_library(part.__name__):
            modules[part.__name__] = part
            pending += [vars(part)[word] for word in words & vars(part).keys()]
    return list(modules.values())


def _cell_contents(function: Any) -> Iterator[Any]:
    """Yield the values of the variables that a function reads from its closure."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _function_in(part: Any) -> FunctionType | None:
    """Return the Python function in a member of a class or a module; None where there is none."""
    match part:
        case FunctionType():
            return part
        case staticmethod() | classmethod() | MethodType():
            return _function_in(part.__func__)
        case property():
            return _function_in(part.fget)
        case functools.partial() | functools.cached_property():
            return _function_in(part.func)
        case functools._lru_cache_wrapper():
            return _function_in(part.__wrapped__)
    return None


def _is_of_the_user(part: Any, root: str) -> bool:
    """Return whether the user's package, or another one of the user's, defines a class or a function."""
    module = str(part.__module__)
    return is_own(module) or (module.partition(".")[0] == root and not is_library(module))
