"""What is to be trained: a model, a batch, a loss, an optimizer; made by the factory that a reference names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autotune.errors import ConfigError

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


def infer(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tuple's parts as arguments, a dict's as keyword arguments."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def check(made: object, name: str) -> None:
    """Refuse what is no workload that a step can be made of; `name` stands in front of the error."""
    if not isinstance(made, Workload):
        cure = "return autotune.Workload(model, loss_fn, optimizer, batch)"
        match made:
            case torch.nn.Module():
                raise ConfigError(
                    f"{name} returned a bare model ({type(made).__name__}) without batch and loss; {cure}"
                )
            case tuple():
                parts = ", ".join(type(part).__name__ for part in made)
                raise ConfigError(f"{name} returned a tuple ({parts}); {cure}")
        raise ConfigError(f"{name} returned {'None' if made is None else type(made).__name__}; {cure}")
    if not isinstance(made.model, torch.nn.Module):
        raise ConfigError(f"{name}: model is {type(made.model).__name__}, not a torch.nn.Module")
    if made.batch is None:
        raise ConfigError(f"{name}: batch is None; give the tensors of one step")
    if (made.loss_fn is None) != (made.optimizer is None):
        given, missing = ("optimizer", "loss_fn") if made.loss_fn is None else ("loss_fn", "optimizer")
        raise ConfigError(f"{name}: {given} without {missing}; give both to train, neither for inference")
    if made.loss_fn is not None and not callable(made.loss_fn):
        raise ConfigError(f"{name}: loss_fn is {type(made.loss_fn).__name__}; give a function loss_fn(model, batch)")
    if made.optimizer is not None:
        _check_optimizer(name, made.model, made.optimizer)


def _check_optimizer(name: str, model: torch.nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{name}: optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise ConfigError(
            f"{name}: {foreign} of the optimizer's {len(held)} parameters are not the model's; "
            "make it from model.parameters() after the model is cast and moved"
        )
