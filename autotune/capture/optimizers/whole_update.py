"""Step an optimizer that looks across parameters whole: once, at the end, when every gradient exists."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.optimizers.optimizer import Updates, in_layout_of, refuse_closures
from autotune.capture.optimizers.optimizer_copy import (
    CannotCopyError,  # fmt: skip
    Copier,  # fmt: skip
    held_tensors,  # fmt: skip
    inner_optimizers,  # fmt: skip
    owned_parameters,  # fmt: skip
    step_is_replaced,  # fmt: skip
    unhooked_step,  # fmt: skip
)
from autotune.capture.optimizers.optimizer_probe import STEPS, Behaviour, Closure, generators_kept, needs_closure, probe
from autotune.capture.optimizers.wrapped_optimizer import unwrapped


def updates_of(optimizer: torch.optim.Optimizer) -> Updates:
    """Return how a step updates with this optimizer: each parameter alone if that gives the same bits, else whole."""
    optimizer = unwrapped(optimizer)
    refuse_closures(optimizer)
    behaviour = probe(optimizer)
    return WholeUpdates(optimizer, behaviour) if behaviour.across else Updates(optimizer, behaviour.writes_gradients)


class WholeUpdates(Updates):
    """Call the user's own `step` with all gradients in `.grad`.

    State is what the optimizer holds beside parameters: that of inner optimizers, slow weights, tensors of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, behaviour: Behaviour) -> None:
        super().__init__(optimizer)
        self.across = behaviour.across
        self.draws = behaviour.draws
        self.writes_gradients = behaviour.writes_gradients
        self._replaced = step_is_replaced(optimizer)
        self._owned = owned_parameters(optimizer)
        self._ids = {id(parameter) for parameter in self._owned}
        self._expected = self._ids
        self._sizes: list[int] | None = None
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
        """Run the optimizer's step; every `.grad` is None afterwards. `shared`: others read the gradient too."""
        if self.on_gradient is not None:
            for name, gradient in zip(names, gradients, strict=True):
                self.on_gradient(name, gradient)
        self._take_step(self.optimizer, parameters, gradients, shared)

    def keep_all(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
    ) -> None:
        """Leave every gradient in `.grad`, added to what is there."""
        for name, parameter, gradient, others in zip(names, parameters, gradients, shared, strict=True):
            self.keep(name, parameter, gradient, others)

    def rehearsal(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], shared: Sequence[bool]
    ) -> Callable[[], None]:
        """Return a step of a copy on stand-ins of full size, to be called again and again; a warning where none can be made."""
        images = {id(p): torch.nn.Parameter(torch.full_like(p, 0.5, requires_grad=False)) for p in self._owned}
        stand_ins = [images[id(parameter)] for parameter in parameters]
        try:
            if self._replaced:
                raise CannotCopyError("its step is replaced on the object")
            acting = Copier(dict(images), _cloned).copied(self.optimizer)
        except CannotCopyError as error:
            self._warn_of_rehearsal(str(error))
            return _nothing

        def rehearsed() -> None:
            try:
                self._take_step(acting, stand_ins, gradients, shared)
            except Exception as error:  # noqa: BLE001 - a user's step may raise anything on gradients that are not its own
                self._warn_of_rehearsal(f"its step ends in {type(error).__name__}: {error}")

        return rehearsed

    def expect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note which parameters have a gradient in the step: the others have none in a trial either."""
        self._expected = {id(parameter) for parameter in parameters}
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

    def kept(self, target: Any) -> Callable[..., Any] | None:
        """Return what keeps gradients where `target` would update with them."""
        return self.keep_all if target == self.update_all else None

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:  # noqa: ARG002 - all share the state
        """Return the bytes of each tensor that the optimizer holds, or will hold after its first updates."""
        if self._sizes is None:
            self._sizes = self._measured_sizes()
        return self._sizes

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:  # noqa: ARG002 - all share the state
        """Return the tensors of these sizes; none before the first update, or where they are others than foreseen."""
        found = held_tensors(self.optimizer)
        same = [one.untyped_storage().nbytes() for one in found] == self._sizes
        return found if same else []

    @property
    def label(self) -> str:
        """Name of the class, with those of the optimizers within."""
        inner = inner_optimizers(self.optimizer)
        own = type(self.optimizer).__name__
        return f"{own}({', '.join(type(one).__name__ for one in inner)})" if inner else own

    @property
    def settings(self) -> str:
        """Which parameters each optimizer updates, and its defaults but the learning rate."""
        number = {id(parameter): at for at, parameter in enumerate(self._owned)}
        return repr(
            [
                (
                    type(one).__name__,
                    sorted((k, str(v)) for k, v in getattr(one, "defaults", {}).items() if k != "lr"),
                    [[number[id(p)] for p in group["params"]] for group in one.param_groups],
                )
                for one in (self.optimizer, *inner_optimizers(self.optimizer))
            ]
        )

    def _take_step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
    ) -> None:
        try:
            for parameter, gradient, others in zip(parameters, gradients, shared, strict=True):
                parameter.grad = in_layout_of(parameter, gradient, copied=others and self.writes_gradients)
            with torch.enable_grad():  # as a loop calls it; most steps turn it off themselves
                self._call(optimizer)
        finally:
            for parameter in self._owned if optimizer is self.optimizer else parameters:
                parameter.grad = None

    def _call(self, optimizer: torch.optim.Optimizer) -> None:
        if self._replaced:
            vars(optimizer)["step"]()
        else:
            unhooked_step(optimizer)(optimizer)

    def _measured_sizes(self) -> list[int]:
        """Take steps without memory; where those fail, because the step looks at numbers, one on real tensors."""
        errors: list[Exception] = []
        with _disable_current_modes(), warnings.catch_warnings(), generators_kept(self._owned):
            warnings.simplefilter("ignore")
            for device, steps in (("meta", STEPS), (None, 1)):
                try:
                    return self._sizes_after(device, steps)
                except Exception as error:  # noqa: BLE001 - a user's step may raise anything
                    errors.append(error)
            if not isinstance(errors[-1], CannotCopyError):
                self._refuse_closure()
        self._problem = f"{type(errors[-1]).__name__}: {errors[-1]}"
        return [one.untyped_storage().nbytes() for one in held_tensors(self.optimizer)]

    def _sizes_after(self, device: str | None, steps: int, *arguments: Any) -> list[int]:
        if self._replaced:
            raise CannotCopyError("its step is replaced on the object")

        def image(tensor: torch.Tensor) -> torch.Tensor:
            small = device is None or tensor.ndim == 0
            made = _cloned(tensor) if small else torch.empty_like(tensor, device=device, requires_grad=False)
            return torch.nn.Parameter(made) if isinstance(tensor, torch.nn.Parameter) else made

        images = {
            id(p): torch.nn.Parameter(torch.empty_like(p, device=device, requires_grad=False)) for p in self._owned
        }
        if device is None:
            for made in images.values():
                made.data.fill_(0.5)
        acting = Copier(dict(images), image).copied(self.optimizer)
        for _ in range(steps):
            for parameter in self._owned:
                stand_in = images[id(parameter)]
                stand_in.grad = torch.zeros_like(stand_in) if id(parameter) in self._expected else None
            unhooked_step(acting)(acting, *arguments)
        for stand_in in images.values():
            stand_in.grad = None
        return [one.untyped_storage().nbytes() for one in held_tensors(acting)]

    def _refuse_closure(self) -> None:
        closure = Closure()
        try:
            self._sizes_after(None, 1, closure)
        except Exception:  # noqa: BLE001 - then a closure is not what it lacks
            return
        if closure.called:
            raise needs_closure(self.optimizer)

    def _warn_of_rehearsal(self, problem: str) -> None:
        self._problem = self._problem or problem
        warnings.warn(
            f"{self.label} cannot be tried on a copy ({problem}), so the bytes that its step takes beside its state are in no "
            "prediction; leave room in the budget, or compare with a measured step",
            stacklevel=4,
        )


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().clone()
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _nothing() -> None:
    """Stand for a step that cannot be rehearsed."""
