"""Make the planners' plans for budgets between the smallest plan and eager: the first points of a front."""

import time
from collections.abc import Sequence
from itertools import pairwise

from autotune.planners.candidates import Candidate, Planning
from autotune.predict.simulate import Estimate
from autotune.records.trial import Trial, TrialKind
from autotune.study.front.budget_scale import BudgetScale
from autotune.study.verdicts.front import spread

LEVELS = 10
"""Number of budgets above the smallest plan that the planners make a plan for."""
EVEN_LEVELS = 5
"""Number of the first budgets, which are spread evenly; each further one halves the largest step of predicted time."""
LEVELS_SHARE = 0.1
"""Maximum share of the study's time for making the plans of all levels."""


class BudgetLevels:
    """Budgets of one study that still lack a plan; each is proposed once.

    The top level is the highest budget. No level exceeds the peak of its plan: by estimate, more bytes save no time. The
    last levels go where predicted time falls most, because a point of the front has to be faster than all smaller ones.
    """

    def __init__(self, planning: Planning, trials: Sequence[Trial], scale: BudgetScale, study_seconds: float) -> None:
        self._planning, self._scale = planning, scale
        self._seconds = LEVELS_SHARE * study_seconds / LEVELS
        """Seconds after which planning of one level ends; its first plan is made even if that takes longer."""
        self._answers: dict[int, Estimate] = {}
        """Estimate of each level's plan, by target in bytes; includes the plans of earlier sessions."""
        self._proposed = set[int]()
        """Targets that were proposed: those with a plan, and those that no plan of the planners met."""
        planned: list[int] = []
        for trial in trials:
            if trial.kind == TrialKind.SEARCH:
                break  # the sampler follows the last level, and its repeats are no levels
            if trial.estimate is None:
                continue
            if trial.kind == TrialKind.SMALLEST:
                self._answers[scale.low_bytes] = trial.estimate
            # earlier versions recorded no targets
            elif trial.kind in (TrialKind.PLANNER, TrialKind.REPEAT) and trial.target_bytes is not None:
                self.add(trial)
                planned.append(trial.target_bytes)
        self._top = max(planned, default=None)
        self._left = LEVELS - len(planned)

    def add(self, trial: Trial) -> None:
        """Add the trial of a proposed plan."""
        if trial.target_bytes is not None and trial.estimate is not None:
            self._answers[trial.target_bytes] = trial.estimate
            self._proposed.add(trial.target_bytes)

    def propose_next(self, highest_bytes: int) -> Candidate | None:
        """Return the fastest plan by estimate of the next level, or None after the last one.

        `highest_bytes` is the largest peak whose charge should meet the study's limit; it bounds the top level's target.
        """
        while self._left > 0:
            self._left -= 1
            target = self._choose_target(highest_bytes)
            if target is None:
                return None
            self._proposed.add(target)
            candidate = self._plan(target)
            if candidate is not None:
                self._answers.setdefault(target, candidate.estimate)  # the trial's own replaces it
                return candidate
            if self._top == target:
                return None
        return None

    def _choose_target(self, highest_bytes: int) -> int | None:
        """Return the next target: the top, then the even levels, then the middle of the largest step of time."""
        if self._top is None:
            self._top = min(self._scale.high_bytes, highest_bytes)
            return self._top
        if self._top not in self._answers:
            return None
        low, width = self._scale.low_bytes, self._answers[self._top].peak_bytes - self._scale.low_bytes
        even = [low + width * level // EVEN_LEVELS for level in range(EVEN_LEVELS + 1)]
        # the two ends come first and have plans already; they only determine the order of the others
        for rank in spread([(level,) for level in even])[2:]:
            if even[rank] not in self._proposed and low < even[rank] < low + width:
                return even[rank]
        return self._halve_largest_step()

    def _halve_largest_step(self) -> int | None:
        """Return the middle of two neighbouring plans' bytes between which the predicted time falls most; None without any."""
        plans = sorted({(answer.peak_bytes, answer.seconds) for answer in self._answers.values()})
        steps = {
            (low + high) // 2: slow / fast
            for (low, slow), (high, fast) in pairwise(plans)
            if high > low + 1 and fast < slow and (low + high) // 2 not in self._proposed
        }
        return max(steps, key=lambda target: steps[target], default=None)

    def _plan(self, target_bytes: int) -> Candidate | None:
        """Return the fastest plan that meets a target by estimate; None where the planners' plans all exceed it."""
        until = time.monotonic() + self._seconds
        fastest: Candidate | None = None
        for candidate in self._planning.propose(target_bytes, self._seconds):
            fits = candidate.estimate.peak_bytes <= target_bytes
            if fits and (fastest is None or candidate.estimate.seconds < fastest.estimate.seconds):
                fastest = candidate
            if time.monotonic() > until:
                break
        return fastest
