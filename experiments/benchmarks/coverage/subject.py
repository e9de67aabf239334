"""One model of the coverage suite: how to make its training step, and the batches of its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotune.workloads.workload import LossFn, Workload

Optimizer = Callable[[Any], torch.optim.Optimizer]
"""Function from parameters to their optimizer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its loss, its optimizer and its batches.

    `make_model` runs with a fixed seed, so that two calls make twins.
    """

    name: str
    what: str
    """Model and feature in some words."""
    make_model: Callable[[], torch.nn.Module]
    draw: Callable[[torch.Generator], Any]
    """Function from a generator to the batch of one step."""
    loss_fn: LossFn
    optimizer: Optimizer
    follows_data: bool = False
    """The shapes or the branches of the step depend on the numbers in the batch, the weights or the generator."""
    library: str = ""
    """Package that the model comes from; empty for plain torch."""

    def batch(self, number: int) -> Any:
        """Return the batch of a step; equal numbers give equal batches."""
        return self.draw(torch.Generator().manual_seed(1000 + number))

    def workload(self) -> Workload:
        """Return a new twin of the step, with the first batch. The generator stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make_model()
            model.train()
        return Workload(model, self.loss_fn, self.optimizer(model.parameters()), self.batch(0))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW for the parameters that are trained."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum for the parameters that are trained."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.01, momentum=0.9)


def library_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that the model itself computes from its keyword arguments."""
    loss: torch.Tensor = model(**batch).loss
    return loss
