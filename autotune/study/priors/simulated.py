"""Plan and simulate settings from the whole search space, without a measurement."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import InfeasibleError, PlanError, StoreError
from autotune.planners.candidates import Planning
from autotune.planners.space import Space
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.optuna_space import make_sampler, suggest_settings
from autotune.study.priors.observations import PriorObservation, PriorSource
from autotune.study.verdicts.ranking import Rules, score_trial


def simulate_settings(
    planning: Planning,
    space: Space,
    rules: Rules,
    *,
    target_bytes: int,
    overheads: Sequence[float],
    count: int,
    seconds: float,
    seed: int,
) -> tuple[PriorObservation, ...]:
    """Return the predicted scores of at most `count` settings, made within about `seconds`.

    The first half is drawn at random over the space; a sampler draws the second half near the best predictions. Settings
    without a valid plan are left out.
    """
    import optuna

    until = time.monotonic() + seconds
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    observations: list[PriorObservation] = []
    for number in range(count):
        if time.monotonic() >= until:
            break
        if number == count // 2:
            study.sampler = make_sampler("tpe", space, count, seed)
        request = study.ask()
        settings = suggest_settings(request, space)
        try:
            candidate = planning.make_candidate(settings, target_bytes)
        except (PlanError, InfeasibleError, StoreError):
            study.tell(request, state=optuna.trial.TrialState.FAIL)
            continue
        trial = Trial(number, TrialKind.SEARCH, "", "", settings, candidate.plan, candidate.estimate)
        score = score_trial(_as_completed(trial), rules, overheads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            request.set_constraint("memory", score.memory)
        study.tell(request, score.time_ratio)
        if score.time_ratio > 0:
            observations.append(PriorObservation(PriorSource.SIMULATED, settings, score))
    return tuple(observations)


def _as_completed(trial: Trial) -> Trial:
    """Return the trial with a result that holds no number, so that its score is the simulator's."""
    return replace(trial, measurement=Measurement(Outcome.OK))
