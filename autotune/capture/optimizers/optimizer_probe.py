"""Find out whether an optimizer updates each parameter alone, by trial steps on small stand-ins."""

import contextlib
import inspect
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autotune.capture.optimizers.optimizer_copy import (
    HOOKS,  # fmt: skip
    Copier,  # fmt: skip
    fingerprint,  # fmt: skip
    inner_optimizers,  # fmt: skip
    random_states,  # fmt: skip
    reached,  # fmt: skip
    step_is_replaced,  # fmt: skip
    unhooked_step,  # fmt: skip
)
from autotune.errors import CaptureError

STEPS = 8
"""Trial steps: RAdam computes something else from its sixth on."""
SCALES = (1.0, 1e-4, 1e4, 1e-2, 30.0)
"""Factors of the stand-ins' gradients, in turn: a clipped norm is to be above its limit, and below it."""
LARGEST_SIDE = 4
"""Elements of a stand-in along each dimension, at most."""
_OWN = ("param_groups", "state", *HOOKS)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How an optimizer updates."""

    across: str = ""
    """Why it has to be stepped whole, as in "Lamb ...": empty where each parameter can be updated alone."""
    draws: bool = False
    """Its step draws random numbers, or may."""
    writes_gradients: bool = False
    """Its step changes gradients in place, or may."""


def independent(optimizer: torch.optim.Optimizer) -> str:
    """Return an empty string if each parameter can be updated alone, else the reason why not."""
    return probe(optimizer).across


def probe(optimizer: torch.optim.Optimizer) -> Behaviour:
    """Step copies of the optimizer on stand-ins, together and one by one; the optimizer itself is only read.

    CaptureError for one whose step calls a closure, which no captured step has.
    """
    with _disable_current_modes(), generators_kept(_parameters(optimizer)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _refuse_closure(optimizer)
        if reason := _beyond_groups(optimizer):
            return Behaviour(reason, draws=True, writes_gradients=True)
        try:
            return _compared(optimizer)
        except Exception as error:  # noqa: BLE001 - whatever a user's step raises on tensors that are not its own
            _refuse_used_closure(optimizer)
            problem = f"its step on small stand-ins ends in {type(error).__name__}: {_first_line(error)}"
            return Behaviour(problem, draws=True, writes_gradients=True)


def _beyond_groups(optimizer: torch.optim.Optimizer) -> str:
    """Return what stand-ins in the groups could not show: an optimizer that holds more than its groups and state."""
    held = vars(optimizer)
    if step_is_replaced(optimizer):
        return "its step is replaced on the object"
    if inner := inner_optimizers(optimizer):
        return f"it holds another optimizer ({type(inner[0]).__name__})"
    if "param_groups" not in held or "state" not in held:
        return "its parameter groups and state are not its own"
    beside = [part for key, part in held.items() if key not in _OWN]
    beside += [part for group in optimizer.param_groups for key, part in group.items() if key != "params"]
    if any(isinstance(part, torch.nn.Module) for part in beside):
        return "it holds a module"
    if any(
        isinstance(part, torch.nn.Parameter) or (isinstance(part, torch.Tensor) and part.numel() > 1)
        for part in reached(beside)
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

    def parameter(self) -> torch.nn.Parameter:
        """Return a fresh parameter with the first values."""
        return torch.nn.Parameter(self.start.clone())


def _stand_ins(optimizer: torch.optim.Optimizer) -> list[_StandIn]:
    """Two for each shape of parameters under the same settings, and at least one for each group."""
    found: list[_StandIn] = []
    seen: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        settings = repr(fingerprint(_settings(group), {}))
        trained = [p for p in group["params"] if p.requires_grad and p.numel()]
        for at, parameter in enumerate(trained):
            shape = tuple(min(LARGEST_SIDE, side) for side in parameter.shape)
            key = repr((settings, shape, parameter.dtype, parameter.device))
            count = 2 if key not in seen else int(at == 0)
            seen.add(key)
            found += [_StandIn(number, _start(shape, parameter)) for _ in range(count)]
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in group.items() if key != "params"}


def _start(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Draw first values as small as weights are; from 0 even a step of 1e-5 moves a number of 16 bits."""
    start = _drawn(shape, like) * 0.02
    if start.numel() > 1:
        start.view(-1)[0] = 0
    return start


def _drawn(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    dtype = like.dtype if like.dtype.is_floating_point or like.dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(like.device, dtype)


def _gradients(stand_ins: list[_StandIn], step: int) -> list[torch.Tensor | None]:
    """Of other sizes in each step; near the end one parameter has none, or one that is infinite."""
    found: list[torch.Tensor | None] = []
    for number, stand_in in enumerate(stand_ins):
        gradient = _drawn(tuple(stand_in.start.shape), stand_in.start)
        gradient = gradient * SCALES[(step + number) % len(SCALES)]
        if step == STEPS - 1 and number == 0:
            gradient = gradient * float("inf")
        found.append(None if step == STEPS - 2 and number == len(stand_ins) - 1 else gradient)
    return found


@dataclass(slots=True)
class _Trial:
    """What trial steps led to."""

    bits: list[Any]
    """Per step and stand-in, parameter and state."""
    changed: str = ""
    """Name of what a step changed beyond parameters and their state."""
    drew: bool = False
    wrote: bool = False


def _compared(optimizer: torch.optim.Optimizer) -> Behaviour:
    torch.manual_seed(0)
    stand_ins = _stand_ins(optimizer)
    gradients = [_gradients(stand_ins, step) for step in range(STEPS)]
    together = _trial(optimizer, stand_ins, gradients, alone=False)
    alone = _trial(optimizer, stand_ins, gradients, alone=True)
    drew, wrote = together.drew or alone.drew, together.wrote or alone.wrote
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
    return Behaviour(reason, drew, wrote)


def _trial(
    optimizer: torch.optim.Optimizer,
    stand_ins: list[_StandIn],
    gradients: list[list[torch.Tensor | None]],
    *,
    alone: bool,
) -> _Trial:
    """Take the steps with all stand-ins in one copy, or with each alone, the last first, as a plan may order them."""
    parameters = [stand_in.parameter() for stand_in in stand_ins]
    names = {id(parameter): f"parameter {at}" for at, parameter in enumerate(parameters)}
    base = _copy(optimizer)
    state: defaultdict[Any, Any] = defaultdict(dict)
    groups = [_with_learning_rate(_settings(group)) for group in base["param_groups"]]
    every = [at for at, _ in enumerate(parameters)]
    turns = [[at] for at in reversed(every)] if alone else [every]
    trial = _Trial([])
    random_before = random_states()
    for due in gradients:
        for turn in turns:
            if alone and due[turn[0]] is None:
                continue  # a captured step has no update for it
            held = [{**group, "params": [parameters[at] for at in turn if stand_ins[at].group == number]}
                    for number, group in enumerate(groups)]  # fmt: skip
            held = [group for group in held if group["params"]]
            made = object.__new__(type(optimizer))
            vars(made).update(base, state=state, param_groups=held)
            before = _beyond_state(made, held, names)
            for at in turn:
                gradient = due[at]
                parameters[at].grad = None if gradient is None else gradient.clone()
            kept = [(parameters[at], parameters[at].grad, due[at]) for at in turn if due[at] is not None]
            with torch.no_grad():
                unhooked_step(optimizer)(made)
            trial.wrote |= any(p.grad is not g or _bits(g) != _bits(first) for p, g, first in kept)
            after = _beyond_state(made, held, names)
            trial.changed = trial.changed or next(
                (key for key in {**before, **after} if before.get(key) != after.get(key)), ""
            )
            for at in turn:
                parameters[at].grad = None
        trial.bits.append([(_bits(p), fingerprint(state.get(p), names)) for p in parameters])
    strangers = [key for key in state if id(key) not in names]
    if strangers:
        trial.changed = trial.changed or f"state[{strangers[0]!r}]"
    trial.drew = random_states() != random_before
    return trial


def _copy(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the optimizer's attributes, without its parameters and their state."""
    copier = Copier({}, lambda tensor: tensor.detach().clone())
    held = {key: part for key, part in vars(optimizer).items() if key not in (*_OWN, "step")}
    made = {key: copier.copied(part) for key, part in held.items()}
    groups = [{**copier.copied(_settings(group)), "params": []} for group in optimizer.param_groups]
    return {**made, **{key: {} for key in HOOKS}, "param_groups": groups}


def _with_learning_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under which a parameter moves: a warm-up begins with a rate of 0."""
    rate = settings.get("lr")
    if isinstance(rate, (int, float)) and rate == 0:
        return {**settings, "lr": 1e-3}
    if isinstance(rate, torch.Tensor) and not rate.any():
        return {**settings, "lr": torch.full_like(rate, 1e-3)}
    return settings


def _beyond_state(made: torch.optim.Optimizer, groups: list[dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """Return what an optimizer holds beside parameters and their state, by name, to compare."""
    found = {repr(key): fingerprint(part, names) for key, part in vars(made).items() if key not in _OWN}
    held = vars(made)["param_groups"]
    if held is not groups:
        return {**found, "'param_groups'": fingerprint(held, names)}
    return found | {
        repr(key): [fingerprint(group.get(key), names) for group in held] for key in {k for g in held for k in g}
    }


def _bits(tensor: torch.Tensor | None) -> Any:
    return fingerprint(tensor, {})


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that has to be passed something."""
    try:
        parameters = list(inspect.signature(unhooked_step(optimizer)).parameters.values())[1:]
    except (TypeError, ValueError):
        return
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(one.default is inspect.Parameter.empty and one.kind in plain for one in parameters):
        raise needs_closure(optimizer)


def _refuse_used_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that fails by itself and calls a closure that it is passed."""
    closure = Closure()
    with contextlib.suppress(Exception):
        stand_ins = _stand_ins(optimizer)
        made = object.__new__(type(optimizer))
        base = _copy(optimizer)
        for number, group in enumerate(base["param_groups"]):
            group["params"] = [s.parameter() for s in stand_ins if s.group == number]
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        vars(made).update(base, state=defaultdict(dict))
        unhooked_step(optimizer)(made, closure)
        closure.served = closure.called
    if closure.served:
        raise needs_closure(optimizer)


@dataclass
class Closure:
    """A closure for a trial step that fails without one."""

    called: bool = False
    served: bool = False
    """The step called it and came to its end: a closure is what it needs."""

    def __call__(self) -> torch.Tensor:
        self.called = True
        return torch.zeros(())


def needs_closure(optimizer: torch.optim.Optimizer) -> CaptureError:
    """Return the error for an optimizer whose step computes the loss again."""
    return CaptureError(
        f"{type(optimizer).__name__}.step needs a closure that computes the loss again, which a captured step does not have; "
        "use an optimizer whose step() needs none, as SGD or AdamW"
    )


@contextlib.contextmanager
def generators_kept(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore afterwards every generator that a trial step may draw from."""
    numpy = sys.modules.get("numpy")
    python, theirs = random.getstate(), numpy.random.get_state() if numpy is not None else None
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(theirs)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
