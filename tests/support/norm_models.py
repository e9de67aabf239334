"""Random small nets of batch norms and activations whose gradients jump, drawn from a seed."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autotune.workloads.workload import Workload

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)
"""Activations whose gradient jumps."""
CLASSES = 5


class Block(nn.Module):
    """A convolution with batch norm and activation, in some blocks added to its input."""

    def __init__(self, inside: int, width: int, activation: nn.Module, *, adds: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, width, 3, padding=1, bias=False)
        self.norm, self.activation, self.adds = nn.BatchNorm2d(width), activation, adds

    def forward(self, data: Tensor) -> Tensor:
        result = self.norm(self.conv(data))
        return self.activation(result + data if self.adds else result)


def draw_norm_net(seed: int, batch: int = 4, size: int = 16) -> Workload:
    """Return a step of a net of 2 to 4 blocks; ReLU is every second activation."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    width = 3
    for _ in range(choice.randint(2, 4)):
        wider = choice.choice([4, 8, 16])
        activation = nn.ReLU() if choice.random() < 0.5 else choice.choice(ACTIVATIONS)()
        layers.append(Block(width, wider, activation, adds=False))
        layers.append(Block(wider, wider, nn.ReLU(), adds=True))
        if choice.random() < 0.3:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        width = wider
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Workload(
        model, cross_entropy, optimizer, (torch.randn(batch, 3, size, size), torch.randint(CLASSES, (batch,)))
    )


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of logits and labels."""
    return F.cross_entropy(model(batch[0]), batch[1])
