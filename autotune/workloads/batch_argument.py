"""Find the argument of a workload's factory that sets the batch size."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest
from autotune.workloads.factory import find_factory
from autotune.workloads.reference import LIVE_SUFFIX

USUAL_NAMES = ("batch", "batch_size", "micro_batch_size", "per_device_batch_size", "per_device_train_batch_size", "bs")
"""Names of the argument to look for, in this order."""


@dataclass(frozen=True, slots=True)
class BatchArgument:
    """Argument of a factory that sets the batch size, and its present value."""

    name: str
    size: int
    """Batch size of the workload as its config describes it."""


def find_batch_argument(reference: str, arguments: Mapping[str, Any], name: str | None = None) -> BatchArgument:
    """Return the argument of a factory that sets the batch size.

    Args:
        reference: Reference of the factory.
        arguments: Arguments of the config; one that it leaves out has the factory's default.
        name: Name of the argument; by default the first of `USUAL_NAMES` that the factory takes.

    Raises:
        ConfigError: The factory does not exist, takes no such argument, or the present value is no positive integer.

    >>> find_batch_argument("resnet18", {})
    BatchArgument(name='batch', size=10)
    >>> find_batch_argument("resnet18", {"batch": 4}).size
    4
    """
    if reference.endswith(LIVE_SUFFIX):
        raise ConfigError(
            f"{reference}: the batch of a running training process cannot be changed; write a factory with an argument "
            "for the batch size, then: autotune tune file.py:factory"
        )
    with contextlib.chdir(Path.cwd()):  # a file may change the working directory as it is imported
        parameters = _named_parameters(find_factory(reference))
    name = name or next((usual for usual in USUAL_NAMES if usual in parameters), None)
    if name is None:
        raise ConfigError(
            f"{reference}: no argument of the factory sets the batch size (looked for {', '.join(USUAL_NAMES)}; it takes "
            f"{', '.join(parameters) or 'none'}); give it one, or name it with --batch-argument NAME"
        )
    if name not in parameters:
        raise ConfigError(f"{reference}: takes no batch argument {name!r}{nearest(name, parameters)}")
    size = arguments.get(name, parameters[name].default)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        value = "has no default" if size is inspect.Parameter.empty else f"is {size!r}"
        raise ConfigError(f"{reference}: {name} {value}, not a batch size; give it with --set {name}=8")
    return BatchArgument(name, size)


def _named_parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(factory).parameters
    except (ValueError, TypeError):  # a builtin without a signature
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}
