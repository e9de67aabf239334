"""Update parameters once per accumulation cycle, with all gradients at once: clipping, loss scaling, accumulation."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autotune.capture.loop_checks import count_ranks
from autotune.capture.optimizers.optimizer_copy import (
    GLOBAL_HOOKS,
    HOOKS,
    clear_gradients,
    collect_group_parameters,
    find_inner_optimizers,
)
from autotune.workloads.loop import Loop
from autotune.workloads.memory_format import convert_state
from autotune.workloads.workload import LossFn, infer


class UpdateCycle:
    """The steps from one update to the next. Without an optimizer there is nothing to update."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        accumulate: int,
        before_update: Callable[[], Any] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.optimizer, self._accumulate = optimizer, accumulate
        self._before_update, self.scaler = before_update, scaler
        self._optimizers = [] if optimizer is None else [optimizer, *find_inner_optimizers(optimizer)]
        self._has_warned = self._has_warned_of_clearing = False
        self._versions: list[int] = []
        """Versions of the parameters after the last step that waits for an update."""
        self.steps = 0
        """Steps so far; a multiple of `accumulate` right after an update."""

    @property
    def gradient_users(self) -> str:
        """Names of what needs every gradient before any update; empty if each may be used at once."""
        users = {
            "accumulate": self._accumulate > 1,
            "before_update": self._before_update is not None,
            "scaler": self.scaler is not None,
            "a hook before the optimizer's step": self._has_hooks,
        }
        return " and ".join(name for name, is_used in users.items() if is_used)

    @property
    def loop(self) -> Loop:
        """Loop that a plan must be made for."""
        clips = self._before_update is not None or self._has_hooks
        return Loop(clip=clips, scaler=self.scaler is not None, accumulate=self._accumulate)

    @property
    def _has_hooks(self) -> bool:
        everywhere = any(hook is not convert_state for hook in GLOBAL_HOOKS[0].values())
        return self.optimizer is not None and (everywhere or bool(getattr(self.optimizer, HOOKS[0], None)))

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The optimizer's parameters, those of wrapped optimizers included."""
        return collect_group_parameters(self._optimizers)

    @property
    def parameter_ids(self) -> set[int]:
        """Python ids of `parameters`."""
        return {id(parameter) for parameter in self.parameters}

    @property
    def ends_with_next_step(self) -> bool:
        """True if the next step ends with an update."""
        return (self.steps + 1) % self._accumulate == 0

    @property
    def is_pending(self) -> bool:
        """True if gradients of earlier steps wait for an update."""
        return self.steps % self._accumulate > 0

    def restart_if_cleared(self) -> None:
        """Start a new cycle if the loop has cleared every gradient; warn if it did so without an update of its own."""
        if not self.is_pending or any(parameter.grad is not None for parameter in self.parameters):
            return
        if not self._has_warned_of_clearing and self._versions == self._read_versions():
            self._has_warned_of_clearing = True
            warnings.warn(
                f"the gradients of {self.steps % self._accumulate} of {self._accumulate} steps were cleared before their update, and "
                "accumulation starts anew; leave zero_grad() out of the loop, because the step clears them after each update",
                stacklevel=3,
            )
        self.steps = 0

    def _read_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def start_step(self) -> None:
        """Start a new cycle if the loop has cleared every gradient, and discard gradients that no step of the cycle computed.

        A planned step begins as a loop does that calls `zero_grad` first. Eager would add its gradients to those it finds.
        """
        self.restart_if_cleared()
        if self.is_pending:
            return
        leftover = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not leftover:
            return
        assert self.optimizer is not None
        if not self._has_warned and any(_is_nonzero(parameter.grad) for parameter in leftover):
            self._has_warned = True
            warnings.warn(
                f"{len(leftover)} parameters had gradients before the step, the first of shape {tuple(leftover[0].shape)}; the step "
                "discards them, as zero_grad() does: add their term to the loss function if they belong to its update",
                stacklevel=3,
            )
        clear_gradients(self.optimizer)

    def count_step(self) -> None:
        """Count a step whose gradients are in `.grad`; update if it completes the cycle."""
        self.steps += 1
        if self.is_pending:
            self._versions = self._read_versions()
        else:
            self.update()

    @contextmanager
    def clear_on_failure(self) -> Iterator[None]:
        """Clear all gradients and restart the cycle if the block raises."""
        try:
            yield
        except BaseException:
            if self.optimizer is not None:
                clear_gradients(self.optimizer)
            self.steps -= self.steps % self._accumulate
            raise

    def update(self) -> None:
        """Unscale the gradients, call `before_update`, step the optimizer, and clear the gradients."""
        assert self.optimizer is not None
        try:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self._before_update is not None:
                self._before_update()
                if count_ranks() > 1:
                    self._note_infinities()
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        except BaseException:
            if self.scaler is not None:  # it stores which gradients are unscaled until its own update
                self.scaler.update(self.scaler.get_scale())
            raise
        clear_gradients(self.optimizer)

    def _note_infinities(self) -> None:
        """Let the scaler skip an update of infinite gradients that `before_update` received from another rank.

        The scaler looked for them before, in this rank's own gradients. So all ranks skip an update, or none does, where
        `before_update` passes infinities on, as an all-reduce does.
        """
        if self.scaler is None or not self.scaler.is_enabled() or self.optimizer is None:
            return
        infinities: dict[Any, Any] = self.scaler._found_inf_per_device(self.optimizer)
        for parameter in self.parameters:
            if (gradient := parameter.grad) is not None and gradient.device in infinities:
                values = gradient._values() if gradient.is_sparse else gradient
                infinities[gradient.device].logical_or_(~values.isfinite().all())


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


class EagerStep:
    """The step in plain eager, as a part of an update cycle."""

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn | None, cycle: UpdateCycle) -> None:
        self._model, self._loss_fn, self._cycle = model, loss_fn, cycle

    def run(self, batch: Any, on_gradient: Callable[[str, torch.Tensor], None] | None) -> Any:
        """Run one step; return what the loss function returns, with every tensor detached.

        `on_gradient` is called with each gradient of autograd's backward, before it is added to `.grad`.
        """
        if self._loss_fn is None or self._cycle.optimizer is None:
            with torch.no_grad():
                return infer(self._model, batch) if self._loss_fn is None else self._loss_fn(self._model, batch)
        self._cycle.restart_if_cleared()
        with self._untrained_gradients():
            results = self._loss_fn(self._model, batch)
            loss = results[0] if isinstance(results, tuple) else results
            scaler = self._cycle.scaler
            with self._gradient_hooks(on_gradient):
                (scaler.scale(loss) if scaler is not None else loss).backward()
        self._cycle.count_step()
        return pytree.tree_map(lambda part: part.detach() if isinstance(part, torch.Tensor) else part, results)

    @contextmanager
    def _untrained_gradients(self) -> Iterator[None]:
        """Leave the `.grad` of parameters that the optimizer does not train as it is: a planned step computes none."""
        trained = self._cycle.parameter_ids
        saved = [
            (parameter, parameter.grad)
            for module in (self._model, self._loss_fn)
            if isinstance(module, torch.nn.Module)
            for parameter in module.parameters()
            if id(parameter) not in trained
        ]
        for parameter, _ in saved:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in saved:
                parameter.grad = gradient

    @contextmanager
    def _gradient_hooks(self, on_gradient: Callable[[str, torch.Tensor], None] | None) -> Iterator[None]:
        with ExitStack() as hooks:
            if on_gradient is not None:
                trained = self._cycle.parameter_ids
                for name, parameter in self._model.named_parameters():
                    if parameter.requires_grad and id(parameter) in trained:
                        hook = partial(on_gradient, name)
                        hooks.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
            yield
