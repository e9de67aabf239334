"""Update all parameters in one call, at the end of the step, for an optimizer whose update of one depends on others."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.optimizers.optimizer import (
    GradientUse,
    Updates,
    in_layout_of,
    refuse_closures,
    select_on_device,
    sum_on_device,
)
from autotune.capture.optimizers.optimizer_copy import (
    CannotCopyError,
    Copier,
    collect_parameters,
    collect_state_tensors,
    find_inner_optimizers,
    get_unhooked_step,
    step_is_replaced,
)
from autotune.capture.optimizers.optimizer_probe import (
    STEPS,
    OptimizerBehavior,
    RecordingClosure,
    closure_error,
    probe,
)
from autotune.capture.optimizers.trial_state import preserve_generators
from autotune.capture.optimizers.wrapped_optimizer import unwrap_optimizer
from autotune.capture.program import stable_text


def make_updates(optimizer: torch.optim.Optimizer) -> Updates:
    """Return the updates of a step: each parameter alone if that gives the same bits, else all in one call.

    Raises:
        CaptureError: if the optimizer's step needs a closure.
        ConfigError: if a wrapper of the optimizer cannot be removed.
    """
    optimizer = unwrap_optimizer(optimizer)
    refuse_closures(optimizer)
    behavior = probe(optimizer)
    return WholeUpdates(optimizer, behavior) if behavior.joint_reason else Updates(optimizer, behavior.writes_gradients)


class WholeUpdates(Updates):
    """Call the user's own `step` with all gradients in `.grad`.

    State is every tensor that the optimizer refers to beside parameters: also that of inner optimizers, and slow weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, behavior: OptimizerBehavior) -> None:
        super().__init__(optimizer)
        self.joint_reason = behavior.joint_reason
        self.draws = behavior.draws
        self.writes_gradients = behavior.writes_gradients
        self._replaced = step_is_replaced(optimizer)
        self._parameters = collect_parameters(optimizer)
        self._ids = {id(parameter) for parameter in self._parameters}
        self._ids_with_gradient = self._ids
        self._sizes: list[int] | None = None
        self._state_bytes = 0
        self._problem = ""

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this optimizer, or one within it, updates the parameter."""
        return id(parameter) in self._ids

    def update_all(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
    ) -> None:
        """Run the optimizer's step; every `.grad` is None afterwards. `shared`: other ops read the gradient too."""
        if self.on_gradient is not None:
            for name, gradient in zip(names, gradients, strict=True):
                self.on_gradient(name, gradient)
        self._run_step(self.optimizer, parameters, gradients, shared)

    def rehearsal(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
        before: Callable[[Sequence[torch.Tensor]], object] | None = None,
    ) -> Callable[[], None]:
        """Return a repeatable step of a copy on stand-ins of full size; where no copy can be made, warn and do nothing."""
        images = {id(p): torch.nn.Parameter(torch.full_like(p, 0.5, requires_grad=False)) for p in self._parameters}
        stand_ins = [images[id(parameter)] for parameter in parameters]
        try:
            if self._replaced:
                raise CannotCopyError("its step is replaced on the object")
            copied = Copier(dict(images), _clone).copy(self.optimizer)
        except CannotCopyError as error:
            self._warn_of_rehearsal(str(error))
            return _do_nothing

        def rehearse() -> None:
            try:
                self._run_step(copied, stand_ins, gradients, shared, before)
            except Exception as error:  # noqa: BLE001 - a user's step may raise anything on gradients that are not its own
                self._warn_of_rehearsal(f"its step ends in {type(error).__name__}: {error}")

        return rehearse

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the parameters that have a gradient in the step: the others have none in a trial either."""
        self._ids_with_gradient = {id(parameter) for parameter in parameters}
        self._sizes = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the hooks around the step, unless a `step` on the object does that itself."""
        if self._replaced:
            yield
            vars(self.optimizer)["_opt_called"] = True
            return
        with super().step():
            yield

    def gradient_uses(self, target: Any, args: tuple[Any, ...]) -> list[GradientUse]:
        """Return all parameters with their gradients for the call that updates them; none for other calls."""
        return [GradientUse(*use) for use in zip(*args, strict=True)] if target == self.update_all else []

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:  # noqa: ARG002 - all share the state
        """Return the bytes of each state tensor that the optimizer has, or will have after its first updates."""
        if self._sizes is None:
            self._sizes = self._measure_sizes()
        return self._sizes

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes that the whole state occupies on the parameters' device."""
        self.state_sizes(parameter)
        return self._state_bytes

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:  # noqa: ARG002 - all share the state
        """Return the tensors of these sizes; none before the first update, or where their sizes differ from `state_sizes`."""
        tensors = select_on_device(collect_state_tensors(self.optimizer), self._device_kind)
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        return tensors if sizes == self._sizes else []

    @property
    def label(self) -> str:
        """Name of the class, with those of the optimizers within; part of the graph's digest."""
        inner = find_inner_optimizers(self.optimizer)
        name = type(self.optimizer).__name__
        return f"{name}({', '.join(type(other).__name__ for other in inner)})" if inner else name

    @property
    def settings(self) -> str:
        """Parameters that each optimizer updates, and its defaults but the learning rate; part of the graph's digest."""
        number = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        return repr(
            [
                (
                    type(optimizer).__name__,
                    sorted((k, stable_text(v)) for k, v in getattr(optimizer, "defaults", {}).items() if k != "lr"),
                    [[number[id(p)] for p in group["params"]] for group in optimizer.param_groups],
                )
                for optimizer in (self.optimizer, *find_inner_optimizers(self.optimizer))
            ]
        )

    def _run_step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
        before: Callable[[Sequence[torch.Tensor]], object] | None = None,
    ) -> None:
        try:
            for parameter, gradient, is_shared in zip(parameters, gradients, shared, strict=True):
                parameter.grad = in_layout_of(parameter, gradient, copied=is_shared and self.writes_gradients)
            if before is not None:
                before(parameters)
            with torch.enable_grad():  # as a loop calls it; most steps turn it off themselves
                self._call(optimizer)
        finally:
            for parameter in self._parameters if optimizer is self.optimizer else parameters:
                parameter.grad = None

    def _call(self, optimizer: torch.optim.Optimizer) -> None:
        if self._replaced:
            vars(optimizer)["step"]()
        else:
            get_unhooked_step(optimizer)(optimizer)

    def _measure_sizes(self) -> list[int]:
        """Run steps without memory; where those fail, because the step reads numbers, run one on real tensors."""
        errors: list[Exception] = []
        with _disable_current_modes(), warnings.catch_warnings(), preserve_generators(self._parameters):
            warnings.simplefilter("ignore")
            for device, steps in (("meta", STEPS), (None, 1)):
                try:
                    return self._sizes_after(device, steps)
                except Exception as error:  # noqa: BLE001 - a user's step may raise anything
                    errors.append(error)
            if not isinstance(errors[-1], CannotCopyError):
                self._refuse_closure()
        self._problem = f"{type(errors[-1]).__name__}: {errors[-1]}"
        return self._count(collect_state_tensors(self.optimizer))

    def _count(self, state: Sequence[torch.Tensor]) -> list[int]:
        """Return the bytes of each tensor of state on the parameters' device; note those that all occupy."""
        self._state_bytes = sum_on_device(state, self._device_kind)
        return [tensor.untyped_storage().nbytes() for tensor in select_on_device(state, self._device_kind)]

    @property
    def _device_kind(self) -> str:
        return self._parameters[0].device.type if self._parameters else "cpu"

    def _sizes_after(self, device: str | None, steps: int, *arguments: Any) -> list[int]:
        """Return the bytes of each state tensor after steps of a copy on `device`; None is the parameters' own device."""
        if self._replaced:
            raise CannotCopyError("its step is replaced on the object")

        def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
            is_real = device is None or tensor.ndim == 0
            image = _clone(tensor) if is_real else torch.empty_like(tensor, device=device, requires_grad=False)
            return torch.nn.Parameter(image) if isinstance(tensor, torch.nn.Parameter) else image

        images = {
            id(p): torch.nn.Parameter(torch.empty_like(p, device=device, requires_grad=False)) for p in self._parameters
        }
        if device is None:
            for image in images.values():
                image.data.fill_(0.5)
        copied = Copier(dict(images), copy_tensor).copy(self.optimizer)
        for _ in range(steps):
            for parameter in self._parameters:
                stand_in = images[id(parameter)]
                stand_in.grad = torch.zeros_like(stand_in) if id(parameter) in self._ids_with_gradient else None
            get_unhooked_step(copied)(copied, *arguments)
        for stand_in in images.values():
            stand_in.grad = None
        return self._count(collect_state_tensors(copied))

    def _refuse_closure(self) -> None:
        closure = RecordingClosure()
        try:
            self._sizes_after(None, 1, closure)
        except Exception:  # noqa: BLE001 - then the step fails for another reason than a missing closure
            return
        if closure.called:
            raise closure_error(self.optimizer)

    def _warn_of_rehearsal(self, problem: str) -> None:
        self._problem = self._problem or problem
        warnings.warn(
            f"{self.label} cannot be tried on a copy ({problem}), so predictions leave out the bytes that its step allocates "
            "beside its state; leave room in the budget, or compare with a measured step",
            stacklevel=4,
        )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    image = tensor.detach().clone()
    return torch.nn.Parameter(image, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else image


def _do_nothing() -> None:
    """Replace a step that cannot be rehearsed."""
