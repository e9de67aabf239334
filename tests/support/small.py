"""Small workloads of plain torch, each with one feature that is hard to capture."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.workloads.workload import Workload

Batch = tuple[Tensor, Tensor]


def labelled_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(
    model: Callable[[], nn.Module],
    shape: tuple[int, ...] = (6, 8),
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss_fn: Callable[[nn.Module, Any], Any] = labelled_loss,
) -> Workload:
    """Return a workload of the model, drawn from a seed, with a batch of this shape and labels below 4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = model()
        batch = batch_of(*shape)
    return Workload(module, loss_fn, optimizer(module.parameters()), batch)


def batch_of(*shape: int, seed: int = 1) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=drawn), torch.randint(4, shape[:1], generator=drawn)


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def normalized() -> nn.Module:
    """Return two convolutions with BatchNorm, for images of 3 channels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Tied(nn.Module):
    """Model whose second and last layer share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(self.entry(inputs))))
