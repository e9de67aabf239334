"""A small workload of plain torch: layers whose activations dominate the step's memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune import Workload


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def factory(rows: int = 8192) -> Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(rows, 128), torch.randint(10, (rows,))
    return Workload(model, loss_fn, optimizer, batch)
