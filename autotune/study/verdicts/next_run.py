"""Select the next plan to re-measure, for each objective, and the time to reserve for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.planners.candidates import Candidate
from autotune.planners.knobs import Settings
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.confirm import (
    MAX_CONTENDERS,
    MIN_ROUNDS,
    ConfirmationStatus,
    compare_confirmed,
    compute_lowered_target,
    select_near_miss,
    select_next,
)
from autotune.study.verdicts.front import count_missing_runs, select_front_run
from autotune.study.verdicts.plan_runs import was_cut_off
from autotune.study.verdicts.ranking import Rules, estimate_spread

CONFIRMING_SHARE = 0.2
"""Maximum share of the study's time that is reserved for re-measuring the best plans."""
CONFIRMATIONS = MAX_CONTENDERS * MIN_ROUNDS + 1
"""Number of re-measured trials where the first rounds decide: two per contender and one for a safe fallback."""


@dataclass(frozen=True, slots=True)
class NextRun:
    """Next trial of the confirmation: a known plan, or settings to plan again for fewer bytes."""

    kind: TrialKind
    settings: Settings
    candidate: Candidate | None = None
    target_bytes: int | None = None


def select_next_run(objective: str, trials: Sequence[Trial], rules: Rules, *, is_late: bool) -> NextRun | None:
    """Return the next plan to run in new processes; None once all comparisons are conclusive.

    `is_late` states that a further run may exceed the study's time; then one begins only while too few runs are done. With
    the objective `time`, a plan that missed the budget by little (`select_near_miss`) is planned again first. It is not where
    the time may not suffice to re-measure any plan after it.
    """
    missed = select_near_miss(trials, rules) if objective == "time" else None
    best = select_next(trials, rules) if objective == "time" else select_front_run(trials, rules)
    if (missed is None and best is None) or (is_late and _has_enough_runs(trials, rules)):
        return None
    has_measured = any(trial.kind == TrialKind.CONFIRM and trial.was_run and not was_cut_off(trial) for trial in trials)
    if missed is not None and (best is None or has_measured or not is_late):
        target = compute_lowered_target(missed, rules, estimate_spread(trials))
        return NextRun(TrialKind.LOWERED, missed.settings, target_bytes=target)
    if best is None or best.plan is None or best.estimate is None:
        return None
    candidate = Candidate(best.settings, best.plan, best.estimate, best.target_bytes, best.parent, best.move)
    return NextRun(TrialKind.CONFIRM, best.settings, candidate)


def reserved_seconds(
    objective: str, trials: Sequence[Trial], rules: Rules, *, run_seconds: float, time_seconds: float
) -> float:
    """Return the seconds to reserve for the re-measurements that the objective needs after one more trial.

    A front needs them for each of its plans, because only re-measured plans are points. The other objectives need
    few, for at most a share of the study's time.
    """
    if objective == "pareto":
        return count_missing_runs(trials, rules) * run_seconds
    return min(CONFIRMATIONS * run_seconds, CONFIRMING_SHARE * time_seconds)


def _has_enough_runs(trials: Sequence[Trial], rules: Rules) -> bool:
    runs = sum(trial.kind == TrialKind.CONFIRM and trial.was_run for trial in trials)
    return runs >= MAX_CONTENDERS or any(
        plan.status is ConfirmationStatus.BEST for plan in compare_confirmed(trials, rules)
    )
