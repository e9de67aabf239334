"""Make the planners' plans for budgets spread evenly between the smallest plan and eager: the first points of a front."""

import time
from collections.abc import Sequence

from autotune.planners.candidates import Candidate, Planning
from autotune.records.trial import Trial, TrialKind
from autotune.study.front.budget_scale import BudgetScale
from autotune.study.verdicts.front import spread

LEVELS = 10
"""Number of budgets above the smallest plan that the planners make a plan for."""


class BudgetLevels:
    """Budgets of one study that still lack a plan; each is proposed once.

    The top level is the highest budget. Above the bytes of its plan no level lies: a larger plan is no faster by
    estimate.
    """

    def __init__(
        self, planning: Planning, trials: Sequence[Trial], scale: BudgetScale, *, planning_seconds: float
    ) -> None:
        self._planning, self._scale = planning, scale
        self._seconds = planning_seconds / (LEVELS + 1)
        """Planning time of one level; its first plan is made in any case."""
        recorded = [trial for trial in trials if trial.kind in (TrialKind.PLANNER, TrialKind.REPEAT)]
        self._targets = {trial.target_bytes for trial in recorded if trial.target_bytes is not None}
        # a resumed study has the levels of its first session, whatever allocator overheads it measured since
        tops = [trial for trial in recorded if trial.kind == TrialKind.PLANNER and trial.target_bytes is not None]
        top = max(tops, key=lambda trial: trial.target_bytes or 0, default=None)
        self._left = None if top is None or top.estimate is None else self._spread_levels(top.estimate.peak_bytes)

    def propose_next(self, highest_bytes: int) -> Candidate | None:
        """Return the fastest plan by estimate of the next level, or None after the last one.

        `highest_bytes` are the peak bytes whose charge meets the study's limit now; no target lies above.
        """
        if self._left is None:
            top = self._plan(min(self._scale.high_bytes, highest_bytes))
            self._left = [] if top is None else self._spread_levels(top.estimate.peak_bytes)
            if top is not None:
                return top
        while self._left:
            candidate = self._plan(min(self._left.pop(0), highest_bytes))
            if candidate is not None:
                return candidate
        return None

    def _spread_levels(self, highest_bytes: int) -> list[int]:
        """Return the targets between the smallest plan and the top level's that have no plan yet."""
        low, width = self._scale.low_bytes, highest_bytes - self._scale.low_bytes
        # the ends are measured already; they are part of what the others are spread over
        levels = [low + width * level // LEVELS for level in range(LEVELS + 1)] if width > 0 else []
        between = [levels[rank] for rank in spread([(level,) for level in levels])[2:]]
        return [level for level in dict.fromkeys(between) if level not in self._targets]

    def _plan(self, target_bytes: int) -> Candidate | None:
        """Return the fastest plan that meets a target by estimate; None where the planners' plans all exceed it."""
        until = time.monotonic() + self._seconds
        fastest: Candidate | None = None
        for candidate in self._planning.propose(target_bytes):
            fits = candidate.estimate.peak_bytes <= target_bytes
            if fits and (fastest is None or candidate.estimate.seconds < fastest.estimate.seconds):
                fastest = candidate
            if time.monotonic() > until:
                break
        return fastest
