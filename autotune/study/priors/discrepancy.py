"""Calibrate observations that were not measured here, by the trials that were.

The model is Kennedy and O'Hagan's (2000) for a cheap and an exact source, on logarithms of time ratios:

    measured(s) = intercept + slope * observed(s) + difference(s) + noise

Slope and intercept are a Bayesian linear regression per source. `difference` is a Gaussian process over the settings: where
measured trials are slower than predicted, settings nearby are expected to be slower, too. Finally each value is shrunk
towards the mean of its source, more if its error is larger: a noisy source influences the sampler less.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.records.trial import Trial, TrialKind
from autotune.study.priors.distance import settings_distance
from autotune.study.priors.observations import PriorObservation, PriorSource
from autotune.study.verdicts.ranking import Rules, measured_ratio, plan_hash

if TYPE_CHECKING:
    import numpy as np

MEASURED_KINDS = (TrialKind.SEED, TrialKind.PLANNER, TrialKind.SEARCH)
"""Kinds of trials that calibrate: their plans follow from settings and the study's budget, and were measured once."""
MATCH_DISTANCE = 0.1
"""Maximum distance of settings at which an observation of another run is paired with a measured trial."""
REACH = 0.5
"""Distance of settings at which the correlation of their differences falls to 1/e; a different planner adds 1."""
LOCAL_SHARE = 0.75
"""Share of the error's variance that settings nearby have in common; the rest is noise of single settings."""
ASSUMED_PAIRS = 4
"""Number of measured trials as which the assumed error counts."""
SLOPE_ERROR = 0.5
"""Standard deviation assumed for the slope around 1."""


@dataclass(frozen=True, slots=True)
class AssumedError:
    """Errors of a source until trials are measured, as standard deviations of logarithms of time ratios."""

    level: float
    """Error that all settings of the source share."""
    setting: float
    """Error of single settings."""


ASSUMED: dict[PriorSource, AssumedError] = {
    # experiments/benchmarks/frontier: measured times were 0.6 to 1.25 of the predicted ones, and within 15 % relative to
    # other plans of the model; the other rows are assumptions, which measured trials replace
    PriorSource.SIMULATED: AssumedError(0.25, 0.06),
    PriorSource.SAME_STUDY: AssumedError(0.05, 0.03),
    PriorSource.OTHER_DEVICE: AssumedError(0.25, 0.10),
    PriorSource.OTHER_GRAPH: AssumedError(1.0, 0.15),
    PriorSource.OTHER_GRAPH_AND_DEVICE: AssumedError(1.0, 0.20),
}
"""Assumed errors of each source."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """An observation with its calibrated time ratio."""

    observation: PriorObservation
    time_ratio: float
    error: float
    """Standard deviation of the ratio's logarithm."""
    number: int
    """Position of the observation among all of the study."""


@dataclass
class Calibration:
    """Calibrated time ratios of one study's observations, updated with each measured trial."""

    observations: Sequence[PriorObservation]
    rules: Rules
    _distances: list[list[float]] = field(default_factory=list)
    """Distances to all observations, by measured trial."""
    _among: list[list[float]] = field(default_factory=list)
    """Distances to the measured trials before it, by measured trial."""
    _last: list[Calibrated] | None = None

    def update(self, trials: Sequence[Trial]) -> list[Calibrated]:
        """Return the observations in order, calibrated by the trials so far; the same list if none was measured since.

        Observations of a plan that was measured are left out.
        """
        measured = [trial for trial in trials if _measured_log(trial, self.rules) is not None]
        if self._last is not None and len(measured) == len(self._distances):
            return self._last
        for row in range(len(self._distances), len(measured)):
            settings = measured[row].settings
            self._distances.append(
                [settings_distance(observation.settings, settings) for observation in self.observations]
            )
            self._among.append([settings_distance(other.settings, settings) for other in measured[:row]])
        calibrated: dict[int, Calibrated] = {}
        for source in PriorSource:
            indices = [index for index, observation in enumerate(self.observations) if observation.source is source]
            if indices:
                calibrated |= dict(zip(indices, self._calibrate(source, indices, measured), strict=True))
        plans = {plan_hash(trial.plan) for trial in measured if trial.plan is not None}
        self._last = [calibrated[index] for index in sorted(calibrated) if self.observations[index].plan not in plans]
        return self._last

    def _calibrate(self, source: PriorSource, indices: Sequence[int], measured: Sequence[Trial]) -> list[Calibrated]:
        import numpy as np

        observed = np.array([math.log(self.observations[index].score.time_ratio) for index in indices])
        distances = np.array(self._distances, dtype=float).reshape(len(measured), len(self.observations))[
            :, list(indices)
        ]
        middle = float(observed.mean())
        paired, predicted = self._pair(source, observed, distances, measured)
        results = np.array([_measured_log(measured[row], self.rules) for row in paired], dtype=float)
        assumed = ASSUMED[source]
        level, slope, variance = _regress(np.array(predicted) - middle, results - middle, assumed)
        if (
            not paired and measured and not source.has_bytes
        ):  # only ratios between settings hold; the trials set the level
            level = statistics.median(_measured_log(trial, self.rules) or 0.0 for trial in measured) - middle
        values = middle + level + slope * (observed - middle)
        errors = np.full(len(values), math.sqrt(variance))
        if paired:
            residuals = results - (middle + level + slope * (np.array(predicted) - middle))
            among = [[0.0 if a == b else self._among[max(a, b)][min(a, b)] for b in paired] for a in paired]
            covariance = LOCAL_SHARE * variance * np.exp(-np.array(among) / REACH)
            covariance += (1 - LOCAL_SHARE) * variance * np.eye(len(paired))
            cross = LOCAL_SHARE * variance * np.exp(-distances[paired] / REACH)
            weights = np.linalg.solve(covariance, cross)
            values = values + weights.T @ residuals
            explained = np.einsum("ij,ij->j", cross, weights)
            errors = np.sqrt(np.clip(variance - explained, 0.1 * variance, None))
        # the best of many uncertain values is partly lucky: the less certain, the nearer to the mean of its source
        spread = float(values.var())
        values = values.mean() + (values - values.mean()) * spread / (spread + errors**2)
        return [
            Calibrated(self.observations[index], math.exp(value), float(error), index)
            for index, value, error in zip(indices, values.tolist(), errors.tolist(), strict=True)
        ]

    def _pair(
        self, source: PriorSource, observed: "np.ndarray", distances: "np.ndarray", measured: Sequence[Trial]
    ) -> tuple[list[int], list[float]]:
        """Return the measured trials that the source predicts, by index, with the logarithms of the predicted ratios."""
        if source is PriorSource.SIMULATED:
            logs = [_estimated_log(trial, self.rules) for trial in measured]
            return [row for row, log in enumerate(logs) if log is not None], [log for log in logs if log is not None]
        rows = [row for row in range(len(measured)) if distances[row].min() <= MATCH_DISTANCE]
        return rows, [float(observed[distances[row].argmin()]) for row in rows]


def _regress(predicted: "np.ndarray", results: "np.ndarray", assumed: AssumedError) -> tuple[float, float, float]:
    """Return level, slope and error variance of `results` over `predicted`, both relative to the source's mean."""
    import numpy as np

    variance, level, slope = assumed.setting**2, 0.0, 1.0
    precision = np.diag([assumed.level**-2, SLOPE_ERROR**-2])
    inputs = np.column_stack([np.ones(len(predicted)), predicted])
    for _ in range(3):  # the variance depends on the line, and the line on the variance
        normal = inputs.T @ inputs / variance + precision
        level, slope = np.linalg.solve(normal, inputs.T @ results / variance + precision @ np.array([0.0, 1.0]))
        residuals = results - inputs @ np.array([level, slope])
        variance = (ASSUMED_PAIRS * assumed.setting**2 + float(residuals @ residuals)) / (ASSUMED_PAIRS + len(results))
    return float(level), float(slope), variance


def _measured_log(trial: Trial, rules: Rules) -> float | None:
    """Return the logarithm of a trial's time ratio; None where it was not measured for this calibration."""
    if trial.kind not in MEASURED_KINDS or trial.measurement is None:
        return None
    ratio = measured_ratio(trial.measurement, rules)
    return math.log(ratio) if ratio else None


def _estimated_log(trial: Trial, rules: Rules) -> float | None:
    if trial.estimate is None or not trial.estimate.seconds or not rules.baseline_seconds:
        return None
    return math.log(trial.estimate.seconds / rules.baseline_seconds)
