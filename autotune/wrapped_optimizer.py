"""Find the user's own optimizer behind the wrappers of training libraries."""

import torch

from autotune.errors import ConfigError

FORWARDING = ("AcceleratedOptimizer", "LightningOptimizer")
"""Classes that pass everything on to their `.optimizer`; a Lookahead has one too, but a step of its own."""


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer behind wrappers that only pass on; ConfigError for one that would lose its scaler."""
    while any(kind.__name__ in FORWARDING for kind in type(optimizer).__mro__):
        inner = getattr(optimizer, "optimizer", None)
        name = type(optimizer).__name__
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConfigError(
                f"{name}.optimizer is {type(inner).__name__}, not a torch.optim.Optimizer; pass the optimizer that it wraps"
            )
        if getattr(optimizer, "scaler", None) is not None:
            raise ConfigError(
                f"{name} has a scaler, which the step would pass by; pass {name.lower()}.optimizer and scaler=accelerator.scaler"
            )
        optimizer = inner
    return optimizer
