"""Show a sampler the trials that have settings, and observations that the study does not contain."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.planners.space import Space
from autotune.records.trial import TrialKind
from autotune.study.optuna_space import Parameters, to_parameters
from autotune.study.priors.discrepancy import Calibrated
from autotune.study.verdicts.ranking import TrialScore

PLAIN_EVERY = 3
"""One in so many suggestions reads measured trials alone: wrong priors slow the search by at most this factor."""
SUGGESTED = (TrialKind.SEARCH, TrialKind.REPEAT)
"""Kinds of the trials that a sampler suggested."""
MOST_FOR_GAUSSIAN_PROCESS = 40
"""Maximum number of observations for a Gaussian process, whose time grows with their cube."""


class PriorSampler(BaseSampler):
    """Sampler that reads calibrated observations beside the study's trials, and no trial without settings.

    The wrapped sampler works on a copy of the study in memory, in which the observations are the oldest trials. The study
    itself is only read. The baseline, the smallest plan and moves have no settings. A sampler that learns what good settings
    are would count them among the good trials and learn nothing from them.
    """

    def __init__(
        self,
        sampler: BaseSampler,
        space: Space,
        objectives: Sequence[str],
        calibrate: Callable[[], Sequence[Calibrated]],
        seed: int,
    ) -> None:
        self.sampler = sampler
        self._space, self._objectives, self._calibrate, self._seed = space, tuple(objectives), calibrate, seed
        self._converted: dict[int, tuple[Parameters, dict[str, BaseDistribution]]] = {}
        self._copies: dict[bool, _StudyCopy] = {}
        """Copy of the study with observations, and the one without."""
        self._current: tuple[int, optuna.Study, FrozenTrial] | None = None
        """Number of the trial in progress, with the copy of the study and of the trial."""

    def reseed_rng(self) -> None:
        """Reseed the wrapped sampler."""
        self.sampler.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the parameters that the wrapped sampler draws together."""
        return self.sampler.infer_relative_search_space(*self._copy(study, trial))

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw parameters together with the wrapped sampler."""
        return self.sampler.sample_relative(*self._copy(study, trial), search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one parameter with the wrapped sampler."""
        return self.sampler.sample_independent(*self._copy(study, trial), param_name, param_distribution)

    def make_observations(self, calibrated: Sequence[Calibrated]) -> list[FrozenTrial]:
        """Return the observations as completed trials; settings outside of the search space are left out."""
        completed = []
        for prior in calibrated:
            score, (params, distributions) = prior.observation.score, self._parameters(prior)
            if not params or ("step_bytes" in self._objectives and not prior.observation.source.has_bytes):
                continue
            completed.append(
                optuna.trial.create_trial(
                    values=self._values(score, prior.time_ratio),
                    params=params,
                    distributions=distributions,
                    constraints={"memory": score.memory, "numerics": score.numerics},
                )
            )
        return self._thin_out(completed)

    def _parameters(self, prior: Calibrated) -> tuple[Parameters, dict[str, BaseDistribution]]:
        if prior.number not in self._converted:
            self._converted[prior.number] = to_parameters(prior.observation.settings, self._space)
        return self._converted[prior.number]

    def _values(self, score: TrialScore, time_ratio: float) -> list[float]:
        return [time_ratio if name == "time_ratio" else float(getattr(score, name)) for name in self._objectives]

    def _thin_out(self, completed: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return all observations, or for a Gaussian process the fastest ones and a sample of the others."""
        if not isinstance(self.sampler, GPSampler) or len(completed) <= MOST_FOR_GAUSSIAN_PROCESS:
            return completed
        ordered = sorted(completed, key=lambda trial: (trial.constraints["memory"] > 0, trial.values[-1]))
        half = MOST_FOR_GAUSSIAN_PROCESS // 2
        return ordered[:half] + random.Random(self._seed).sample(ordered[half:], half)

    def _copy(self, study: optuna.Study, trial: FrozenTrial) -> tuple[optuna.Study, FrozenTrial]:
        """Return a copy of the study with the observations before its trials, and the copy of this trial."""
        if self._current is not None and self._current[0] == trial.number:
            return self._current[1:]
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        done = [old for old in finished if old.params]
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        pending = [old for old in running if old.params and old.number != trial.number]
        suggestions = len(pending) + sum(old.user_attrs.get("kind") in SUGGESTED for old in done)
        calibrated = self._calibrate() if suggestions % PLAIN_EVERY else ()
        copy = self._copies.get(bool(calibrated))
        if copy is None or copy.is_outdated(calibrated, done):
            copy = self._copies[bool(calibrated)] = _StudyCopy(
                optuna.create_study(directions=study.directions), calibrated
            )
            params = [old.params for old in done]
            copy.study.add_trials(prior for prior in self.make_observations(calibrated) if prior.params not in params)
        self._current = trial.number, copy.study, copy.begin_trial(done, pending)
        return self._current[1:]


@dataclass
class _StudyCopy:
    """A study in memory: observations first, then the trials of the study itself."""

    study: optuna.Study
    calibrated: Sequence[Calibrated]
    copied: set[int] = field(default_factory=set)
    """Numbers of the trials that were copied."""

    def is_outdated(self, calibrated: Sequence[Calibrated], done: Sequence[FrozenTrial]) -> bool:
        """Return True if an observation changed its value, or if a new trial has the parameters of one."""
        if calibrated is not self.calibrated:
            return True
        observed = [old.params for old in self.study.get_trials(deepcopy=False)[: len(calibrated)]]
        return any(new.params in observed for new in done if new.number not in self.copied)

    def begin_trial(self, done: Sequence[FrozenTrial], pending: Sequence[FrozenTrial]) -> FrozenTrial:
        """Add the trials that are not copied yet and those that run, and return a new running trial.

        Beside observations a repeat (a plan that was measured before) gets the highest values of all trials. With the values
        of its plan, the sampler would suggest the same settings again and again.
        """
        states = (TrialState.RUNNING,)
        for old in self.study.get_trials(
            deepcopy=False, states=states
        ):  # earlier suggestions; `done` has their results
            self.study.tell(old.number, state=TrialState.FAIL)
        slowest = [max(values) for values in zip(*(old.values for old in done), strict=True)]
        for new in done:
            if new.number not in self.copied:
                is_avoided = self.calibrated and new.user_attrs.get("kind") == TrialKind.REPEAT
                self.study.add_trial(_replace_values(new, slowest) if is_avoided else new)
        self.copied |= {new.number for new in done}
        self.study.add_trials(_copy_running(old) for old in pending)
        self.study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING))
        return self.study.get_trials(deepcopy=False)[-1]


def _replace_values(trial: FrozenTrial, values: Sequence[float]) -> FrozenTrial:
    return optuna.trial.create_trial(
        values=values,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
        constraints=dict(trial.constraints),
    )


def _copy_running(trial: FrozenTrial) -> FrozenTrial:
    return optuna.trial.create_trial(state=TrialState.RUNNING, params=trial.params, distributions=trial.distributions)
