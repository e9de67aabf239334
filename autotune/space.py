"""The planners' knobs as parameters of an Optuna study, and back; and the sampler that turns them."""

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from autotune.errors import ConfigError
from autotune.knobs import Choice, Float, Int, Knob, KnobValue
from autotune.planners import KINDS, Planner
from autotune.trial import Settings

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

Space = dict[str, dict[str, dict[str, Knob]]]
"""Per kind of planner and per planner's name its knobs."""

Parameters = dict[str, KnobValue]
"""As Optuna stores them: `recompute` is a planner's name, `recompute.greedy.share` a knob of that planner."""

GP_PARAMETERS, GP_TRIALS = 15, 250
"""A Gaussian process sampler earns its second a trial up to here (Optuna's AutoSampler draws the same line)."""


def usual_allocator(device_kind: str) -> str:
    """The one right answer on each device: glibc keeps what plans free, a GPU's caching allocator does not."""
    return "system" if device_kind == "cuda" else "arena"


def search_space(kinds: Mapping[str, Mapping[str, type[Planner]]], stores: Collection[str]) -> Space:
    """What may be searched when these stores are open; a planner that needs a store falls away without one."""
    space: Space = {}
    for kind, planners in kinds.items():
        space[kind] = {}
        for name, planner in planners.items():
            knobs = dict(planner.knobs)
            if isinstance(store := knobs.get("store"), Choice):
                open_stores = tuple(option for option in store.options if option in stores)
                if not open_stores:
                    continue
                knobs["store"] = Choice(open_stores)
            if "windows" in knobs and find_spec("ortools") is None:
                del knobs["windows"]  # none would be solved
            space[kind][name] = knobs
    return space


def chosen_space(planners: Mapping[str, Collection[str] | None], device_kind: str, stores: Collection[str]) -> Space:
    """What may be searched on a device: of each kind the planners so named, or for None those that can be right there."""
    # nothing is lost by running in place
    usual = {"allocator": (usual_allocator(device_kind),), "inplace": ("greedy",)}
    kinds = {
        kind: {name: known[name] for name in known if name in (planners.get(kind) or usual.get(kind) or known)}
        for kind, known in KINDS.items()
    }
    space = search_space(kinds, stores)
    for kind, names in space.items():
        if not names:
            raise ConfigError(f"planners.{kind}: {', '.join(kinds[kind])} needs a store; add --store ssd=DIR")
    return space


def preset(kinds: Mapping[str, Mapping[str, type[Planner]]], space: Space, names: Mapping[str, str]) -> Settings:
    """Settings of the planners so named, each knob at its planner's own default, or the nearest that is searched."""
    settings: Settings = {}
    for kind, name in names.items():
        planner = kinds[kind][name]
        own = {field.name: field.default for field in fields(cast("Any", planner)) if field.default is not MISSING}
        settings[kind] = {"planner": name}
        for knob, values in space[kind][name].items():
            if not _idle(kind, knob, names, space):
                settings[kind][knob] = own[knob] if values.holds(own.get(knob)) else _lowest(values)
    return settings


def suggest(trial: "optuna.Trial", space: Space) -> Settings:
    """Ask for a planner of each kind, then only for the knobs that matter with those."""
    names = {kind: trial.suggest_categorical(kind, list(planners)) for kind, planners in space.items()}
    settings: Settings = {}
    for kind, name in names.items():
        settings[kind] = {"planner": name}
        for knob, values in space[kind][name].items():
            if not _idle(kind, knob, names, space):
                settings[kind][knob] = _suggest(trial, f"{kind}.{name}.{knob}", values)
    return settings


def parameters(settings: Settings, space: Space) -> tuple[Parameters, dict[str, "BaseDistribution"]]:
    """Settings as Optuna's parameters with their distributions; both empty where the space no longer holds them."""
    from optuna.distributions import CategoricalDistribution

    names = {kind: str(settings.get(kind, {}).get("planner")) for kind in space}
    if any(name not in space[kind] for kind, name in names.items()):
        return {}, {}
    made: Parameters = dict(names)
    drawn: dict[str, BaseDistribution] = {kind: CategoricalDistribution(list(space[kind])) for kind in names}
    for kind, name in names.items():
        for knob, values in space[kind][name].items():
            if _idle(kind, knob, names, space):
                continue
            value = settings[kind].get(knob)
            if value is None or not values.holds(value):
                return {}, {}
            made[f"{kind}.{name}.{knob}"], drawn[f"{kind}.{name}.{knob}"] = value, _distribution(values)
    return made, drawn


def _idle(kind: str, knob: str, names: Mapping[str, str], space: Space) -> bool:
    """A share of the work is no choice where no store takes the rest: less than all of it is over the budget."""
    return kind == "recompute" and knob == "share" and "store" not in space["offload"][names["offload"]]


def conditional(space: Space) -> bool:
    """Whether some knob is there only with one of several planners."""
    return any(len(planners) > 1 and any(planners.values()) for planners in space.values())


def digest(parts: Iterable[object]) -> str:
    """Eight letters that change with any part."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:8]


def make_sampler(name: str, space: Space, trials: int, seed: int) -> "BaseSampler":
    """`tpe`, `gp` or `random`; `auto` is gp where every trial has the same few parameters, tpe otherwise.

    A Gaussian process needs every parameter in every trial, so it draws knobs that hang on a planner at random.
    """
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import RandomSampler, TPESampler

    count = sum(1 + sum(map(len, planners.values())) for planners in space.values())
    small = not conditional(space) and count <= GP_PARAMETERS and trials < GP_TRIALS
    match "gp" if name == "auto" and small else name:
        case "gp":
            return _gaussian_process(space, seed)
        case "auto" | "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        case "random":
            return RandomSampler(seed=seed)
    raise ConfigError(f"unknown sampler {name!r}; known: auto, gp, random, tpe")


def _gaussian_process(space: Space, seed: int) -> "BaseSampler":
    import optuna

    always: dict[str, BaseDistribution] = {}
    for kind, planners in space.items():
        always[kind] = optuna.distributions.CategoricalDistribution(list(planners))
        if len(planners) == 1:
            name, knobs = next(iter(planners.items()))
            always |= {
                f"{kind}.{name}.{knob}": _distribution(values)
                for knob, values in knobs.items()
                if not _idle(kind, knob, {key: next(iter(names)) for key, names in space.items()}, space)
            }
    always = {key: drawn for key, drawn in sorted(always.items()) if not drawn.single()}

    class GaussianProcess(optuna.samplers.GPSampler):
        """Optuna's takes the parameters that all trials share: with a baseline that has none, no parameter at all."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
            return always

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:  # noqa: ARG002
            seen = optuna.create_study(directions=study.directions)
            done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
            seen.add_trials(known for known in done if search_space.keys() <= known.params.keys())
            seen.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
            return super().sample_relative(seen, seen.trials[-1], search_space)

    return GaussianProcess(seed=seed, warn_independent_sampling=False)


def _suggest(trial: "optuna.Trial", key: str, knob: Knob) -> KnobValue:
    match knob:
        case Int(low, high, log):
            return trial.suggest_int(key, low, high, log=log)
        case Float(low, high, log):
            return trial.suggest_float(key, low, high, log=log)
        case Choice(options):
            return trial.suggest_categorical(key, list(options))


def _distribution(knob: Knob) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match knob:
        case Int(low, high, log):
            return IntDistribution(low, high, log=log)
        case Float(low, high, log):
            return FloatDistribution(low, high, log=log)
        case Choice(options):
            return CategoricalDistribution(list(options))


def _lowest(knob: Knob) -> KnobValue:
    return knob.options[0] if isinstance(knob, Choice) else knob.low
