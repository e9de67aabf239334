"""Read facts about Python code: the globals that it reads, and whether it is the user's, a library's, or torch's."""

import contextlib
import dis
import importlib.util
import os
import sys
import sysconfig
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autotune.workloads.factory import format_location

_NAMESPACES = ("argparse", "collections", "configparser", "multiprocessing.sharedctypes")
"""Modules of Python whose objects hold settings of the user's."""
_STATE = ("torch.distributions", "torch.nn.modules", "torch.optim", "torch.utils.data.distributed")
"""Parts of torch whose objects have state that steps read."""


def is_recordable(kind: type) -> bool:
    """Return whether reads of a class's objects are recorded: classes of Python that are the user's or a library's."""
    if not kind.__flags__ & 1 << 9 or issubclass(kind, (type, torch.Tensor, BaseException)):
        return False
    module = getattr(kind, "__module__", None) or ""
    if issubclass(kind, nn.Module) or module.startswith(_STATE):
        return True
    return not is_library(module) or module.startswith(_NAMESPACES)


def is_library(module: str) -> bool:
    """Return whether a module's state is taken as constant."""
    root = module.partition(".")[0]
    return root in ("torch", "numpy", "autotune", "builtins", "__builtin__") or root in sys.stdlib_module_names - {
        "__main__"
    }


def is_own(module: str) -> bool:
    """Return whether a module is the user's own: neither taken as constant nor installed."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module in sys.modules and not is_library(module) and not is_installed(file)


@lru_cache(maxsize=16384)
def imported_modules(code: types.CodeType, package: str) -> tuple[str, ...]:
    """Return the full names of the modules that a function imports when it runs; `package` is that of its own module."""
    steps, names = list(dis.get_instructions(code)), []
    for position, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[position - 2].argval  # `from .. import name` has two
            with contextlib.suppress(ImportError, ValueError):
                dots = "." * level if isinstance(level, int) else ""
                names.append(importlib.util.resolve_name(dots + step.argval, package))
    return tuple(dict.fromkeys(names))


def is_installed(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return filename.startswith(_PACKAGES)


_INTERNAL = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent, Path(np.__file__).parent, Path(__file__).parents[2], sysconfig.get_path("stdlib"),
    )
)  # fmt: skip
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@lru_cache(maxsize=16384)
def is_internal(filename: str) -> bool:
    """Return whether a file is part of torch, numpy, Python or this package, whose globals are taken as constant."""
    if filename.startswith(_INTERNAL[:3]) or filename.startswith("<frozen"):
        return True
    return filename.startswith(_INTERNAL[3]) and not filename.startswith(_PACKAGES)


def is_state(name: str, frame: Any) -> bool:
    """Return whether an attribute that a frame reads is state; that of every object is so only where the user reads it."""
    if name == "__dict__":
        return not is_internal(frame.f_code.co_filename)
    return not name.startswith("__") and name != "_validate_args"  # which capture itself sets


def user_line(frame: Any) -> str:
    """Return the innermost line of the user's code below a frame; empty if there is none near."""
    for _ in range(64):
        if frame is None or (filename := frame.f_code.co_filename).startswith(_INTERNAL[2]):
            return ""  # outside of the step
        if not is_internal(filename) and not filename.startswith((*_PACKAGES, "<")):
            return format_location(filename, frame.f_lineno)
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def augmented_reads(code: types.CodeType) -> frozenset[tuple[int, str]]:
    """Return offset and name of each attribute that is read only to be increased in place by a constant or a local."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found = set()
    for position, step in enumerate(steps):
        if step.opname != "LOAD_ATTR" or not position or steps[position - 1].opname != "COPY":
            continue
        names = [following.opname for following in steps[position + 1 : position + 5]]
        simple = names[:1] and names[0] in ("LOAD_CONST", "LOAD_FAST") and names[1:3] == ["BINARY_OP", "SWAP"]
        if simple and names[3:] == ["STORE_ATTR"] and steps[position + 4].argval == step.argval:
            found.add((step.offset, step.argval))
    return frozenset(found)


@lru_cache(maxsize=16384)
def stored_globals(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function's code assigns."""
    return tuple(sorted({step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}))


@lru_cache(maxsize=16384)
def only_stored_cells(code: types.CodeType) -> frozenset[str]:
    """Return the variables of a closure that code assigns and does not read."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    stored = {name for operation, name in steps if operation == "STORE_DEREF"}
    return frozenset(
        stored - {name for operation, name in steps if operation.startswith("LOAD") and "DEREF" in operation}
    )


@lru_cache(maxsize=16384)
def global_chains(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the globals that a function's code reads, each with the attributes that follow."""
    chains = []
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    for position, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = []
            for following in steps[position + 1 : position + 5]:
                if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    break
                chain.append(following.argval)
            chains.append((step.argval, tuple(chain)))
    return tuple(dict.fromkeys(chains))
