"""Convert the planners' knobs to parameters of an Optuna study and back, and make the sampler."""

import hashlib
import json
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, install_command
from autotune.planners.knobs import Choice, Float, Int, Knob, KnobValue, Settings
from autotune.planners.space import Space, has_no_effect

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler


Parameters = dict[str, KnobValue]
"""Parameters as Optuna stores them: `recompute` is a planner's name, `recompute.greedy.share` a knob of that planner."""

BUDGET = "budget"
"""Parameter of a study of the Pareto front: share of the range between the smallest plan's bytes and the limit."""

GP_PARAMETERS, GP_TRIALS = 15, 250
"""Most parameters and trials for which a Gaussian process is worth its second per trial (as in Optuna's AutoSampler)."""


def suggest_settings(trial: "optuna.Trial", space: Space) -> Settings:
    """Suggest a planner of each kind, then only the knobs that matter for these planners."""
    names = {kind: trial.suggest_categorical(kind, list(planners)) for kind, planners in space.items()}
    settings: Settings = {}
    for kind, name in names.items():
        settings[kind] = {"planner": name}
        for knob, values in space[kind][name].items():
            if not has_no_effect(kind, knob, names, space):
                settings[kind][knob] = _suggest(trial, f"{kind}.{name}.{knob}", values)
    return settings


def to_parameters(settings: Settings, space: Space) -> tuple[Parameters, dict[str, "BaseDistribution"]]:
    """Return settings as Optuna's parameters with their distributions.

    Both are empty where the search space does not contain the settings.
    """
    from optuna.distributions import CategoricalDistribution

    names = {kind: str(settings.get(kind, {}).get("planner")) for kind in space}
    if any(name not in space[kind] for kind, name in names.items()):
        return {}, {}
    parameters: Parameters = dict(names)
    distributions: dict[str, BaseDistribution] = {kind: CategoricalDistribution(list(space[kind])) for kind in names}
    for kind, name in names.items():
        for knob, values in space[kind][name].items():
            if has_no_effect(kind, knob, names, space):
                continue
            value = settings[kind].get(knob)
            if value is None or not values.contains(value):
                return {}, {}
            key = f"{kind}.{name}.{knob}"
            parameters[key], distributions[key] = value, _distribution(values)
    return parameters, distributions


def suggest_budget(trial: "optuna.Trial") -> float:
    """Suggest the budget of a trial, as a share between 0, the smallest plan, and 1."""
    return trial.suggest_float(BUDGET, 0.0, 1.0)


def budget_parameter(share: float) -> tuple[Parameters, dict[str, "BaseDistribution"]]:
    """Return a budget's share as Optuna's parameter with its distribution."""
    from optuna.distributions import FloatDistribution

    return {BUDGET: share}, {BUDGET: FloatDistribution(0.0, 1.0)}


def is_conditional(space: Space) -> bool:
    """Return whether some knob exists only with one of several planners."""
    return any(len(planners) > 1 and any(planners.values()) for planners in space.values())


def short_digest(parts: Iterable[object]) -> str:
    """Return eight hexadecimal digits that change with any part."""
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:8]


def make_sampler(name: str, space: Space, trials: int, seed: int, *, with_budget: bool = False) -> "BaseSampler":
    """Return the sampler `tpe`, `gp`, `cmaes` or `random`; `auto` is gp where all trials share a few parameters, else tpe.

    A Gaussian process needs every parameter in every trial, so it draws the knobs of single planners at random.
    CMA-ES draws all numbers, and planners and other choices at random. `with_budget` adds the budget to the parameters.
    Raises ConfigError for another name, or where the sampler's package is not installed.
    """
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import RandomSampler, TPESampler

    count = with_budget + sum(1 + sum(map(len, planners.values())) for planners in space.values())
    small = not is_conditional(space) and count <= GP_PARAMETERS and trials < GP_TRIALS
    match "gp" if name == "auto" and small else name:
        case "gp":
            return _gaussian_process(space, seed, with_budget=with_budget)
        case "auto" | "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        case "random":
            return RandomSampler(seed=seed)
        case "cmaes":
            check_sampler(name, objective="time")
            return _cma_es(space, seed)
    raise ConfigError(f"unknown sampler {name!r}; known: auto, cmaes, gp, random, tpe")


def check_sampler(name: str, objective: str) -> None:
    """Raise ConfigError where the sampler's package is not installed, or where it cannot minimize the objective."""
    if name != "cmaes":
        return
    if find_spec("cmaes") is None:
        raise ConfigError(f"sampler 'cmaes' needs the package cmaes; install it: {install_command('cmaes')}")
    if objective != "time":
        raise ConfigError(
            f"sampler 'cmaes' minimizes one value, objective {objective!r} has several; write sampler: tpe"
        )


def _cma_es(space: Space, seed: int) -> "BaseSampler":
    import optuna

    numbers: dict[str, BaseDistribution] = {
        f"{kind}.{name}.{knob}": _distribution(values)
        for kind, planners in sorted(space.items())
        for name, knobs in sorted(planners.items())
        for knob, values in sorted(knobs.items())
        if not isinstance(values, Choice) and values.low < values.high
    }

    class EveryNumber(optuna.samplers.CmaEsSampler):
        """Sampler of all numbers in the space, also of those that a trial's planners do not have.

        Optuna's own draws only numbers that all trials share: here there may be none.
        """

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
            # a trial at fixed parameters says nothing about the numbers that would be drawn for it
            return {} if "fixed_params" in trial.system_attrs else numbers

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            """Skip Optuna's warning that constraints have no effect."""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # with a margin, Optuna keeps the drawn numbers themselves, so that a trial need not have all parameters
        return EveryNumber(seed=seed, with_margin=True, warn_independent_sampling=False)


def _gaussian_process(space: Space, seed: int, *, with_budget: bool) -> "BaseSampler":
    import optuna

    always: dict[str, BaseDistribution] = budget_parameter(1.0)[1] if with_budget else {}
    for kind, planners in space.items():
        always[kind] = optuna.distributions.CategoricalDistribution(list(planners))
        if len(planners) == 1:
            name, knobs = next(iter(planners.items()))
            always |= {
                f"{kind}.{name}.{knob}": _distribution(values)
                for knob, values in knobs.items()
                if not has_no_effect(kind, knob, {key: next(iter(names)) for key, names in space.items()}, space)
            }
    always = {key: drawn for key, drawn in sorted(always.items()) if not drawn.single()}

    class GaussianProcess(optuna.samplers.GPSampler):
        """Sampler of the parameters that all planned trials share.

        Optuna's own counts the baseline too, which has no parameters, and would share none.
        """

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
            return always

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:  # noqa: ARG002
            view = optuna.create_study(directions=study.directions)
            # trials that run on other devices count with values that keep the sampler away from them
            states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.RUNNING)
            known = study.get_trials(deepcopy=False, states=states)
            view.add_trials(old for old in known if search_space.keys() <= old.params.keys())
            view.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING))
            return super().sample_relative(view, view.trials[-1], search_space)

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
