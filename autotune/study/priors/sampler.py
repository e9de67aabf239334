"""Show a sampler observations that the study does not contain."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler
from optuna.trial import FrozenTrial, TrialState

from autotune.planners.space import Space
from autotune.study.optuna_space import to_parameters
from autotune.study.priors.discrepancy import Calibrated
from autotune.study.verdicts.ranking import TrialScore

PLAIN_EVERY = 3
"""Number of suggestions of which one is made from measured trials alone, so that wrong priors cost at most that factor."""
MOST_FOR_GAUSSIAN_PROCESS = 40
"""Maximum number of observations for a Gaussian process, whose time grows with their cube."""


class PriorSampler(BaseSampler):
    """Sampler that reads calibrated observations beside the study's trials.

    The wrapped sampler works on a copy of the study in memory, in which the observations are the oldest trials. The study
    itself is only read.
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
        self._view: tuple[int, optuna.Study, FrozenTrial] | None = None

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

    def make_observations(self, measured: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return the observations as completed trials; those whose parameters were measured are left out.

        The time ratio varies by the error of its calibration, with fixed random numbers: an uncertain observation may
        rank before or after its peers.
        """
        done = [trial.params for trial in measured]
        completed = []
        for index, one in enumerate(self._calibrate()):
            params, distributions = to_parameters(one.observation.settings, self._space)
            if (
                not params
                or params in done
                or ("step_bytes" in self._objectives and not one.observation.source.has_bytes)
            ):
                continue
            score = one.observation.score
            factor = random.Random(f"{self._seed} {index}").lognormvariate(0.0, one.error)
            values = self._values(score, one.time_ratio * factor)
            completed.append(
                optuna.trial.create_trial(
                    values=values,
                    params=params,
                    distributions=distributions,
                    constraints={"memory": score.memory, "numerics": score.numerics},
                )
            )
        return self._thin_out(completed)

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
        if self._view is not None and self._view[0] == trial.number:
            return self._view[1:]
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        others = [old for old in study.get_trials(deepcopy=False, states=states) if old.number != trial.number]
        view = optuna.create_study(directions=study.directions)
        if trial.number % PLAIN_EVERY:
            view.add_trials(self.make_observations(others))
        view.add_trials(others)
        view.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING))
        self._view = trial.number, view, view.get_trials(deepcopy=False)[-1]
        return self._view[1:]
