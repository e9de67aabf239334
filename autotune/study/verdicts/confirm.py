"""Re-measure the best plans: select the next plan to run, and compare each plan with the best one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.records.json_codec import to_json, without_infinities
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.plan_runs import count_rounds, group_runs, pool_ratios, pool_seconds, was_cut_off
from autotune.study.verdicts.ranking import (
    NOTABLE_SHARE,
    Rules,
    select_fitting,
    select_leader,
    select_winner,
    time_cost,
)
from autotune.study.verdicts.statistics import (
    Interval,
    RatioInterval,
    compare_ratios,
    median_interval,
)

MAX_CONTENDERS = 3
"""Maximum number of plans that are re-measured because each may be the fastest."""
CONTENDER_MARGIN = 0.1
"""Share of time above the leader's from which on a re-measurement would not make a plan the winner."""
NEAR_MISS = 0.01
"""Share of the budget: a finalist that misses by less is planned again for fewer bytes."""
MAX_LOWERED = 2
"""Maximum number of such plans from the same settings."""
MIN_ROUNDS, MAX_ROUNDS = 2, 6
"""Least and most runs of a contender, each in new processes; more than the least only while the result is inconclusive."""
TIE_MARGIN = 0.03
"""Share of time: two plans tie once the interval excludes a difference of this size."""
FALLBACK_MARGIN = 0.1
"""Share of the budget that a safe fallback leaves free."""


class ConfirmationStatus(StrEnum):
    """Result of comparing a re-measured plan with the best one."""

    BEST = "BEST"
    TIE = "tie"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    """The interval includes both equal time and a notable difference."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ConfirmedPlan:
    """A re-measured plan, compared with the best one."""

    trial: Trial
    """All re-measurements of the plan, pooled."""
    status: ConfirmationStatus
    rounds: int
    """Number of runs, each in new processes."""
    block_ratios: tuple[float, ...]
    """Time over plain eager's of the same turn, one per block; in seconds where eager does not fit."""
    versus_best: RatioInterval | None = None
    """Time over the best plan's; None for the best plan, and where too few steps ran."""
    best_number: int | None = None
    """Trial number of the best plan."""
    block_seconds: tuple[float, ...] = ()
    """Seconds of a step, one per block."""
    is_fallback: bool = False
    """True if the plan is the safe fallback."""

    @property
    def ratio(self) -> Interval | None:
        """Time over plain eager's of the same turns; None where eager does not fit, or too few steps ran."""
        return pooled_ratio(self.trial, self.block_ratios)

    @property
    def seconds(self) -> Interval | None:
        """Seconds of one step; None where too few steps ran."""
        return median_interval(self.block_seconds) if len(self.block_seconds) > 1 else None

    @property
    def label(self) -> str:
        """Text for people: `BEST`, `tie with 12`, `slower`, `safe fallback, slower`, or the reason of a failure."""
        text: str = self.status.value
        if self.status is ConfirmationStatus.TIE:
            text = f"tie with {self.best_number}"
        elif self.status is ConfirmationStatus.FAILED and self.trial.measurement is not None:
            text = self.trial.measurement.outcome.value.replace("_", " ")
        return f"safe fallback, {text}" if self.is_fallback else text


def pooled_ratio(trial: Trial, ratios: Sequence[float]) -> Interval | None:
    """Return the median of a plan's block ratios with its interval; None where they are seconds, or too few."""
    result = trial.measurement
    is_ratio = result is not None and result.time_ratio is not None and len(ratios) > 1
    return median_interval(ratios) if is_ratio else None


def select_next(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """Return the plan to re-measure next, the one with the fewest runs first; None once all comparisons are conclusive.

    Each contender runs twice, and a safe fallback once. Then the best plan and every inconclusive one run again.
    """
    contenders = select_contenders(trials, rules)
    safe = select_fallback(select_fitting(trials, rules), contenders[0], rules) if contenders else None
    rounds = count_rounds(trials)
    required = {trial.plan: MIN_ROUNDS for trial in contenders}
    if safe is not None:
        required.setdefault(safe.plan, 1)
    candidates = [*contenders, *([] if safe is None else [safe])]
    waiting = [trial for trial in candidates if rounds[trial.plan] < required[trial.plan]]
    if not waiting:
        confirmed = compare_confirmed(trials, rules)
        unclear = {plan.trial.plan for plan in confirmed if plan.status is ConfirmationStatus.INCONCLUSIVE}
        unclear |= {plan.trial.plan for plan in confirmed if unclear and plan.status is ConfirmationStatus.BEST}
        waiting = [trial for trial in candidates if trial.plan in unclear and rounds[trial.plan] < MAX_ROUNDS]
    return min(waiting, key=lambda trial: rounds[trial.plan], default=None)


def select_contenders(trials: Sequence[Trial], rules: Rules) -> list[Trial]:
    """Return the plans that may be the fastest by the search's own times, its leader first.

    Plans that failed since are left out. The fastest plan that no move made is always among them, so that the gain of
    moves is measured afresh, too.
    """
    alive = {trial.plan for trial in select_fitting(trials, rules)}
    searched = [trial for trial in trials if trial.kind != TrialKind.CONFIRM and trial.plan in alive]
    first = select_leader(searched, rules)
    if first is None:
        return []
    others = [trial for trial in select_fitting(searched, rules) if trial.plan != first.plan]
    limit = time_cost(first, rules) * (1 + CONTENDER_MARGIN)
    others.sort(key=lambda trial: time_cost(trial, rules))
    near = [first, *(trial for trial in others if time_cost(trial, rules) <= limit)][:MAX_CONTENDERS]
    planned = next((trial for trial in others if not trial.move), None)
    if planned is None or any(not trial.move for trial in near):
        return near
    return [*near[: MAX_CONTENDERS - 1], planned]


def select_near_miss(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """Return the fastest finalist that missed the budget by little and was not planned again yet; None without one.

    A finalist is as fast as a contender. Where no plan fits, every plan is a finalist.
    """
    contenders = select_contenders(trials, rules)
    limit = time_cost(contenders[0], rules) * (1 + CONTENDER_MARGIN) if contenders else math.inf
    lowered = [trial for trial in trials if trial.kind == TrialKind.LOWERED]
    missed = []
    for trial in trials:
        result, charged = trial.measurement, trial.step_charged_bytes
        if trial.plan is None or trial.kind == TrialKind.REPEAT or result is None or charged is None:
            continue
        if trial.move:
            continue  # its settings make another plan
        is_near = result.outcome is Outcome.OVER_BUDGET and charged < rules.budget_bytes * (1 + NEAR_MISS)
        same = [other for other in lowered if other.settings == trial.settings]
        is_done = len(same) >= MAX_LOWERED or any(other.number > trial.number for other in same)
        if is_near and not is_done and time_cost(trial, rules) <= limit:
            missed.append(trial)
    return min(missed, key=lambda trial: time_cost(trial, rules), default=None)


def compute_lowered_target(missed: Trial, rules: Rules, spread: float) -> int:
    """Return the peak bytes for the next plan of a near miss: its own by estimate, less its excess and the spread."""
    assert missed.estimate is not None
    assert missed.step_charged_bytes is not None
    share = rules.budget_bytes * (1 - spread) / missed.step_charged_bytes
    return min(int(missed.estimate.peak_bytes * share), missed.estimate.peak_bytes - 1)


def select_fallback(fitting: Sequence[Trial], best: Trial, rules: Rules) -> Trial | None:
    """Return the plan for a budget that turns out tighter than configured, or None where the best plan will do.

    That is the fastest plan that leaves a tenth of the budget free. Where none does, it is the smallest plan, if its
    charge is notably below the best plan's.
    """

    def charged(trial: Trial) -> int:
        return trial.step_charged_bytes or 0

    limit = (1 - FALLBACK_MARGIN) * rules.budget_bytes
    if charged(best) <= limit:
        return None
    notable = (1 - NOTABLE_SHARE) * charged(best)
    smaller = [trial for trial in fitting if trial.plan != best.plan and charged(trial) < notable]
    safe = [trial for trial in smaller if charged(trial) <= limit]
    if safe:
        return min(safe, key=lambda trial: time_cost(trial, rules))
    return min(smaller, key=charged, default=None)


def compare_confirmed(trials: Sequence[Trial], rules: Rules) -> list[ConfirmedPlan]:
    """Compare every re-measured plan with the best one.

    Returns the best plan first, then the others by their re-measured times, then the plans that failed.
    """
    runs = group_runs(trial for trial in trials if trial.kind == TrialKind.CONFIRM)
    ended = {plan for plan, repeats in runs.items() if not all(map(was_cut_off, repeats))}
    fitting = [trial for trial in select_fitting(trials, rules) if trial.plan in ended]
    alive = {trial.plan for trial in fitting}
    failed = [
        ConfirmedPlan(
            select_failed_run(repeats), ConfirmationStatus.FAILED, len(repeats), (), block_seconds=pool_seconds(repeats)
        )
        for plan, repeats in runs.items()
        if plan not in alive
    ]
    best = select_winner(trials, rules)
    if best is None or best.plan is None or best.plan not in alive:
        return failed
    samples = {plan: pool_ratios(repeats) for plan, repeats in runs.items()}
    safe = select_fallback(fitting, best, rules)
    compared = []
    for trial in sorted(fitting, key=lambda trial: (trial.plan != best.plan, time_cost(trial, rules))):
        assert trial.plan is not None
        ratios, best_ratios, rounds = samples[trial.plan], samples[best.plan], len(runs[trial.plan])
        seconds = pool_seconds(runs[trial.plan])
        if trial.plan == best.plan:
            compared.append(ConfirmedPlan(trial, ConfirmationStatus.BEST, rounds, ratios, block_seconds=seconds))
        else:
            versus = compare_ratios(ratios, best_ratios) if min(len(ratios), len(best_ratios)) > 1 else None
            status = _classify(versus)
            compared.append(ConfirmedPlan(trial, status, rounds, ratios, versus, best.number, seconds, trial is safe))
    return compared + failed


def to_table(confirmed: Sequence[ConfirmedPlan]) -> list[dict[str, Any]]:
    """Return the plans as JSON rows: base units in the names, intervals as middle, low and high, None for unknown."""
    rows = [
        {
            "trial": plan.trial.number,
            "verdict": plan.label,
            "rounds": plan.rounds,
            "step_peak_bytes": plan.trial.measurement.step_peak_bytes if plan.trial.measurement else None,
            "step_charged_bytes": plan.trial.step_charged_bytes,
            "step_seconds": to_json(plan.seconds) if plan.seconds else None,
            "time_ratio": to_json(plan.ratio) if plan.ratio else None,
            "beside_best": to_json(plan.versus_best) if plan.versus_best else None,
        }
        for plan in confirmed
    ]
    return [without_infinities(row) for row in rows]  # too few blocks have no interval


def _classify(versus: RatioInterval | None) -> ConfirmationStatus:
    if versus is None:
        return ConfirmationStatus.INCONCLUSIVE
    if versus.low > 1:
        return ConfirmationStatus.SLOWER
    return ConfirmationStatus.TIE if versus.high < 1 + TIE_MARGIN else ConfirmationStatus.INCONCLUSIVE


def select_failed_run(runs: Sequence[Trial]) -> Trial:
    """Return the first run that failed; where none did, the plan had failed before, and the last run stands for it."""
    failed = [run for run in runs if run.measurement is not None and run.measurement.outcome is not Outcome.OK]
    return failed[0] if failed else runs[-1]
