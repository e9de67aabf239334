"""Unwrap an optimizer from the wrappers of training libraries, and update the counters of those wrappers."""

from collections.abc import Iterator
from typing import Any

import torch

from autotune.errors import ConfigError

FORWARDING = ("AcceleratedOptimizer", "LightningOptimizer")
"""Names of classes that only forward to their `.optimizer`. Lookahead has such an attribute, too, but another step."""


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer behind wrappers that only forward to it.

    Raises:
        ConfigError: if a wrapper has a scaler, which the step would ignore, or wraps something else than an optimizer.
    """
    for wrapper in _wrappers(optimizer):
        name = type(wrapper).__name__
        if not isinstance(wrapper.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{name}.optimizer is {type(wrapper.optimizer).__name__}, not a torch.optim.Optimizer; pass the optimizer "
                "within it"
            )
        if getattr(wrapper, "scaler", None) is not None:
            raise ConfigError(
                f"{name} has a scaler, which the step would ignore; pass {name.lower()}.optimizer and scaler=accelerator.scaler"
            )
        optimizer = wrapper.optimizer
    return optimizer


class Bookkeeping:
    """Counters in the wrappers around an optimizer: steps of an accumulation, updates so far."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        wrappers = list(_wrappers(optimizer))
        self._optimizer = optimizer
        self._counted = [w for w in wrappers if hasattr(w, "_on_before_step") and hasattr(w, "_on_after_step")]
        self._accumulations = [w.gradient_state for w in wrappers if hasattr(w, "gradient_state")]
        self._overdue: list[int] | None = None
        """Versions of the parameters after a step that should have ended with an update and did not."""

    def begin(self, *, updates: bool) -> None:
        """Raise ConfigError for a step that updates where the library would not, or that skipped its last update."""
        if self._overdue is not None and self._overdue == self._versions():
            raise ConfigError(
                "the last step should have ended with an update, as at the end of an epoch, and none was run; call flush() of "
                "the step where accelerator.sync_gradients is True, before zero_grad()"
            )
        self._overdue = None
        for state in self._accumulations:
            if updates and not state.sync_gradients:
                raise ConfigError(
                    f"the accelerator accumulates over {state.num_steps} steps and does not update in this one, but the step "
                    f"does; pass accumulate={state.num_steps}, and divide the loss by {state.num_steps} as its backward does"
                )

    def end(self, *, updated: bool) -> None:
        """Count an update: Lightning's `global_step`, which ends a training, is the number of updates."""
        overdue = not updated and any(state.num_steps > 1 and state.sync_gradients for state in self._accumulations)
        self._overdue = self._versions() if overdue else None
        for wrapper in self._counted if updated else ():
            wrapper._on_before_step()
            wrapper._on_after_step()

    def _versions(self) -> list[int]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return [parameter._version for group in groups for parameter in group["params"]]


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers around an optimizer, the outermost first."""
    while any(kind.__name__ in FORWARDING for kind in type(optimizer).__mro__):
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
