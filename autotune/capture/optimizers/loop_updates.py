"""Hand the gradients of a step to a training loop that clips, scales or accumulates them before its update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autotune.capture.optimizers.optimizer import GradientUse, Updates
from autotune.capture.optimizers.optimizer_copy import clear_gradients
from autotune.workloads.loop import Loop

if TYPE_CHECKING:
    from autotune.capture.program import Program

MAX_NORM = 1.0
"""Norm to which gradients are clipped where the loop's own code is unknown."""


class LoopUpdates(Updates):
    """The gradients of a loop that needs all of them before any update.

    Without accumulation the last op of a step sets every `.grad`. With accumulation each gradient is added to `.grad` by
    an op of its own. The last op then calls `on_complete`, in which the loop updates.
    """

    def __init__(self, base: "Program", loop: Loop) -> None:
        """`base` is the same step without the loop."""
        assert base.updates is not None
        super().__init__(base.updates.optimizer, base.updates.writes_gradients)
        self.base, self.loop = base, loop
        self.on_complete: Callable[[], object] = self._update
        """Called at the end of every step, with all gradients in `.grad` and autograd enabled."""
        self.accumulated: dict[int, torch.Tensor] = {}
        """Parameter of each value that holds the sum of its gradients."""
        self._inner = base.updates
        self._unset: set[int] = set()
        self.joint_reason = self._inner.joint_reason

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer updates this parameter."""
        return self._inner.owns(parameter)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Allocate the sums that do not exist yet, outside of the memory that a plan lays out."""
        for parameter in self.accumulated.values():
            if parameter.grad is None:
                # the gradients of the first micro-batch are assigned: adding them to zeros would change the sign of -0.0
                parameter.grad = empty_gradient(parameter)
                self._unset.add(id(parameter))
        try:
            yield
        finally:
            self._unset.clear()

    def accumulate(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient to `.grad`, as `backward` does."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        assert parameter.grad is not None
        if id(parameter) in self._unset:
            self._unset.remove(id(parameter))
            parameter.grad.copy_(gradient)
        else:
            parameter.grad.add_(gradient)

    def finish(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        shared: Sequence[bool],
    ) -> None:
        """Set every `.grad`, unless ops have added the gradients up there, and let the loop go on."""
        del shared  # a gradient that other ops read has been copied by an op
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            if gradient is None:
                continue
            if self.on_gradient is not None:
                self.on_gradient(name, gradient)
            parameter.grad = whole_tensor(parameter, gradient)
        with torch.enable_grad():
            self.on_complete()

    def gradient_uses(self, target: Any, args: tuple[Any, ...]) -> list[GradientUse]:
        """Return all parameters for the call that lets the loop update; gradients that are in `.grad` are None."""
        return [GradientUse(*use) for use in zip(*args, strict=True)] if target == self.finish else []

    def rehearse_call(
        self, target: Any, args: tuple[Any, ...], synthesize: Callable[[Any], Any], tensors: Any
    ) -> Callable[[], object] | None:
        """Return a repeatable trial of a call on stand-ins; None for a call that touches no `.grad`."""
        if target != self.accumulate:
            return super().rehearse_call(target, args, synthesize, tensors)
        total, gradient = empty_gradient(args[1]).fill_(0.5), synthesize(args[2])
        return lambda: total.add_(gradient)

    def rehearsal(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        shared: Sequence[bool],
        before: Callable[[Sequence[torch.Tensor]], object] | None = None,
    ) -> Callable[[], None]:
        """Return a repeatable update of stand-ins, with what the loop does before it."""
        del before
        present = [
            empty_gradient(parameter).fill_(0.5) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        return self._inner.rehearsal(parameters, present, shared, self._process)

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor of state that the parameter has, or will have after its first update."""
        return self._inner.state_sizes(parameter)

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes that a parameter's state occupies on its device."""
        return self._inner.state_bytes(parameter)

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a parameter's state; before its first update often none."""
        return self._inner.state_tensors(parameter)

    def _process(self, stand_ins: Sequence[torch.Tensor]) -> None:
        """Do with the gradients of stand-ins what the loop does before its update."""
        gradients = [parameter.grad for parameter in stand_ins if parameter.grad is not None]
        if self.loop.scaler:
            device = gradients[0].device
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, torch.zeros(1, device=device), torch.ones(1, device=device)
            )
        if self.loop.clip:
            torch.nn.utils.clip_grad_norm_(stand_ins, MAX_NORM)

    def _update(self) -> None:
        self.optimizer.step()
        clear_gradients(self.optimizer)


def base_program(program: "Program") -> "Program":
    """Return the same step without its loop."""
    return program.updates.base if isinstance(program.updates, LoopUpdates) else program


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the gradient that `backward` leaves in `.grad`: a norm is summed in the order of memory."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(tuple(parameter.shape), device="meta").stride())


def empty_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor for a parameter's gradient, laid out as `backward` does."""
    strides = gradient_strides(parameter)
    return torch.empty_strided(tuple(parameter.shape), strides, dtype=parameter.dtype, device=parameter.device)


def has_layout(gradient: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if a gradient has these strides; those of dimensions of size 1 do not matter."""
    pairs = zip(shape, gradient.stride(), strides, strict=True)
    return not gradient.numel() or all(size == 1 or one == other for size, one, other in pairs)


def copy_to_layout(gradient: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of a gradient with these strides."""
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=gradient.dtype, device=gradient.device).copy_(
        gradient
    )


def whole_tensor(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a tensor of its own that the loop may change in place: a copy only where that is needed."""
    shape, strides = tuple(parameter.shape), gradient_strides(parameter)
    if not has_layout(gradient, shape, strides) or gradient.untyped_storage().nbytes() != gradient.nbytes:
        return copy_to_layout(gradient, shape, strides)
    if not gradient._is_view():
        return gradient
    storage, offset = gradient.untyped_storage(), gradient.storage_offset()
    return gradient.new_empty(0).set_(storage, offset, gradient.size(), gradient.stride())
