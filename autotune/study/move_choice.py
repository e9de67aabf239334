"""Choose the next move of a study: a change of the leader's plan that may save more than a measurement can resolve."""

import math
from collections.abc import Iterator, Sequence

from autotune.measure.early_stop import EXPECTED_NOISE
from autotune.planners.candidates import Candidate, Planning
from autotune.planners.moves.cost_belief import MeasuredPlan
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.ranking import (
    Rules,
    allocator_overheads,
    compute_target_bytes,
    estimate_spread,
    exceeds_budget,
    measured_ratio,
    ratio_noise,
    select_leader,
)

MOVES_PER_SEARCH = 2
"""Number of moves that are measured before each suggestion of the sampler."""
RESOLUTION = 0.005
"""Smallest possible saving that is worth a trial, as a share of the step's time."""
LEAST_NOISE = 0.002
"""Least standard error of a measured step, as a share of its time."""
TARGET_SHARES = (1.0, 0.99)
"""Shares of the target that moves are made for, in turn: the layout in an arena may need more than the peak."""
LAYOUTS = 4
"""Maximum number of moves whose layout is computed for one choice."""


class MoveChooser:
    """Chooser of moves. Its choices depend on the trials alone, so a resumed study continues unchanged."""

    def __init__(self, planning: Planning, rules: Rules, *, is_on: bool = True) -> None:
        self._planning, self._rules = planning, rules
        self._source = planning.start_moves() if is_on else None

    def choose(self, trials: Sequence[Trial], until: float = math.inf) -> Candidate | None:
        """Return the move to measure next; None at the sampler's turn, where no move may save enough, and after `until`.

        `until` is a time of the monotonic clock. It bounds the search for moves on large graphs.
        """
        if self._source is None or not is_turn_of_moves(trials):
            return None
        parent = select_leader(trials, self._rules)
        if parent is None or parent.plan is None or parent.estimate is None or parent.measurement is None:
            return None
        measured = list(read_measured(trials, self._rules))
        seconds = next(each.seconds for each in measured if each.plan == parent.plan)
        least = seconds * max(RESOLUTION, ratio_noise(parent.measurement) / 2)
        measured_plans = {trial.plan for trial in trials}
        target = compute_move_target(parent, trials, self._rules)
        for share in TARGET_SHARES:
            moves = self._source.propose(parent.plan, int(share * target), measured, until)
            worthwhile = [move for move in moves if move.possible_seconds >= least and move.plan not in measured_plans]
            for move in worthwhile[:LAYOUTS]:
                candidate = Candidate(
                    parent.settings, move.plan, move.estimate, parent.target_bytes, parent.number, move.text
                )
                if not exceeds_budget(self._planning.estimate_layout(candidate), self._rules):
                    return candidate
            if not worthwhile:
                break
        return None


def is_turn_of_moves(trials: Sequence[Trial]) -> bool:
    """Return True if a move is next, and False if the sampler is.

    >>> is_turn_of_moves([])
    True
    """
    moves = sum(trial.kind == TrialKind.MOVE for trial in trials)
    suggested = sum(trial.kind in (TrialKind.SEARCH, TrialKind.REPEAT) for trial in trials)
    return moves < MOVES_PER_SEARCH * (suggested + 1)


def compute_move_target(parent: Trial, trials: Sequence[Trial], rules: Rules) -> int:
    """Return the peak bytes that moves of a plan have to meet.

    A target for planners allows for the largest overhead (charge over peak) of all plans. A move changes little of its parent,
    so its target allows for the largest overhead of the parent and of the moves measured from it. Searching for a
    margin is not needed: a move that exceeds the budget raises the overhead that the next moves allow for.
    """
    same = {trial.number for trial in trials if trial.plan == parent.plan}
    family = [trial for trial in trials if trial.number in same or trial.parent in same]
    overheads = allocator_overheads(family)
    target = compute_target_bytes(rules.budget_bytes, [max(overheads)] if overheads else [], estimate_spread(trials))
    return max(target, parent.estimate.peak_bytes if parent.estimate is not None else 0)


def read_measured(trials: Sequence[Trial], rules: Rules) -> Iterator[MeasuredPlan]:
    """Yield the measured plans with their seconds: the time ratio times the seconds of eager's step in the baseline."""
    first = trials[0].measurement if trials else None
    baseline = first.median_seconds if first is not None else None
    for trial in trials:
        result = trial.measurement
        if trial.plan is None or trial.estimate is None or result is None or trial.kind == TrialKind.REPEAT:
            continue
        ratio = measured_ratio(result, rules)
        if ratio is None:
            continue
        seconds = ratio * (baseline or rules.baseline_seconds)
        count = len(result.step_seconds)
        noise = max(LEAST_NOISE, ratio_noise(result) if count >= 4 else EXPECTED_NOISE / math.sqrt(count))
        yield MeasuredPlan(trial.plan, trial.estimate, seconds, seconds * noise)
