"""Rank measured trials: apply the study's rules, compute the cost of each plan, and select the winner."""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autotune.ir.plan import Plan
from autotune.measure.early_stop import EXPECTED_NOISE
from autotune.planners.candidates import Candidate
from autotune.predict.simulate import Estimate
from autotune.records.budget import tolerated_bytes
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.plan_runs import group_runs, was_cut_off
from autotune.units import fmt_bytes

ASSUMED_OVERHEAD = 0.03
"""Allocator overhead as a share of a plan's bytes, until the first plan is measured."""
NEW_RUNS = (TrialKind.LOWERED, TrialKind.CONFIRM)
"""Kinds of trials that run in new processes, even where the plan was measured before."""
NOTABLE_SHARE = 0.01
"""Minimum share of bytes that counts as smaller; a process's charge varies by less from run to run."""
TIE_SHARE = 0.02
"""Maximum slowdown accepted in exchange for a smaller plan; every plan within the budget is small enough."""
NORMAL_SPREAD = 1.35
"""Distance of the quartiles of a normal distribution, in standard deviations."""
UNNAMED_PRICE = 0.05
"""Rebuild price of the regions in records that name none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that the trials of one study have to meet."""

    budget_bytes: int
    """Maximum charge of the step, without the floor."""
    floor_bytes: int
    """Bytes of an idle process that is ready to run plans."""
    tolerance: float | None
    """Largest accepted `max_error`; None where eager fits at no batch size, so that no comparison is possible."""
    baseline_seconds: float
    """Predicted seconds of the traced plan; stands in where the baseline did not run."""
    budget_tolerance: float = 0.0
    """Share by which the charge may exceed the budget."""

    @property
    def accepted_bytes(self) -> int:
        """Highest charge of the step that is within the budget and its tolerance."""
        return tolerated_bytes(self.budget_bytes, self.budget_tolerance)

    @property
    def allowed_bytes(self) -> int:
        """Maximum charge of the whole process."""
        return self.floor_bytes + self.accepted_bytes


@dataclass(frozen=True, slots=True)
class TrialScore:
    """Objectives and constraints of a trial, as the sampler receives them. A constraint above 0 is violated."""

    time_ratio: float
    """Step time over the baseline's."""
    step_bytes: int
    """Bytes of the step, without the floor."""
    memory: float
    """Memory constraint: the process's bytes over the allowed bytes, less 1."""
    numerics: float
    """Numerics constraint: 1 for a wrong result, else 0."""
    imputed: bool
    """True if ratio and bytes are the simulator's, because nothing was measured."""


def baseline_step_bytes(measurement: Measurement) -> int | None:
    """Return the baseline bytes that a budget in percent refers to: eager's peak, without allocator overhead."""
    return measurement.step_charged_bytes if measurement.step_peak_bytes is None else measurement.step_peak_bytes


def eager_step_bytes(baseline: Measurement | None) -> int | None:
    """Return the bytes of eager's whole step; None where it was not measured, or ended before its peak."""
    return baseline_step_bytes(baseline) if baseline is not None and baseline.outcome is Outcome.OK else None


def allocator_overheads(trials: Iterable[Trial]) -> list[float]:
    """Return the allocator overhead of each measured plan: charge over estimated peak, less 1."""
    overheads = []
    for trial in trials:
        nbytes = trial.step_bytes if trial.kind != TrialKind.REPEAT else None
        if trial.estimate is not None and nbytes is not None:
            overheads.append(nbytes / max(trial.estimate.peak_bytes, 1) - 1)
    return overheads


def estimate_overhead(overheads: Sequence[float]) -> float:
    """Return the largest measured overhead without outliers, so that nearly all plans made with it fit; never negative.

    An outlier lies more than 1.5 interquartile ranges above the upper quartile (Tukey 1977).
    """
    if not overheads:
        return ASSUMED_OVERHEAD
    ordered = sorted(overheads)
    low, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.25, 0.75))
    return max(0.0, *(overhead for overhead in ordered if overhead <= high + 1.5 * (high - low)))


def compute_target_bytes(budget_bytes: int, overheads: Sequence[float], spread: float = 0.0) -> int:
    """Return the peak bytes that planners have to meet, so that the charge meets the budget in every process.

    >>> compute_target_bytes(1030, [])
    1000
    >>> compute_target_bytes(1030, [], spread=0.01)
    990
    """
    return int(budget_bytes * (1 - spread) / (1 + estimate_overhead(overheads)))


def estimate_spread(trials: Iterable[Trial]) -> float:
    """Return the range of one step's charge over new processes, as a share of the lowest; at most `NOTABLE_SHARE`.

    The baseline's processes measure it first, then the runs of each re-measured plan. A wider range has other causes
    than the process, such as a heap that malloc trims at another moment.
    """
    charges: dict[Plan | None, list[int]] = {}
    for trial in trials:
        if trial.measurement is not None and trial.kind != TrialKind.REPEAT:
            floor, charged = trial.measurement.floor_bytes or 0, trial.step_charged_bytes
            samples = [nbytes - floor for nbytes in trial.measurement.process_charged_bytes]
            charges.setdefault(trial.plan, []).extend(samples or ([] if charged is None else [charged]))
    ranges = [max(same) / min(same) - 1 for same in charges.values() if same and min(same) > 0]
    return min(NOTABLE_SHARE, max(ranges, default=0.0))


def plan_hash(plan: Plan) -> str:
    """Return the identity of a plan: 16 hexadecimal digits."""
    document = to_json(plan)
    if not plan.kernels or plan.rebuild_price == UNNAMED_PRICE:
        del document["rebuild_price"]
    if not plan.threads:
        del document["threads"]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]


def apply_rules(measurement: Measurement, rules: Rules) -> Measurement:
    """Return the measurement with the outcome by the study's tolerance and budget."""
    if measurement.outcome is Outcome.OVER_BUDGET and measurement.charged_bytes is not None:
        # a runner knows the accepted bytes only: state the budget and its tolerance
        return apply_budget(measurement, rules.budget_bytes, rules.budget_tolerance)
    if measurement.outcome is not Outcome.OK:
        return measurement
    if not _within_tolerance(measurement, rules):
        detail = (
            f"results differ from the reference by {measurement.max_error} of the bound; {rules.tolerance} is accepted"
        )
        return replace(measurement, outcome=Outcome.WRONG_RESULT, detail=detail)
    return apply_budget(measurement, rules.budget_bytes, rules.budget_tolerance)


def exceeds_budget(estimate: Estimate, rules: Rules) -> bool:
    """Return whether the predicted peak, or the predicted charge of the layout, exceeds the budget.

    The real charge is never lower than either. What a GPU's allocator will reserve is predicted, but not certain: it
    depends on allocations before the step. Such a plan is measured.
    """
    charged_bytes = 0 if estimate.reserved_bytes else estimate.charged_bytes or 0
    return max(estimate.peak_bytes, charged_bytes) > rules.budget_bytes


def select_by_layout(
    fitting: Sequence[Candidate], estimate_layout: Callable[[Candidate], Estimate], rules: Rules, most: int
) -> Sequence[Candidate]:
    """Return the first `most` candidates whose layout fits the budget.

    Where no layout fits, return the first candidate: its measurement calibrates the target of the next ones.
    """
    selected: list[Candidate] = []
    for candidate in fitting[: 2 * most]:
        if len(selected) < most and not exceeds_budget(estimate_layout(candidate), rules):
            selected.append(candidate)
    return selected or fitting[:1]


def reject_by_estimate(estimate: Estimate, rules: Rules) -> Measurement:
    """Return the measurement of a plan that is not run, because its estimate exceeds the budget."""
    size = f"{fmt_bytes(estimate.peak_bytes)} at {estimate.peak_op}"
    if estimate.peak_bytes <= rules.budget_bytes and estimate.charged_bytes is not None:
        size = f"{fmt_bytes(estimate.charged_bytes)} as its buffers can be laid out"
    detail = f"estimated {size}, the step may take {fmt_bytes(rules.budget_bytes)}: not run"
    return Measurement(Outcome.OVER_BUDGET, detail)


def compute_stop_ratio(leader: Trial | None, trial: Trial, trials: Iterable[Trial]) -> float | None:
    """Return the time ratio above which the plan of a trial cannot win; None where no leader has a ratio.

    It is the highest ratio of the leader and of its plan's complete runs in `trials`. Ratios of one plan vary between
    processes. A lower one, such as a re-measurement's, would stop plans that are as fast as the leader, and even its
    own. A plan that is notably smaller may be slower by `TIE_SHARE`, because it wins a tie. A move has to be faster.
    """
    if leader is None or leader.measurement is None or leader.measurement.time_ratio is None:
        return None
    runs = [run.measurement for run in trials if run.plan == leader.plan and run.kind != TrialKind.REPEAT]
    ratios = [run.time_ratio for run in runs if run is not None and run.outcome is Outcome.OK and not run.disturbed]
    highest = max([leader.measurement.time_ratio, *(ratio for ratio in ratios if ratio is not None)])
    may_be_slower = trial.kind != TrialKind.MOVE and _is_notably_smaller(trial, leader)
    return highest * (1 + (TIE_SHARE if may_be_slower else 0.0))


def _is_notably_smaller(trial: Trial, leader: Trial) -> bool:
    """Return whether the estimated peak of a plan is notably below the leader's; true where one has no estimate."""
    if trial.estimate is None or leader.estimate is None:
        return True
    return trial.estimate.peak_bytes * (1 + NOTABLE_SHARE) < leader.estimate.peak_bytes


def score_trial(trial: Trial, rules: Rules, overheads: Sequence[float]) -> TrialScore:
    """Return a trial's objectives and constraints for the sampler.

    A failure without numbers gets the simulator's numbers and a violated constraint.
    """
    result = trial.measurement or Measurement(Outcome.CRASHED)
    predicted_bytes = _predict_charge(trial.estimate, overheads) if trial.estimate else None
    step_bytes = predicted_bytes if result.step_bytes is None else result.step_bytes
    ratio = measured_ratio(result, rules)
    allowed = max(rules.allowed_bytes, 1)
    memory = (rules.floor_bytes + (step_bytes or allowed)) / allowed - 1
    if result.outcome not in (Outcome.OK, Outcome.WRONG_RESULT, Outcome.STOPPED_EARLY):
        memory = max(memory, 0.01)
    is_wrong = result.outcome is Outcome.WRONG_RESULT or (
        result.max_error is not None and not _within_tolerance(result, rules)
    )
    predicted = trial.estimate.seconds / rules.baseline_seconds if trial.estimate and rules.baseline_seconds else 1.0
    return TrialScore(
        time_ratio=predicted if ratio is None else ratio,
        step_bytes=step_bytes or rules.budget_bytes,
        memory=memory,
        numerics=1.0 if is_wrong else 0.0,
        imputed=ratio is None,
    )


def _predict_charge(estimate: Estimate, overheads: Sequence[float]) -> int:
    return max(round(estimate.peak_bytes * (1 + estimate_overhead(overheads))), estimate.charged_bytes or 0)


def measured_ratio(measurement: Measurement, rules: Rules) -> float | None:
    """Return step time over the baseline's, or over its prediction where the baseline did not fit; None if nothing ran."""
    if measurement.time_ratio is not None or measurement.median_seconds is None:
        return measurement.time_ratio
    return measurement.median_seconds / rules.baseline_seconds if rules.baseline_seconds else None


def ratio_noise(measurement: Measurement) -> float:
    """Return half the width of the ratio's interval, relative to the ratio.

    Two medians whose intervals touch are a tie (McGill 1978). Fewer than four samples do not show their own noise:
    they are taken to vary by `EXPECTED_NOISE`, as on an idle machine.
    """
    parts = []
    for samples in filter(None, (measurement.step_seconds, measurement.baseline_seconds)):
        spread = NORMAL_SPREAD * EXPECTED_NOISE
        if len(samples) >= 4:
            low, middle, high = statistics.quantiles(samples, n=4)
            spread = (high - low) / middle
        parts.append(1.57 * spread / math.sqrt(len(samples)))
    return math.hypot(*parts)


def pool_runs(trials: Sequence[Trial]) -> Trial:
    """Return several runs of one plan as one trial: all samples, the highest bytes of a step above the last run's floor.

    Where the plan was re-measured, only those runs count: the search selected the plan by the other ones.
    """
    confirmed = [trial for trial in trials if trial.kind == TrialKind.CONFIRM]
    last = (confirmed or list(trials))[-1]
    results = [trial.measurement for trial in confirmed or trials if trial.measurement is not None]
    floor_bytes = next((result.floor_bytes for result in reversed(results) if result.floor_bytes is not None), 0)
    # floors differ from process to process, so bytes of several runs are compared without them
    peaks = [result.peak_bytes - (result.floor_bytes or 0) for result in results if result.peak_bytes is not None]
    charges = [
        result.charged_bytes - (result.floor_bytes or 0) for result in results if result.charged_bytes is not None
    ]
    pooled = replace(
        results[-1],
        step_seconds=tuple(chain.from_iterable(result.step_seconds for result in results)),
        baseline_seconds=tuple(chain.from_iterable(result.baseline_seconds for result in results)),
        peak_bytes=max(peaks) + floor_bytes if peaks else None,
        charged_bytes=max(charges) + floor_bytes if charges else None,
        disturbed=next((result.disturbed for result in results if result.disturbed), ""),
    )
    return replace(last, measurement=pooled)


def select_winner(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """Return the leader of the re-measured plans, or of all plans where no re-measured one fits.

    The fastest of many runs is partly lucky, so its first times are not compared with re-measured ones.
    """
    ended = [trial for trial in trials if trial.was_run and not was_cut_off(trial)]
    confirmed = {trial.plan for trial in ended if trial.kind == TrialKind.CONFIRM}
    return select_leader([trial for trial in trials if trial.plan in confirmed], rules) or select_leader(trials, rules)


def select_fitting(trials: Iterable[Trial], rules: Rules) -> list[Trial]:
    """Return each verified plan that kept the budget in all of its runs, with these runs pooled."""
    runs = group_runs(trials)
    return [pool_runs(same) for same in runs.values() if all(_is_accepted(trial, rules) for trial in same)]


def time_cost(trial: Trial, rules: Rules) -> float:
    """Return the time ratio that a plan is ranked by; infinite where nothing ran."""
    ratio = measured_ratio(trial.measurement, rules) if trial.measurement is not None else None
    return math.inf if ratio is None else ratio


def select_leader(trials: Iterable[Trial], rules: Rules) -> Trial | None:
    """Return the best of the verified plans that kept the budget in all of their runs; None where there is none.

    The fastest plan wins, unless plans that tie with it within the noise are smaller. Of these, the fastest one wins
    whose bytes are not notably above the smallest.
    """
    fitting = select_fitting(trials, rules)
    if not fitting:
        return None
    cost = {trial.number: time_cost(trial, rules) for trial in fitting}
    fastest = min(fitting, key=lambda trial: cost[trial.number])

    def slowdown_limit(trial: Trial) -> float:
        return 1 + min(TIE_SHARE, _trial_noise(trial) + _trial_noise(fastest))

    ties = [trial for trial in fitting if cost[trial.number] <= cost[fastest.number] * slowdown_limit(trial)]
    nbytes = {trial.number: trial.step_bytes or 0 for trial in ties}
    limit = (1 + NOTABLE_SHARE) * min(nbytes.values())
    return min((trial for trial in ties if nbytes[trial.number] <= limit), key=lambda trial: cost[trial.number])


def _is_accepted(trial: Trial, rules: Rules) -> bool:
    result = trial.measurement
    if result is None or measured_ratio(result, rules) is None:
        return False
    if result.max_error is None:  # recorded by a session that had no results to compare with
        rules = replace(rules, tolerance=None)
    return apply_rules(result, rules).outcome is Outcome.OK


def _within_tolerance(measurement: Measurement, rules: Rules) -> bool:
    if rules.tolerance is None:
        return True
    return measurement.max_error is not None and measurement.max_error <= rules.tolerance


def _trial_noise(trial: Trial) -> float:
    return ratio_noise(trial.measurement) if trial.measurement is not None else 0.0


def reuse_measurement(trial: Trial, trials: Sequence[Trial]) -> Trial | None:
    """Return the trial as a repeat with the earlier measurement of its plan; None where the plan is new."""
    same = group_runs(old for old in trials if old.plan == trial.plan).get(trial.plan, []) if trial.plan else []
    pooled = pool_runs(same).measurement if same and trial.kind not in NEW_RUNS else None
    if pooled is None:
        return None
    note = f"same plan as trial {same[-1].number}: not run again"
    return replace(trial, kind=TrialKind.REPEAT, measurement=replace(pooled, detail=note))


def drop_cut_off(trials: list[Trial], rules: Rules) -> int:
    """Remove the trials that were cut off, and repeats of their plans, where no plan won; return their number.

    Nothing is known of these plans, and one of them may fit, so a resumed study measures them again. Beside a winner they
    stay failed: a plan that needs too much memory may be killed each time.
    """
    cut_off = {trial.plan for trial in trials if was_cut_off(trial)}
    if not cut_off or select_winner(trials, rules) is not None:
        return 0
    kept = [
        trial
        for trial in trials
        if trial.plan not in cut_off or (trial.kind != TrialKind.REPEAT and not was_cut_off(trial))
    ]
    dropped = len(trials) - len(kept)
    trials[:] = kept
    return dropped
