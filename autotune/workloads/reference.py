"""References to workloads, by name and arguments."""

import importlib.machinery
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest

LIVE_SUFFIX = ".live"
"""Suffix of a file with the saved objects of a running process, by which references name it."""
ZOO_NAMES = (
    "resnet18", "resnet50", "resnet152", "mobilenet_v2", "segformer", "vit", "gpt2", "bert", "lstm", "lstm_fused",
)  # fmt: skip
"""Names in `autotune.workloads.zoo.ZOO`, whose import takes a second."""


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """Reference from which a workload can be created again, in any process.

    >>> str(WorkloadRef("resnet18", {"batch": 4}))
    'resnet18(batch=4)'
    """

    reference: str
    """Zoo name, `package.module:factory`, `path/file.py:factory`, or `NAME.live` for saved objects of a process."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.reference}({arguments})"


def check_reference(reference: str) -> None:
    """Check that the file or the zoo workload of a reference exists; nothing is imported.

    Raises:
        ConfigError: It does not exist, or the text is no reference.

    >>> check_reference("resnet18")
    """
    if reference.endswith(LIVE_SUFFIX):
        return
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        if reference not in ZOO_NAMES:
            raise ConfigError(f"{reference}: {_explain_unknown_name(reference)}")
    elif not place or not attribute:
        raise ConfigError(
            f"{reference}: not a reference; write a zoo name, package.module:factory or path/file.py:factory"
        )
    elif place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(
            f"{reference}: no such file in {Path.cwd()}; give the path of the file that holds the factory"
        )


def _explain_unknown_name(name: str) -> str:
    if name.endswith(".py"):
        return f"names no factory; write {name}:FUNCTION"
    package, dot, attribute = name.rpartition(".")
    if dot:
        return f"no zoo workload; for a factory of your own write {package}:{attribute}"
    return f"no zoo workload{nearest(name, ZOO_NAMES)}"


def lies_here(reference: str) -> bool:
    """Return whether a reference names code of the zoo or below the working directory; nothing is imported.

    >>> lies_here("resnet18"), lies_here("os:system")
    (True, False)
    """
    if reference.endswith(LIVE_SUFFIX):  # code of anywhere is among the saved objects
        return False
    place, colon, _ = reference.rpartition(":")
    if not colon:
        return True
    if place.endswith(".py"):
        return Path(place).resolve().is_relative_to(Path.cwd())
    # only the working directory is searched, so an installed package is none of it
    spec = importlib.machinery.PathFinder.find_spec(place.partition(".")[0], [str(Path.cwd())])
    if spec is None or place.partition(".")[0] in sys.stdlib_module_names:
        return False
    locations = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return all(Path(location).resolve().is_relative_to(Path.cwd()) for location in locations)


def name_factory(factory: Callable[..., Any]) -> str:
    """Return the reference by which a child process can call the same factory.

    A function of a package is named `package.module:function`, any other `path/file.py:function`, relative to the
    working directory where it lies below that. Raises ConfigError for a function that a fresh process cannot import: a
    lambda, a function defined inside another, a function of a notebook or an interactive session.
    """
    function = inspect.unwrap(factory)
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None or not name:
        raise ConfigError(
            f"a workload cannot be made from a {type(factory).__name__}: child processes import it by name; "
            "give a function that returns autotune.Workload, or a reference such as 'file.py:factory'"
        )
    remedy = (
        "child processes import it by name; put it into a file as a plain function, then name it: 'file.py:factory'"
    )
    if "<lambda>" in name:
        raise ConfigError(f"a workload cannot be made from a lambda: {remedy}")
    if "<locals>" in name:
        raise ConfigError(f"a workload cannot be made from {name}, which is defined inside a function: {remedy}")
    path = Path(code.co_filename)
    if not path.is_file():
        raise ConfigError(
            f"a workload cannot be made from {name}, which is defined in a notebook or an interactive session: {remedy}"
        )
    module = _package_module(function.__module__)
    if module:
        return f"{module}:{name}"
    path = path.resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _package_module(module: str) -> str:
    """Return the importable name of a module in a package; empty for a module that is a file by itself."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    name = spec.name if spec is not None else ""
    return name if "." in name else ""
