"""A small model for benchmarks that only test their command."""

import torch

from autotune import Workload


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the outputs."""
    output: torch.Tensor = model(batch)
    return output.square().mean()


def make(rows: int = 2048) -> Workload:
    """Return six layers whose activations need more memory than their parameters."""
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Workload(model, compute_loss, optimizer, torch.randn(rows, 256))
