"""What a trial is worth: which plans fit, what each costs in time, and which one wins. Pure functions of records."""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autotune.ir.plan import Plan
from autotune.predict.simulate import Estimate
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome, held_to
from autotune.records.trial import Trial
from autotune.units import fmt_bytes

ASSUMED_WASTE = 0.03
"""Of a plan's bytes, that the allocator holds on top of them: until the first plan was measured."""
NOTABLE = 0.01
"""Share of bytes below which a smaller plan is no better than one as fast: a process's charge varies by as much."""
TIE = 0.02
"""Share of time that is given up for bytes at most, however noisy the times are: all that fit the budget are small enough."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the trials of one study are held to."""

    budget_bytes: int
    """What the step itself may take."""
    floor_bytes: int
    """Of a process that runs plans."""
    tolerance: float | None
    """Largest `max_error` that is accepted; None where eager fits at no batch size, so that nothing can be compared."""
    baseline_seconds: float
    """Predicted for the traced plan; stands in where the baseline never ran."""

    @property
    def allowed_bytes(self) -> int:
        """What the whole process may be charged."""
        return self.floor_bytes + self.budget_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the search is told of a trial. A constraint above 0 is violated."""

    time_ratio: float
    """Step over the baseline's."""
    step_bytes: int
    memory: float
    numerics: float
    imputed: bool
    """Ratio and bytes are the simulator's: nothing was measured."""


def baseline_step_bytes(measurement: Measurement) -> int | None:
    """The bytes that a budget's percentage is taken of: what eager needs itself, without its allocator's waste."""
    return measurement.step_charged_bytes if measurement.step_peak_bytes is None else measurement.step_peak_bytes


def wastes(trials: Iterable[Trial]) -> list[float]:
    """Per measured plan the share that it was charged above its estimate."""
    found = []
    for trial in trials:
        seen, predicted = trial.measurement, trial.estimate
        taken = _step_taken(seen) if seen is not None and trial.kind != "repeat" else None
        if predicted is not None and taken is not None:
            found.append(taken / max(predicted.peak_bytes, 1) - 1)
    return found


def waste(seen: Sequence[float]) -> float:
    """The most that was seen, less outliers (Tukey 1977: half as far again above the upper quartile as the quartiles lie
    apart, and more), so that nearly all plans made with it fit; never negative.
    """
    if not seen:
        return ASSUMED_WASTE
    ordered = sorted(seen)
    low, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.25, 0.75))
    return max(0.0, *(one for one in ordered if one <= high + 1.5 * (high - low)))


def aim_bytes(budget_bytes: int, seen: Sequence[float]) -> int:
    """What planners are told to meet so that the charge meets the budget."""
    return int(budget_bytes / (1 + waste(seen)))


def plan_hash(plan: Plan) -> str:
    """Identity of a plan."""
    return hashlib.sha256(json.dumps(to_json(plan)).encode()).hexdigest()[:16]


def judge(measurement: Measurement, rules: Rules) -> Measurement:
    """The measurement with the outcome that the study's own rules give it."""
    if measurement.outcome is not Outcome.OK:
        return measurement
    if not _exact(measurement, rules):
        detail = (
            f"results differ from the reference by {measurement.max_error} of the bound; {rules.tolerance} is accepted"
        )
        return replace(measurement, outcome=Outcome.WRONG_RESULT, detail=detail)
    return held_to(measurement, rules.budget_bytes)


def sure_to_exceed(estimate: Estimate, rules: Rules) -> bool:
    """Whether the simulator finds a plan too large: its peak, or what its layout makes of that. It is charged no less."""
    return max(estimate.peak_bytes, estimate.charged_bytes or 0) > rules.budget_bytes


def not_run(estimate: Estimate, rules: Rules) -> Measurement:
    """The outcome of a plan that the simulator already finds too large."""
    needs = f"{fmt_bytes(estimate.peak_bytes)} at {estimate.peak_op}"
    if estimate.peak_bytes <= rules.budget_bytes and estimate.charged_bytes is not None:
        needs = f"{fmt_bytes(estimate.charged_bytes)} as its buffers can be laid out"
    detail = f"estimated {needs}, the step may take {fmt_bytes(rules.budget_bytes)}: not run"
    return Measurement(Outcome.OVER_BUDGET, detail)


def to_beat(leading: Trial | None) -> float | None:
    """The ratio to eager that a plan must reach to be of use: the leader's, and what noise and a tie allow beyond it."""
    if leading is None or leading.measurement is None or leading.measurement.time_ratio is None:
        return None
    return leading.measurement.time_ratio * (1 + TIE + noise(leading.measurement))


def was_run(trial: Trial) -> bool:
    """Whether a plan reached the device; `not_run` measurements carry neither bytes nor an outcome of a worker."""
    seen = trial.measurement
    return seen is not None and (seen.outcome is not Outcome.OVER_BUDGET or _taken(seen) is not None)


def verdict(trial: Trial, rules: Rules, seen_wastes: Sequence[float]) -> Verdict:
    """What to tell the search. An outcome without numbers gets the simulator's, and a violated constraint."""
    seen = trial.measurement or Measurement(Outcome.CRASHED)
    predicted_bytes = _predicted(trial.estimate, seen_wastes) if trial.estimate else None
    step_bytes = predicted_bytes if (own := _step_taken(seen)) is None else own
    ratio = measured_ratio(seen, rules)
    allowed = max(rules.allowed_bytes, 1)
    memory = (rules.floor_bytes + (step_bytes or allowed)) / allowed - 1
    if seen.outcome not in (Outcome.OK, Outcome.WRONG_RESULT, Outcome.STOPPED_EARLY):
        memory = max(memory, 0.01)
    wrong = seen.outcome is Outcome.WRONG_RESULT or (seen.max_error is not None and not _exact(seen, rules))
    imputed = trial.estimate.seconds / rules.baseline_seconds if trial.estimate and rules.baseline_seconds else 1.0
    return Verdict(
        time_ratio=imputed if ratio is None else ratio,
        step_bytes=step_bytes or rules.budget_bytes,
        memory=memory,
        numerics=1.0 if wrong else 0.0,
        imputed=ratio is None,
    )


def _predicted(estimate: Estimate, seen_wastes: Sequence[float]) -> int:
    return max(round(estimate.peak_bytes * (1 + waste(seen_wastes))), estimate.charged_bytes or 0)


def measured_ratio(measurement: Measurement, rules: Rules) -> float | None:
    """Step time over the baseline's; over the predicted one where the baseline does not fit; None if nothing ran."""
    if measurement.time_ratio is not None or measurement.median_seconds is None:
        return measurement.time_ratio
    return measurement.median_seconds / rules.baseline_seconds if rules.baseline_seconds else None


def noise(measurement: Measurement) -> float:
    """Half the width of the ratio's interval, relative: two medians whose intervals touch are a tie (McGill 1978)."""
    parts = []
    for samples in (measurement.step_seconds, measurement.baseline_seconds):
        if len(samples) >= 4:
            low, middle, high = statistics.quantiles(samples, n=4)
            parts.append(1.57 * (high - low) / math.sqrt(len(samples)) / middle)
    return math.hypot(*parts)


def pool(trials: Sequence[Trial]) -> Trial:
    """Several runs of one plan as one: all samples, the highest bytes; a confirming run outweighs those that chose it."""
    fresh = [trial for trial in trials if trial.kind == "confirm"]
    last = (fresh or list(trials))[-1]
    seen = [trial.measurement for trial in fresh or trials if trial.measurement is not None]
    pooled = replace(
        seen[-1],
        step_seconds=tuple(chain.from_iterable(one.step_seconds for one in seen)),
        baseline_seconds=tuple(chain.from_iterable(one.baseline_seconds for one in seen)),
        peak_bytes=max((one.peak_bytes for one in seen if one.peak_bytes is not None), default=None),
        charged_bytes=max((one.charged_bytes for one in seen if one.charged_bytes is not None), default=None),
    )
    return replace(last, measurement=pooled)


def winner(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """The leader of the plans that were confirmed; of all as long as none that was still fits.

    Of many runs the fastest is the luckiest too: its first numbers are not set beside another's confirmed ones.
    """
    confirmed = {trial.plan for trial in trials if trial.kind == "confirm" and was_run(trial)}
    return leader([trial for trial in trials if trial.plan in confirmed], rules) or leader(trials, rules)


def fitting(trials: Iterable[Trial], rules: Rules) -> list[Trial]:
    """Each verified plan that kept the budget in every run it had, its runs as one."""
    runs: dict[Plan, list[Trial]] = {}
    for trial in trials:
        if trial.plan is not None and trial.kind != "repeat" and was_run(trial):
            runs.setdefault(trial.plan, []).append(trial)
    return [pool(same) for same in runs.values() if all(_accepted(trial, rules) for trial in same)]


def paid(trial: Trial, rules: Rules) -> float:
    """What the plan costs in time, to be ranked by; infinite where nothing ran."""
    ratio = measured_ratio(trial.measurement, rules) if trial.measurement is not None else None
    return math.inf if ratio is None else ratio


def leader(trials: Iterable[Trial], rules: Rules) -> Trial | None:
    """The fastest verified plan within the budget in every run it had. Where others are as fast within the noise, and
    no notable time slower, the smallest of them; of those that are no notable bytes larger than it, the fastest.
    """
    fit = fitting(trials, rules)
    if not fit:
        return None
    cost = {trial.number: paid(trial, rules) for trial in fit}
    best = min(fit, key=lambda trial: cost[trial.number])
    ties = [
        trial for trial in fit if cost[trial.number] <= cost[best.number] * (1 + min(TIE, _noise(trial) + _noise(best)))
    ]
    taken = {trial.number: _step_taken(trial.measurement) or 0 for trial in ties if trial.measurement}
    notable = (1 + NOTABLE) * min(taken.values())
    return min((trial for trial in ties if taken[trial.number] <= notable), key=lambda trial: cost[trial.number])


def _accepted(trial: Trial, rules: Rules) -> bool:
    seen = trial.measurement
    return seen is not None and judge(seen, rules).outcome is Outcome.OK and measured_ratio(seen, rules) is not None


def _exact(measurement: Measurement, rules: Rules) -> bool:
    if rules.tolerance is None:
        return True
    return measurement.max_error is not None and measurement.max_error <= rules.tolerance


def _taken(measurement: Measurement) -> int | None:
    """Highest bytes of the process that were seen; the charge is not, where a plan stopped over its peak."""
    return measurement.peak_bytes if measurement.charged_bytes is None else measurement.charged_bytes


def _step_taken(measurement: Measurement) -> int | None:
    taken = _taken(measurement)
    return None if taken is None or measurement.floor_bytes is None else taken - measurement.floor_bytes


def _noise(trial: Trial) -> float:
    return noise(trial.measurement) if trial.measurement is not None else 0.0
