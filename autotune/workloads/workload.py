"""Workloads: a model with the batch, the loss and the optimizer of one training step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.errors import ConfigError
from autotune.workloads.loop import Loop

LossFn = Callable[[torch.nn.Module, Any], Any]
"""Signature of `loss_fn(model, batch)`, which returns the loss, or the loss and extras."""


@dataclass
class Workload:
    """Parts of one training step; without a loss and an optimizer, of one inference step.

    A loss without an optimizer is a step of gradients alone: forward and backward, and the loop updates.

    A factory returns a workload, so that every process can create the same step:

    >>> import torch
    >>> from autotune import Workload
    >>> def make(batch: int = 8) -> Workload:
    ...     model = torch.nn.Linear(4, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     return Workload(model, lambda model, inputs: model(inputs).sum(), optimizer, torch.ones(batch, 4))
    >>> make(batch=3).batch.shape
    torch.Size([3, 4])
    """

    model: torch.nn.Module
    """Model in the mode, dtype and device of the step."""
    loss_fn: LossFn | None = None
    """Function that runs the forward pass and returns the loss; None for inference."""
    optimizer: torch.optim.Optimizer | None = None
    """Optimizer over the model's parameters, or some of them; None for inference and for gradients alone."""
    batch: Any = None
    """A tensor or numpy array, or a container of them, with anything else beside them.

    Containers are tuples, lists, dicts, other mappings, dataclasses and objects with tensors among their attributes.
    For inference, the parts of a tuple or list are the model's arguments, and those of a mapping its keyword arguments.
    """
    loop: Loop = field(default_factory=Loop)
    """Work of the training loop between backward and the update. With `gradients` the optimizer is left out."""

    def __post_init__(self) -> None:
        if self.loop.gradients:
            self.optimizer = None


def infer(model: torch.nn.Module, batch: Any) -> Any:
    """Return the model's output for a batch: a tuple's parts are arguments, a mapping's items keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def select_loss(result: Any) -> Any:
    """Return the loss of a loss function's result: the result itself, or the first part of a tuple.

    Raises:
        ConfigError: The loss is no tensor of one number with a gradient, so its backward pass would fail.
    """
    loss = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(loss, torch.Tensor):
        part = "" if loss is result else "a tuple that begins with "
        raise ConfigError(
            f"loss_fn returned {part}{type(loss).__name__}; "
            "return the loss, a tensor with one number, or (loss, extras)"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"loss_fn returned a loss of shape {tuple(loss.shape)}; reduce it to one number, e.g. with .mean()"
        )
    if not loss.requires_grad:
        raise ConfigError(
            "loss_fn returned a loss that does not depend on the model's parameters; look for detach(), no_grad, or "
            "parameters that do not require a gradient"
        )
    return loss


def check_workload(workload: object, name: str) -> None:
    """Check that a factory's result is a complete workload.

    Args:
        workload: Result of the factory.
        name: Reference of the factory, the prefix of the error message.

    Raises:
        ConfigError: The result is no workload, or its parts do not fit together.
    """
    if not isinstance(workload, Workload):
        fix = "return autotune.Workload(model, loss_fn, optimizer, batch)"
        match workload:
            case torch.nn.Module():
                raise ConfigError(
                    f"{name} returned a bare model ({type(workload).__name__}) without batch and loss; {fix}"
                )
            case tuple():
                parts = ", ".join(type(part).__name__ for part in workload)
                raise ConfigError(f"{name} returned a tuple ({parts}); {fix}")
        raise ConfigError(f"{name} returned {'None' if workload is None else type(workload).__name__}; {fix}")
    if not isinstance(workload.model, torch.nn.Module):
        raise ConfigError(f"{name}: model is {type(workload.model).__name__}, not a torch.nn.Module")
    if workload.batch is None:
        raise ConfigError(f"{name}: batch is None; give the tensors of one step")
    if workload.loss_fn is None and workload.optimizer is not None:
        raise ConfigError(f"{name}: optimizer without loss_fn; give both to train, neither for inference")
    if workload.loss_fn is not None and not callable(workload.loss_fn):
        raise ConfigError(
            f"{name}: loss_fn is {type(workload.loss_fn).__name__}; give a function loss_fn(model, batch)"
        )
    if workload.optimizer is None and workload.loop.needs_all_gradients:
        raise ConfigError(f"{name}: loop {workload.loop} without an optimizer; give one, or leave the loop out")
    if workload.loss_fn is None and workload.loop.gradients:
        raise ConfigError(f"{name}: loop gradients without loss_fn; give one, or leave the loop out for inference")
    if workload.optimizer is not None:
        _check_optimizer(name, workload.model, workload.optimizer)


def _check_optimizer(name: str, model: torch.nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{name}: optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer")
    parameters = {id(parameter) for parameter in model.parameters()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in parameters for parameter in optimized)
    if foreign:
        raise ConfigError(
            f"{name}: {foreign} of the optimizer's {len(optimized)} parameters are not the model's; "
            "make it from model.parameters() after the model is cast and moved"
        )
