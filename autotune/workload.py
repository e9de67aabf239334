"""What is to be trained: a model, a batch, a loss, an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LossFn = Callable[[torch.nn.Module, Any], Any]
"""`loss_fn(model, batch)`: the loss, or the loss and extras."""


@dataclass
class Workload:
    """One training step's parts; without loss and optimizer one inference step.

    `batch` is a tensor, or a tuple, list or dict of tensors. For inference `model(batch)` is called, with a tuple's
    parts as arguments and a dict's as keyword arguments.
    """

    model: torch.nn.Module
    loss_fn: LossFn | None = None
    optimizer: torch.optim.Optimizer | None = None
    batch: Any = None
