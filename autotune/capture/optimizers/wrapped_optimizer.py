"""Find the user's own optimizer behind the wrappers of training libraries, and keep step with what those count."""

from collections.abc import Iterator
from typing import Any

import torch

from autotune.errors import ConfigError

FORWARDING = ("AcceleratedOptimizer", "LightningOptimizer")
"""Classes that pass everything on to their `.optimizer`; a Lookahead has one too, but a step of its own."""


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer behind wrappers that only pass on; ConfigError for one that would lose its scaler."""
    for wrapper in _wrappers(optimizer):
        name = type(wrapper).__name__
        if not isinstance(wrapper.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{name}.optimizer is {type(wrapper.optimizer).__name__}, not a torch.optim.Optimizer; pass the optimizer "
                "that it wraps"
            )
        if getattr(wrapper, "scaler", None) is not None:
            raise ConfigError(
                f"{name} has a scaler, which the step would pass by; pass {name.lower()}.optimizer and scaler=accelerator.scaler"
            )
        optimizer = wrapper.optimizer
    return optimizer


class Bookkeeping:
    """Counts of the libraries in whose wrappers an optimizer came: steps of an accumulation, updates so far."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        wrappers = list(_wrappers(optimizer))
        self._optimizer = optimizer
        self._counted = [one for one in wrappers if hasattr(one, "_on_before_step") and hasattr(one, "_on_after_step")]
        self._accumulations = [one.gradient_state for one in wrappers if hasattr(one, "gradient_state")]
        self._due: list[int] | None = None
        """Versions of the parameters after a step that was to end with an update and did not."""

    def begin(self, *, updates: bool) -> None:
        """Refuse a step that updates where the library would not, or whose last update never came."""
        if self._due is not None and self._due == self._versions():
            raise ConfigError(
                "the accelerator was to update after the last step, as at the end of an epoch, and nothing did: call flush() of "
                "the step where accelerator.sync_gradients is True, before zero_grad()"
            )
        self._due = None
        for state in self._accumulations:
            if updates and not state.sync_gradients:
                raise ConfigError(
                    f"the accelerator accumulates over {state.num_steps} steps and does not update in this one, but the step "
                    f"does: pass accumulate={state.num_steps}, and divide the loss by {state.num_steps} as its backward does"
                )

    def end(self, *, updated: bool) -> None:
        """Count an update: Lightning's `global_step`, which ends a training, is the number of them."""
        due = not updated and any(state.num_steps > 1 and state.sync_gradients for state in self._accumulations)
        self._due = self._versions() if due else None
        for wrapper in self._counted if updated else ():
            wrapper._on_before_step()
            wrapper._on_after_step()

    def _versions(self) -> list[int]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [parameter._version for group in groups for parameter in group["params"]]


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers around an optimizer, from the outside."""
    while any(kind.__name__ in FORWARDING for kind in type(optimizer).__mro__):
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
