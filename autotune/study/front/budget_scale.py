"""Express a target in bytes as a share of the range from the smallest plan to the limit, for the sampler."""

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.records.measurement import Measurement
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.ranking import Rules, baseline_step_bytes


@dataclass(frozen=True, slots=True)
class BudgetScale:
    """Range of targets of one study, in peak bytes of the step.

    >>> scale = BudgetScale(100, 300)
    >>> scale.to_bytes(0.5), scale.to_share(300)
    (200, 1.0)
    """

    low_bytes: int
    """Peak of the smallest plan, by estimate."""
    high_bytes: int
    """Eager's peak, or the study's limit where that is lower."""

    def to_bytes(self, share: float) -> int:
        """Return the target in bytes of a share: 0 for the smallest plan, 1 for the upper end of the range."""
        return self.low_bytes + round(share * (self.high_bytes - self.low_bytes))

    def to_share(self, target_bytes: int) -> float:
        """Return the share of a target, at least 0 and at most 1."""
        width = self.high_bytes - self.low_bytes
        return min(1.0, max(0.0, (target_bytes - self.low_bytes) / width)) if width else 0.0


def find_budget_scale(trials: Iterable[Trial], rules: Rules) -> BudgetScale | None:
    """Return the range of a study's targets, from its records alone: a resumed study has the same.

    None before the smallest plan is recorded.
    """
    smallest: int | None = None
    baseline: Measurement | None = None
    for trial in trials:
        if trial.kind == TrialKind.BASELINE:
            baseline = trial.measurement
        elif trial.kind == TrialKind.SMALLEST and trial.estimate is not None:
            smallest = trial.estimate.peak_bytes
    if smallest is None:
        return None
    eager = baseline_step_bytes(baseline) if baseline is not None else None
    high = rules.budget_bytes if eager is None else min(eager, rules.budget_bytes)
    return BudgetScale(smallest, max(smallest, high))
