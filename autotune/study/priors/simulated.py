"""Plan and simulate settings from the whole search space, without a measurement."""

import time
from collections.abc import Sequence
from dataclasses import replace

from autotune.errors import InfeasibleError, PlanError, StoreError
from autotune.planners.candidates import Planning
from autotune.planners.space import Space
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.optuna_space import suggest_settings
from autotune.study.priors.observations import PriorObservation, PriorSource
from autotune.study.verdicts.ranking import Rules, plan_hash, score_trial


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

    The settings are drawn at random over the space; those without a valid plan are left out.
    """
    import optuna

    until = time.monotonic() + seconds
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    observations: list[PriorObservation] = []
    for number in range(count):
        if time.monotonic() >= until:
            break
        request = study.ask()
        settings = suggest_settings(request, space)
        try:
            candidate = planning.make_candidate(settings, target_bytes)
        except (PlanError, InfeasibleError, StoreError):
            study.tell(request, state=optuna.trial.TrialState.FAIL)
            continue
        trial = Trial(number, TrialKind.SEARCH, "", "", settings, candidate.plan, candidate.estimate)
        score = score_trial(_as_completed(trial), rules, overheads)
        study.tell(request, score.time_ratio)
        if score.time_ratio > 0:
            observations.append(PriorObservation(PriorSource.SIMULATED, settings, score, plan_hash(candidate.plan)))
    return tuple(observations)


def _as_completed(trial: Trial) -> Trial:
    """Return the trial with a result that holds no number, so that its score is the simulator's."""
    return replace(trial, measurement=Measurement(Outcome.OK))
