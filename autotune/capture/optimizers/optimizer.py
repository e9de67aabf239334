"""Update one parameter at a time with the user's own optimizer."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from autotune.capture.optimizers.optimizer_copy import GLOBAL_HOOKS, HOOKS, get_unhooked_step
from autotune.errors import CaptureError
from autotune.ir.allocation import allocated_bytes
from autotune.workloads.loop import Loop

NEED_CLOSURES = ("LBFGS",)
"""Names of optimizers that compute the loss again within their step."""


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError for an optimizer whose step computes the loss again."""
    name = type(optimizer).__name__
    if name in NEED_CLOSURES:
        raise CaptureError(
            f"{name} computes the loss again within its step, which a captured step cannot do; use an optimizer such as SGD or AdamW"
        )


@dataclass(frozen=True, slots=True)
class GradientUse:
    """A parameter that a call updates, and its gradient; both are arguments of the call."""

    name: str
    parameter: Any
    gradient: Any
    shared: bool
    """Other ops read the gradient too."""


class Updates:
    """Update one parameter by the optimizer's own step, on a copy of the optimizer with that parameter alone.

    The copy shares the state and reads learning rates and other settings from the user's groups in every step, so
    schedulers and checkpoints keep working on the user's object.
    """

    joint_reason = ""
    """Reason why all parameters are updated in one call; empty where each parameter is updated alone."""
    loop = Loop()
    """Loop around the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, writes_gradients: bool = False) -> None:
        self.optimizer = optimizer
        self.on_gradient: Callable[[str, torch.Tensor], None] | None = None
        self.writes_gradients = writes_gradients
        """The optimizer changed gradients in place in a trial, or kept them: one that other ops read too is copied for it."""
        # torch wraps `step` for its profiler and for hooks, which belong to a whole step and not to each parameter
        self._step = get_unhooked_step(optimizer)
        self._read_groups()
        self._updated = 0
        """Number of parameters that this step has updated."""

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer updates this parameter."""
        return id(parameter) in self._group_of

    def update(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, shared: bool = False) -> None:
        """Run the optimizer for one parameter; its `.grad` is None afterwards. `shared`: other ops read the gradient too."""
        if self.on_gradient is not None:
            self.on_gradient(name, gradient)
        parameter.grad = in_layout_of(parameter, gradient, copied=shared and self.writes_gradients)
        del gradient
        try:
            self._run(parameter, parameter, self.optimizer.state)
            self._updated += 1
        finally:
            parameter.grad = None

    def update_together(self, uses: Sequence[tuple[str, torch.Tensor, torch.Tensor, bool]]) -> None:
        """Run the optimizer once for several parameters, each as in `update`: on a GPU its kernels take all of them at once."""
        members: dict[int, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        try:
            for name, parameter, gradient, shared in uses:
                if self.on_gradient is not None:
                    self.on_gradient(name, gradient)
                parameter.grad = in_layout_of(parameter, gradient, copied=shared and self.writes_gradients)
                group = self._group_of[id(parameter)]
                members.setdefault(id(group), (group, []))[1].append(parameter)
            groups = [_select(group, parameters, self._names) for group, parameters in members.values()]
            self._step(self._copy_with(self.optimizer.state, groups))
            self._updated += len(uses)
        finally:
            for _, parameter, _, _ in uses:
                parameter.grad = None

    def gradient_uses(self, target: Any, args: tuple[Any, ...]) -> list["GradientUse"]:
        """Return the parameters that a call updates, with their gradients; none for a call that updates nothing."""
        if target != self.update:
            return []
        name, parameter, gradient, shared = args
        return [GradientUse(name, parameter, gradient, shared)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run hooks around all updates of one step, which the optimizer's own `step` does once and not per parameter.

        A step that fails between two updates warns: eager's backward fails before the first one.
        """
        self._read_groups()
        # a wrapper may never call Optimizer.__init__, which adds the attributes and marks the class's step
        calls_global = getattr(type(self.optimizer).step, "hooked", False)
        before, after = ([*table.values()] if calls_global else [] for table in GLOBAL_HOOKS)
        for hook in [*before, *getattr(self.optimizer, HOOKS[0], {}).values()]:
            hook(self.optimizer, (), {})
        self._updated = 0
        try:
            yield
        except BaseException:
            trained = sum(
                parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"]
            )
            if 0 < self._updated < trained:
                warnings.warn(
                    f"the step failed after {self._updated} of {trained} parameters were updated, so these are one "
                    "step ahead of the others; load a checkpoint before training goes on",
                    stacklevel=4,
                )
            raise
        for hook in [*getattr(self.optimizer, HOOKS[1], {}).values(), *after]:
            hook(self.optimizer, (), {})
        vars(self.optimizer)["_opt_called"] = True  # learning rate schedulers look for it

    def rehearse_call(
        self, target: Any, args: tuple[Any, ...], synthesize: Callable[[Any], Any], tensors: Mapping[int, torch.Tensor]
    ) -> Callable[[], object] | None:
        """Return a repeatable trial of a call on stand-ins, whose state exists; None for a call that updates nothing.

        `synthesize` makes a tensor for an argument. `tensors` maps values to the user's parameters.
        """
        uses = self.gradient_uses(target, args)
        if not uses:
            return None
        parameters, gradients, shared = zip(
            *((tensors[use.parameter.value], synthesize(use.gradient), use.shared) for use in uses), strict=True
        )
        trial = self.rehearsal(parameters, gradients, shared)
        trial()
        return trial

    def rehearsal(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        shared: Sequence[bool],
        before: Callable[[Sequence[torch.Tensor]], object] | None = None,
    ) -> Callable[[], None]:
        """Return a repeatable update of stand-ins with a separate state; the user's objects stay as they are.

        `before` is called with the stand-ins, whose gradients are set, before each update.
        """
        images = {id(p): torch.nn.Parameter(torch.full_like(p, 0.5, requires_grad=False)) for p in parameters}
        groups = {id(group): group for group in (self._group_of[id(p)] for p in parameters)}
        alone = self._copy_with(
            _DefaultState(),
            [
                {**_select(group, members, self._names), "params": [images[id(p)] for p in members]}
                for group in groups.values()
                if (members := [p for p in group["params"] if id(p) in images])
            ],
        )

        def rehearse() -> None:
            for image, gradient, is_shared in zip(images.values(), gradients, shared, strict=True):
                image.grad = in_layout_of(image, gradient, copied=is_shared and self.writes_gradients)
            if before is not None:
                before(list(images.values()))
            self._step(alone)
            for image in images.values():
                image.grad = None  # a copy is of this update alone

        return rehearse

    def state_tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a parameter's state on its device; before its first update often none."""
        leaves = _state_tensors(self.optimizer.state.get(parameter, {}))
        return select_on_device(leaves, parameter.device.type)

    def state_sizes(self, parameter: torch.Tensor) -> list[int]:
        """Return the bytes of each of `state_tensors`, as they are or will be after the parameter's first update."""
        leaves = select_on_device(self._state_leaves(parameter), parameter.device.type)
        return [leaf.untyped_storage().nbytes() for leaf in leaves]

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes that a parameter's state occupies on its device: on a GPU without a step count on the CPU."""
        return sum_on_device(self._state_leaves(parameter), parameter.device.type)

    def _state_leaves(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of state that the parameter has, or stand-ins on `meta` for those of its first update."""
        try:
            state = self._first_state(parameter, torch.empty_like(parameter, device="meta"))
        except Exception:  # noqa: BLE001 - some read numbers or need a real device, and each raises another exception
            with no_dispatch():
                state = self._first_state(parameter, torch.zeros_like(parameter))
        if parameter in self.optimizer.state:
            state = {parameter: self.optimizer.state[parameter]}
        return [leaf for part in state.values() for leaf in _state_tensors(part)]

    def _first_state(self, parameter: torch.Tensor, like: torch.Tensor) -> dict[Any, Any]:
        """Return the state after a first update of a stand-in for the parameter."""
        stand_in = torch.nn.Parameter(like.detach())
        stand_in.grad = torch.zeros_like(like)
        version = stand_in.grad._version
        state = _DefaultState()
        self._run(stand_in, parameter, state)
        self.writes_gradients |= stand_in.grad is None or stand_in.grad._version != version
        return state

    def _run(self, stand_in: torch.Tensor, parameter: torch.Tensor, state: Any) -> None:
        """Run the optimizer for one parameter, or for a stand-in, on a copy with that alone."""
        group = _select(self._group_of[id(parameter)], [parameter], self._names)
        self._step(self._copy_with(state, [{**group, "params": [stand_in]}]))

    def _read_groups(self) -> None:
        """Read the group of each parameter, and its name where the optimizer was made from named parameters."""
        groups = self.optimizer.param_groups
        self._group_of = {id(p): group for group in groups for p in group["params"]}
        self._names: dict[int, str] = {
            id(p): name
            for group in groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }

    def _copy_with(self, state: Any, groups: list[dict[str, Any]]) -> Any:
        """Return a shallow copy of the optimizer with another state and other groups, and without hooks."""
        copied = object.__new__(type(self.optimizer))
        # a step that calls the step of its base class would run the hooks for each parameter
        copied.__dict__.update(self.optimizer.__dict__, **{key: {} for key in HOOKS})
        copied.state, copied.param_groups = state, groups
        return copied


def _select(group: dict[str, Any], parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> dict[str, Any]:
    """Return a group with some of its parameters alone. `names` has the names of named parameters, by id."""
    if "param_names" not in group:
        return {**group, "params": list(parameters)}
    return {**group, "params": list(parameters), "param_names": [names[id(parameter)] for parameter in parameters]}


def in_layout_of(parameter: torch.Tensor, gradient: torch.Tensor, *, copied: bool) -> torch.Tensor:
    """Return the gradient in the layout that `backward` leaves in `.grad`.

    Norms and fused kernels read it in the order of memory. Autograd copies a gradient whose strides differ from its
    parameter's. `copied` forces a copy.
    """
    same_layout = gradient.stride() == parameter.stride() or (gradient.is_contiguous() and parameter.is_contiguous())
    if same_layout and not copied:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _state_tensors(state: Any) -> list[torch.Tensor]:
    """Return the tensors of one parameter's state, in the order of their names: that of a loaded checkpoint may be another."""
    ordered = {key: state[key] for key in sorted(state, key=str)} if isinstance(state, dict) else state
    return [leaf for leaf in pytree.tree_leaves(ordered) if isinstance(leaf, torch.Tensor)]


def select_on_device(tensors: Sequence[torch.Tensor], device_kind: str) -> list[torch.Tensor]:
    """Return the tensors of state that a device holds; those on `meta` stand for tensors of the device.

    Adam's step count is on the CPU beside moments on a GPU.
    """
    return [tensor for tensor in tensors if device_kind == "cpu" or tensor.device.type != "cpu"]


def sum_on_device(tensors: Sequence[torch.Tensor], device_kind: str) -> int:
    """Return the bytes that tensors of state occupy on a device."""
    sizes = (tensor.untyped_storage().nbytes() for tensor in select_on_device(tensors, device_kind))
    return sum(allocated_bytes(size, device_kind) for size in sizes)


class _DefaultState(dict[Any, Any]):
    def __missing__(self, key: Any) -> dict[Any, Any]:
        state: dict[Any, Any] = {}
        self[key] = state
        return state
