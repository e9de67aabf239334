"""Update one parameter at a time with the user's own optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autotune.capture.optimizers.optimizer_copy import HOOKS, get_unhooked_step
from autotune.errors import CaptureError

NEED_CLOSURES = ("LBFGS",)
"""Names of optimizers that compute the loss again within their step."""


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError for an optimizer whose step computes the loss again."""
    name = type(optimizer).__name__
    if name in NEED_CLOSURES:
        raise CaptureError(
            f"{name} computes the loss again within its step, which a captured step cannot do; use an optimizer such as SGD or AdamW"
        )


class Updates:
    """Update one parameter by the optimizer's own step, on a copy of the optimizer with that parameter alone.

    The copy shares the state and reads learning rates and other settings from the user's groups in every step, so
    schedulers and checkpoints keep working on the user's object.
    """

    joint_reason = ""
    """Reason why all parameters are updated in one call; empty where each parameter is updated alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, writes_gradients: bool = False) -> None:
        self.optimizer = optimizer
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        self.writes_gradients = writes_gradients
        """The optimizer changed gradients in place in a trial: a gradient that other ops read too is copied for it."""
        # torch wraps `step` for its profiler and for hooks, which belong to a whole step and not to each parameter
        self._step = get_unhooked_step(optimizer)
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer updates this parameter."""
        return id(parameter) in self._group_of

    def update(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> None:
        """Run the optimizer for one parameter; its `.grad` is None afterwards. `shared`: other ops read the gradient too."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        parameter.grad = gradient.clone() if shared and self.writes_gradients else gradient
        del gradient
        try:
            self._run(parameter, self._group_of[id(parameter)], self.optimizer.state)
        finally:
            parameter.grad = None

    def keep(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> None:
        """Add the gradient to `.grad` instead of updating, as `backward` does."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        if parameter.grad is None:
            # a gradient that shares elements, by expansion or with another tensor, could not be scaled or clipped in place
            shared = shared or 0 in gradient.stride() or gradient._is_view()
            parameter.grad = in_layout_of(parameter, gradient, copied=shared)
        else:
            parameter.grad.add_(gradient)

    def gradient_keeper(self, target: Any) -> Callable[..., Any] | None:
        """Return the function that keeps a gradient where `target` would update with it; None for other targets."""
        return self.keep if target == self.update else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run hooks around all updates of one step, which the optimizer's own `step` does once and not per parameter."""
        self._group_of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for hook in getattr(self.optimizer, HOOKS[0], {}).values():  # a wrapper may never call Optimizer.__init__
            hook(self.optimizer, (), {})
        yield
        for hook in getattr(self.optimizer, HOOKS[1], {}).values():
            hook(self.optimizer, (), {})
        vars(self.optimizer)["_opt_called"] = True  # learning rate schedulers look for it

    def rehearse(
        self, parameter: torch.Tensor, stand_in: torch.nn.Parameter, gradient: torch.Tensor, state: Any
    ) -> None:
        """Run the update on a stand-in with a separate state; the user's objects stay as they are."""
        stand_in.grad = gradient
        self._run(stand_in, self._group_of[id(parameter)], state)

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a parameter's state; before its first update often none."""
        leaves = pytree.tree_leaves(self.optimizer.state.get(parameter, {}))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each tensor of state that the parameter has, or will have after its first update."""
        try:
            state = self._first_state(parameter, torch.empty_like(parameter, device="meta"))
        except Exception:  # noqa: BLE001 - some read numbers or need a real device, and each raises another exception
            with no_dispatch():
                state = self._first_state(parameter, torch.zeros_like(parameter))
        if parameter in self.optimizer.state:
            state = {parameter: self.optimizer.state[parameter]}
        leaves = pytree.tree_leaves(list(state.values()))
        return [leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _first_state(self, parameter: torch.Tensor, like: torch.Tensor) -> dict[Any, Any]:
        """Return the state after a first update of a stand-in for the parameter."""
        stand_in = torch.nn.Parameter(like.detach())
        stand_in.grad = torch.zeros_like(like)
        version = stand_in.grad._version
        state = _DefaultState()
        group = self._group_of[id(parameter)]
        self._run(stand_in, group, state)
        self.writes_gradients |= stand_in.grad is None or stand_in.grad._version != version
        return state

    def _run(self, parameter: torch.Tensor, group: dict[str, Any], state: Any) -> None:
        """Run the optimizer for one parameter, on a copy with that parameter alone."""
        alone = object.__new__(type(self.optimizer))
        alone.__dict__.update(self.optimizer.__dict__)
        alone.state = state
        alone.param_groups = [{**group, "params": [parameter]}]
        self._step(alone)


def in_layout_of(parameter: torch.Tensor, gradient: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Return the gradient in the layout that `backward` leaves in `.grad`: a norm is summed in the order of memory.

    Autograd copies a gradient whose strides differ from its parameter's. `copied` forces a copy.
    """
    same_layout = gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous())
    if same_layout and not copied:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class _DefaultState(dict[Any, Any]):
    def __missing__(self, key: Any) -> dict[Any, Any]:
        state: dict[Any, Any] = {}
        self[key] = state
        return state
