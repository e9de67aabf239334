"""What every ready workload is put together with: seeded draws, casts, an optimizer, and checks of the arguments."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from autotune.errors import ConfigError
from autotune.workloads.memory_format import convert_batch, convert_model
from autotune.workloads.workload import LossFn, Workload

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
OptimizerName = Literal["sgd", "adamw"]
MemoryFormat = Literal["contiguous", "channels_last"]
T = TypeVar("T")

Drawn = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]
"""A model and its batch, fresh from the seeded generator: float32, on the CPU."""


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
    """Draw model and batch, cast and move their floating parts, and give the model an optimizer."""
    cast = _one_of(dtype, "dtype", _DTYPES)
    layout = _one_of(memory_format, "memory_format", {"contiguous": "", "channels_last": "channels_last"})
    place = _device(device)
    make = _one_of(optimizer, "optimizer", _OPTIMIZERS)
    with seeded(seed):
        model, batch = draw()
    model = model.to(device=place, dtype=cast).train()
    parts = tuple(part.to(place, cast if part.is_floating_point() else None) for part in batch)
    if layout:
        convert_model(model, None, layout)
        parts = convert_batch(parts, layout)
    return Workload(model, loss_fn, make(model.parameters()), parts)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the CPU's generator as if it were fresh; the caller's own draws go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would seed every GPU's generator too
        torch.default_generator.manual_seed(seed)
        yield


def transformers() -> Any:
    """The transformers library, which comes with the zoo extra."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"this workload's model comes from transformers ({error}): pip install autotune[zoo]"
        ) from error


def at_least(low: int, **arguments: int | None) -> None:
    """Refuse a number below `low` by its name; None stands for a default."""
    for name, value in arguments.items():
        if value is not None and value < low:
            raise ConfigError(f"{name} must be at least {low} (got {value})")


def share(**arguments: float) -> None:
    """Refuse a probability outside 0 to 1 by its name."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1 (got {value})")


def heads(width: int) -> int:
    """Attention heads of 64 channels; a width below 128 is one head."""
    if width < 128:
        return 1
    if width % 64:
        raise ConfigError(
            f"width must be a multiple of 64, or below 128 for one head (got {width}): try {width // 64 * 64}"
        )
    return width // 64


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; write cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch finds no such GPU here; leave device out to use the CPU")
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


def _one_of(value: str, name: str, known: dict[str, T]) -> T:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; known: {', '.join(known)}")
    return known[value]
