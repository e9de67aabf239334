"""Determine by trial steps on small stand-ins whether an optimizer updates each parameter independently of the others."""

import contextlib
import inspect
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.optimizers.optimizer_copy import (
    HOOKS,
    Copier,
    collect_group_parameters,
    find_inner_optimizers,
    get_unhooked_step,
    iter_tensors_and_optimizers,
    step_is_replaced,
)
from autotune.capture.optimizers.trial_state import fingerprint, preserve_generators, read_random_states
from autotune.errors import CaptureError

STEPS = 8
"""Number of trial steps: RAdam uses another formula from its sixth step on."""
SCALES = (1.0, 1e-4, 1e4, 1e-2, 30.0)
"""Factors of the stand-ins' gradients, in turn, so that a clipped norm is sometimes above its limit and sometimes below."""
MAX_SIDE = 4
"""Maximum number of elements of a stand-in along each dimension."""
_MANAGED = ("param_groups", "state", *HOOKS)
"""Attributes that a trial replaces."""


@dataclass(frozen=True, slots=True)
class OptimizerBehavior:
    """Properties of an optimizer's step that decide how a captured step runs it."""

    joint_reason: str = ""
    """Reason why all parameters are updated in one call; empty where each parameter can be updated alone."""
    draws: bool = False
    """Its step draws random numbers, or may."""
    writes_gradients: bool = False
    """Its step changes gradients in place or keeps them in its state, or may."""


def probe(optimizer: torch.optim.Optimizer) -> OptimizerBehavior:
    """Step copies of the optimizer on stand-ins, together and one by one, and compare; the optimizer itself is only read.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> probe(torch.optim.AdamW(model.parameters())).joint_reason
    ''

    Raises:
        CaptureError: if its step needs a closure, which no captured step has.
    """
    parameters = collect_group_parameters([optimizer])
    with _disable_current_modes(), preserve_generators(parameters), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _refuse_required_arguments(optimizer)
        if reason := _reason_beyond_groups(optimizer):
            return OptimizerBehavior(reason, draws=True, writes_gradients=True)
        try:
            return _compare_trials(optimizer)
        except Exception as error:  # noqa: BLE001 - a user's step may raise anything on tensors that are not its own
            _refuse_used_closure(optimizer)
            problem = f"its step on small stand-ins ends in {type(error).__name__}: {_first_line(error)}"
            return OptimizerBehavior(problem, draws=True, writes_gradients=True)


def _reason_beyond_groups(optimizer: torch.optim.Optimizer) -> str:
    """Return the reason why stand-ins in the groups cannot represent the optimizer; empty where they can."""
    attributes = vars(optimizer)
    if step_is_replaced(optimizer):
        return "its step is replaced on the object"
    if inner := find_inner_optimizers(optimizer):
        return f"it holds another optimizer ({type(inner[0]).__name__})"
    if "param_groups" not in attributes or "state" not in attributes:
        return "its parameter groups and state are not its own"
    others = [part for key, part in attributes.items() if key not in _MANAGED]
    others += [part for group in optimizer.param_groups for key, part in group.items() if key != "params"]
    if any(isinstance(part, torch.nn.Module) for part in others):
        return "it holds a module"
    if any(
        isinstance(part, torch.nn.Parameter) or (isinstance(part, torch.Tensor) and part.numel() > 1)
        for part in iter_tensors_and_optimizers(others)
    ):
        return "it holds tensors beside its state"
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return "it keeps state that belongs to no parameter"
    return ""


@dataclass(slots=True)
class _StandIn:
    """A small tensor in place of a parameter."""

    group: int
    start: torch.Tensor
    name: str = ""
    """Name of the parameter, where the optimizer was made from named parameters."""

    def parameter(self) -> torch.nn.Parameter:
        """Return a new parameter with the first values."""
        return torch.nn.Parameter(self.start.clone())


def _stand_ins(optimizer: torch.optim.Optimizer) -> list[_StandIn]:
    """Return two stand-ins for each shape of parameters under the same settings, and at least one for each group."""
    stand_ins: list[_StandIn] = []
    covered: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        settings = repr(fingerprint(_settings(group), {}))
        trained = [p for p in group["params"] if p.requires_grad and p.numel()]
        names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
        for index, parameter in enumerate(trained):
            shape = tuple(min(MAX_SIDE, side) for side in parameter.shape)
            key = repr((settings, shape, parameter.dtype, parameter.device))
            count = 2 if key not in covered else int(index == 0)
            covered.add(key)
            name = names.get(id(parameter), "")
            stand_ins += [_StandIn(number, _start(shape, parameter), name) for _ in range(count)]
    return stand_ins


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in group.items() if key != "params"}


def _start(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Draw first values as small as weights are; the first is 0, which even a step of 1e-5 moves in 16 bits."""
    start = _draw(shape, like) * 0.02
    if start.numel() > 1:
        start.view(-1)[0] = 0
    return start


def _draw(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    dtype = like.dtype if like.dtype.is_floating_point or like.dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(like.device, dtype)


def _gradients(stand_ins: list[_StandIn], step: int) -> list[torch.Tensor | None]:
    """Draw gradients, scaled differently in each step; near the end one is missing, and one is infinite."""
    gradients: list[torch.Tensor | None] = []
    for number, stand_in in enumerate(stand_ins):
        gradient = _draw(tuple(stand_in.start.shape), stand_in.start)
        gradient = gradient * SCALES[(step + number) % len(SCALES)]
        if step == STEPS - 1 and number == 0:
            gradient = gradient * float("inf")
        gradients.append(None if step == STEPS - 2 and number == len(stand_ins) - 1 else gradient)
    return gradients


@dataclass(slots=True)
class _TrialResult:
    """Effects of trial steps."""

    bits: list[Any]
    """Per step and stand-in, the bits of parameter and state."""
    changed: str = ""
    """Name of what a step changed beyond parameters and their state."""
    drew: bool = False
    wrote_gradients: bool = False


def _compare_trials(optimizer: torch.optim.Optimizer) -> OptimizerBehavior:
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, too
    stand_ins = _stand_ins(optimizer)
    gradients = [_gradients(stand_ins, step) for step in range(STEPS)]
    together = _run_trial(optimizer, stand_ins, gradients, alone=False)
    alone = _run_trial(optimizer, stand_ins, gradients, alone=True)
    drew, wrote = together.drew or alone.drew, together.wrote_gradients or alone.wrote_gradients
    finite = alone.bits[-2]  # before the infinite gradient, which moves everything
    reason = ""
    if drew:
        reason = "its step draws random numbers"
    elif changed := alone.changed or together.changed:
        reason = f"its step changes {changed}, for all parameters at once"
    elif together.bits != alone.bits:
        reason = "its update of one parameter depends on others"
    elif unmoved := next((s for s, last in zip(stand_ins, finite, strict=True) if last[0] == _bits(s.start)), None):
        shape = "x".join(map(str, unmoved.start.shape)) or "scalar"
        reason = f"its step leaves a parameter of {shape} as it is where it is alone in its group"
    return OptimizerBehavior(reason, drew, wrote)


def _run_trial(
    optimizer: torch.optim.Optimizer,
    stand_ins: list[_StandIn],
    gradients: list[list[torch.Tensor | None]],
    *,
    alone: bool,
) -> _TrialResult:
    """Run the steps with all stand-ins in one copy, or with each alone, the last first, as a plan may order them."""
    trial = _Trial(optimizer, stand_ins)
    every = list(range(len(stand_ins)))
    turns = [[index] for index in reversed(every)] if alone else [every]
    random_before = read_random_states()
    for step_gradients in gradients:
        for turn in turns:
            if not alone or step_gradients[turn[0]] is not None:  # a captured step has no update without a gradient
                trial.step(turn, step_gradients)
        trial.record()
    result = trial.finish()
    result.drew = read_random_states() != random_before
    return result


class _Trial:
    """A copy of an optimizer that steps on stand-ins."""

    def __init__(self, optimizer: torch.optim.Optimizer, stand_ins: list[_StandIn]) -> None:
        self._kind = type(optimizer)
        self._step = get_unhooked_step(optimizer)
        self._stand_ins = stand_ins
        self._parameters = [stand_in.parameter() for stand_in in stand_ins]
        self._names = {id(parameter): f"parameter {index}" for index, parameter in enumerate(self._parameters)}
        self._attributes = _copy_attributes(optimizer)
        self._groups = [_with_learning_rate(_settings(group)) for group in self._attributes["param_groups"]]
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._result = _TrialResult([])

    def step(self, turn: list[int], gradients: list[torch.Tensor | None]) -> None:
        """Step on the stand-ins of one turn, and record what changes beyond their values and state."""
        groups = [
            self._select(group, [index for index in turn if self._stand_ins[index].group == number])
            for number, group in enumerate(self._groups)
        ]
        groups = [group for group in groups if group["params"]]
        image = object.__new__(self._kind)
        vars(image).update(self._attributes, state=self._state, param_groups=groups)
        before = _print_beyond_state(image, groups, self._names)
        for index in turn:
            gradient = gradients[index]
            self._parameters[index].grad = None if gradient is None else gradient.clone()
        passed = [
            (self._parameters[index], self._parameters[index].grad, gradients[index])
            for index in turn
            if gradients[index] is not None
        ]
        with torch.no_grad():
            self._step(image)
        self._result.wrote_gradients |= any(
            p.grad is not gradient or _bits(gradient) != _bits(first) or _keeps(self._state.get(p), gradient)
            for p, gradient, first in passed
        )
        after = _print_beyond_state(image, groups, self._names)
        differing = (key for key in {**before, **after} if before.get(key) != after.get(key))
        self._result.changed = self._result.changed or next(differing, "")
        for index in turn:
            self._parameters[index].grad = None

    def _select(self, group: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """Return a group with some of the stand-ins, and with their names where it has names."""
        selected = {**group, "params": [self._parameters[index] for index in indices]}
        if "param_names" in group:
            selected["param_names"] = [self._stand_ins[index].name for index in indices]
        return selected

    def record(self) -> None:
        """Record the bits of all parameters and their state after a step."""
        self._result.bits.append([(_bits(p), fingerprint(self._state.get(p), self._names)) for p in self._parameters])

    def finish(self) -> _TrialResult:
        """Return the effects of all steps."""
        foreign = [key for key in self._state if id(key) not in self._names]
        if foreign:
            self._result.changed = self._result.changed or f"state[{foreign[0]!r}]"
        return self._result


def _keeps(state: Any, gradient: torch.Tensor | None) -> bool:
    """Return True if a gradient itself, and no copy, is part of a parameter's state."""
    leaves = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return gradient is not None and any(
        leaf.untyped_storage()._cdata == gradient.untyped_storage()._cdata for leaf in leaves
    )


def _copy_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the optimizer's attributes, without its parameters and their state."""
    copier = Copier({}, lambda tensor: tensor.detach().clone())
    attributes = {key: part for key, part in vars(optimizer).items() if key not in (*_MANAGED, "step")}
    images = {key: copier.copy(part) for key, part in attributes.items()}
    if "_need_device_dtype_check_for_fused" in images:
        images["_need_device_dtype_check_for_fused"] = False  # torch's fused optimizers clear it in their first step
    groups = [{**copier.copy(_settings(group)), "params": []} for group in optimizer.param_groups]
    return {**images, **{key: {} for key in HOOKS}, "param_groups": groups}


def _with_learning_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings under which a parameter moves: a warm-up begins with a learning rate of 0."""
    rate = settings.get("lr")
    if isinstance(rate, (int, float)) and rate == 0:
        return {**settings, "lr": 1e-3}
    if isinstance(rate, torch.Tensor) and not rate.any():
        return {**settings, "lr": torch.full_like(rate, 1e-3)}
    return settings


def _print_beyond_state(
    image: torch.optim.Optimizer, groups: list[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Return fingerprints of all attributes and settings beside parameters and their state, by name."""
    prints = {repr(key): fingerprint(part, names) for key, part in vars(image).items() if key not in _MANAGED}
    current = vars(image)["param_groups"]
    if current is not groups:
        return {**prints, "'param_groups'": fingerprint(current, names)}
    return prints | {
        repr(key): [fingerprint(group.get(key), names) for group in current] for key in {k for g in current for k in g}
    }


def _bits(tensor: torch.Tensor | None) -> Any:
    return fingerprint(tensor, {})


def _refuse_required_arguments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step with a required argument, which can only be a closure."""
    try:
        parameters = list(inspect.signature(get_unhooked_step(optimizer)).parameters.values())[1:]
    except (TypeError, ValueError):
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(parameter.default is inspect.Parameter.empty and parameter.kind in named for parameter in parameters):
        raise closure_error(optimizer)


def _refuse_used_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that fails without a closure and succeeds with one."""
    closure = RecordingClosure()
    with contextlib.suppress(Exception):
        stand_ins = _stand_ins(optimizer)
        image = object.__new__(type(optimizer))
        attributes = _copy_attributes(optimizer)
        for number, group in enumerate(attributes["param_groups"]):
            group["params"] = [s.parameter() for s in stand_ins if s.group == number]
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        vars(image).update(attributes, state=defaultdict(dict))
        get_unhooked_step(optimizer)(image, closure)
        closure.sufficed = closure.called
    if closure.sufficed:
        raise closure_error(optimizer)


@dataclass
class RecordingClosure:
    """A closure that records whether a trial step calls it."""

    called: bool = False
    sufficed: bool = False
    """The step called the closure and finished."""

    def __call__(self) -> torch.Tensor:
        self.called = True
        return torch.zeros(())


def closure_error(optimizer: torch.optim.Optimizer) -> CaptureError:
    """Return the error for an optimizer whose step computes the loss again."""
    return CaptureError(
        f"{type(optimizer).__name__}.step needs a closure that computes the loss again, which a captured step does not have; "
        "use an optimizer whose step() needs none, such as SGD or AdamW"
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
