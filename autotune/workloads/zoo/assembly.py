"""Shared parts of the zoo's factories: seeded draws, casts, optimizers, and checks of arguments."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from autotune.errors import ConfigError, install_command
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.workload import LossFn, Workload

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
OptimizerName = Literal["sgd", "adamw"]
MemoryFormat = Literal["contiguous", "channels_last"]
T = TypeVar("T")

Drawn = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]
"""Model and batch, drawn from the seeded generator in float32 on the CPU."""


def assemble(
    draw: Callable[[], Drawn],
    loss_fn: LossFn,
    *,
    dtype: Dtype,
    optimizer: OptimizerName,
    seed: int,
    device: str,
    memory_format: MemoryFormat = "contiguous",
) -> Workload:
    """Return a workload: a drawn model and batch, cast and moved, with an optimizer.

    Raises:
        ConfigError: An argument has no such option, or the device does not exist.
    """
    cast = _choose(dtype, "dtype", _DTYPES)
    layout = _choose(memory_format, "memory_format", {"contiguous": "", "channels_last": "channels_last"})
    target = _parse_device(device)
    create_optimizer = _choose(optimizer, "optimizer", _OPTIMIZERS)
    with seeded(seed):
        model, batch = draw()
    model = model.to(device=target, dtype=cast).train()
    parts = tuple(part.to(target, cast if part.is_floating_point() else None) for part in batch)
    if layout:
        convert_model(model, None, layout)
        parts = convert_batch(parts, layout)
    return Workload(model, loss_fn, create_optimizer(model.parameters()), parts)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator within the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would seed every GPU's generator too
        torch.default_generator.manual_seed(seed)
        yield


def import_transformers() -> Any:
    """Return the transformers library, which the zoo extra installs."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"this workload's model comes from transformers ({error}); {install_command('zoo')}"
        ) from error


def require_at_least(low: int, **arguments: int | None) -> None:
    """Refuse arguments below `low`; None means the default."""
    for name, value in arguments.items():
        if value is not None and value < low:
            raise ConfigError(f"{name} must be at least {low} (got {value})")


def require_probability(**arguments: float) -> None:
    """Refuse arguments outside [0, 1)."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1 (got {value})")


def count_heads(width: int) -> int:
    """Return the number of attention heads of 64 channels; one head for a width below 128."""
    if width < 128:
        return 1
    if width % 64:
        raise ConfigError(
            f"width must be a multiple of 64, or below 128 for one head (got {width}); try {width // 64 * 64}"
        )
    return width // 64


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; write cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no such GPU; omit device to use the CPU")
    return device


def _sgd(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_OPTIMIZERS: dict[str, Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
}


def _choose(value: str, name: str, options: dict[str, T]) -> T:
    if value not in options:
        raise ConfigError(f"{name} {value!r} is unknown; known: {', '.join(options)}")
    return options[value]
