"""A small net with dropout and batch norm, its batches, and its state."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def net() -> nn.Module:
    """Return a classifier of 16 numbers, whose step draws random numbers and changes buffers."""
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 8),
    )


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a pair of inputs and labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int = 5, rows: int = 8, seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of inputs and labels."""
    source = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 16, generator=source), torch.randint(8, (rows,), generator=source)) for _ in range(count)
    ]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def state(model: nn.Module, *optimizers: Any) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, gradients that are left, and the optimizers' state."""
    yield from (part.detach().clone() for part in model.state_dict().values())
    yield from (part.grad.clone() for part in model.parameters() if part.grad is not None)
    for optimizer in optimizers:  # a plan may update in another order, in which state comes into being
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            parts = optimizer.state.get(parameter, {})
            yield from (part.clone() for part in parts.values() if isinstance(part, torch.Tensor))


def train(
    loss_of: Callable[[Any], Any], optimizer: Any, data: list[Any], between: Callable[[int], Any] | None = None
) -> Iterator[torch.Tensor]:
    """Run the usual loop with a loss; call `between` before each step."""
    for number, batch in enumerate(data):
        if between is not None:
            between(number)
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def run(
    step: Callable[[Any], Any], data: list[Any], between: Callable[[int], Any] | None = None
) -> Iterator[torch.Tensor]:
    """Run the loop of a step; call `between` before each one."""
    for number, batch in enumerate(data):
        if between is not None:
            between(number)
        result = step(batch)
        yield result[0] if isinstance(result, tuple) else result
