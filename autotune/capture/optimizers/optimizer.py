"""Update one parameter at a time with the user's own optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autotune.capture.optimizers.optimizer_copy import HOOKS, unhooked_step
from autotune.errors import CaptureError

NEED_CLOSURES = ("LBFGS",)
"""Optimizers that compute the loss again within their step."""


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step computes the loss again."""
    name = type(optimizer).__name__
    if name in NEED_CLOSURES:
        raise CaptureError(f"{name} looks across parameters, so one cannot be updated alone; use SGD or AdamW")


class Updates:
    """One parameter's update is the optimizer's own step on a copy of it that holds that parameter alone.

    The copy shares the state, and takes learning rates and the like from the user's groups anew each time, so that
    schedulers and checkpoints keep working on the user's object.
    """

    across = ""
    """Why the optimizer is stepped whole; empty where each parameter is updated alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, writes_gradients: bool = False) -> None:
        self.optimizer = optimizer
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        self.writes_gradients = writes_gradients
        """Whether the optimizer was seen to change gradients in place: then one that others read too is copied for it."""
        # torch wraps `step` for its profiler and for hooks, which belong to a whole step and not to each parameter
        self._step = unhooked_step(optimizer)
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer updates this parameter at all."""
        return id(parameter) in self._group_of

    def update(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> None:
        """Run the optimizer for one parameter; its `.grad` is None afterwards. `shared`: others read the gradient too."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        parameter.grad = gradient.clone() if shared and self.writes_gradients else gradient
        del gradient
        try:
            self._run(parameter, self._group_of[id(parameter)], self.optimizer.state)
        finally:
            parameter.grad = None

    def keep(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> None:
        """Leave the gradient in `.grad`, added to what is there, as `backward` does."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        if parameter.grad is None:
            # one that shares its elements, with itself by expansion or with another's, nobody could scale or clip in place
            shared = shared or 0 in gradient.stride() or gradient._is_view()
            parameter.grad = in_layout_of(parameter, gradient, copied=shared)
        else:
            parameter.grad.add_(gradient)

    def kept(self, target: Any) -> Callable[..., Any] | None:
        """Return what keeps a gradient where `target` would update with it."""
        return self.keep if target == self.update else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all updates of one step: what the optimizer's own `step` does once and not per parameter."""
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
        """The same update on a stand-in with a state of its own; the user's objects stay as they are."""
        stand_in.grad = gradient
        self._run(stand_in, self._group_of[id(parameter)], state)

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Optimizer state that the parameter has; before its first update often none."""
        found = pytree.tree_leaves(self.optimizer.state.get(parameter, {}))
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:
        """Bytes of each tensor of optimizer state that the parameter has, or will have after its first update."""
        try:
            state = self._first_state(parameter, torch.empty_like(parameter, device="meta"))
        except Exception:  # noqa: BLE001 - some look at their numbers, or want a real device: each says so otherwise
            with no_dispatch():
                state = self._first_state(parameter, torch.zeros_like(parameter))
        if parameter in self.optimizer.state:
            state = {parameter: self.optimizer.state[parameter]}
        leaves = pytree.tree_leaves(list(state.values()))
        return [leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _first_state(self, parameter: torch.Tensor, like: torch.Tensor) -> dict[Any, Any]:
        """What a first update makes of a stand-in for the parameter."""
        stand_in = torch.nn.Parameter(like.detach())
        stand_in.grad = torch.zeros_like(like)
        version = stand_in.grad._version
        state = _DefaultState()
        group = self._group_of[id(parameter)]
        self._run(stand_in, group, state)
        self.writes_gradients |= stand_in.grad is None or stand_in.grad._version != version
        return state

    def _run(self, parameter: torch.Tensor, group: dict[str, Any], state: Any) -> None:
        """Run the optimizer for one parameter, on a copy that holds it alone."""
        alone = object.__new__(type(self.optimizer))
        alone.__dict__.update(self.optimizer.__dict__)
        alone.state = state
        alone.param_groups = [{**group, "params": [parameter]}]
        self._step(alone)


def in_layout_of(parameter: torch.Tensor, gradient: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Return the gradient in the layout that `backward` leaves in `.grad`: a norm adds up in the order of memory.

    Autograd copies a gradient whose strides are not those of its parameter; `copied` asks for a copy in any case.
    """
    same = gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous())
    if same and not copied:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class _DefaultState(dict[Any, Any]):
    def __missing__(self, key: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self[key] = made
        return made
