"""The best plans, measured afresh in turns with plain eager: whose turn is next, and what may be said of each then."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from autotune.ir.plan import Plan
from autotune.records.json_codec import to_json
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial
from autotune.study.verdicts.ranking import NOTABLE, Rules, fitting, leader, paid, was_run, winner
from autotune.study.verdicts.statistics import Change, Interval, blocks, change, interval, turns

CONTENDERS = 3
"""Plans that may be the fastest, at most."""
REACH = 0.1
"""Share of time above the leader's from which on fresh numbers would not make a plan the winner."""
LEAST_ROUNDS, MOST_ROUNDS = 2, 6
"""Fresh processes that a contender's numbers come from; more than the least only while they do not tell."""
NOTICED = 0.03
"""Share of time: plans are as fast as each other once a difference of so much is excluded."""
ROOM = 0.1
"""Of the budget, that a safe fallback leaves free."""


class Word(StrEnum):
    """What the fresh numbers say of a plan beside the best one."""

    BEST = "BEST"
    TIE = "tie"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    """It may be as fast, and it may be notably slower."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A plan that was measured afresh."""

    trial: Trial
    """All its fresh runs as one."""
    word: Word
    rounds: int
    turns: tuple[float, ...]
    """Time over plain eager's beside it, block by block; in seconds where eager does not fit."""
    beside: Change | None = None
    """Its time over the best plan's; None of the best itself, and where too little ran."""
    best: int | None = None
    """Number of the trial that it is told beside."""
    fallback: bool = False
    """Whether it is the safe fallback."""

    @property
    def ratio(self) -> Interval | None:
        """Over plain eager's time of the same turns; None where eager does not fit, or too little ran."""
        seen = self.trial.measurement
        known = seen is not None and seen.time_ratio is not None and len(self.turns) > 1
        return interval(self.turns) if known else None

    @property
    def seconds(self) -> Interval | None:
        """Of a step; None where too little ran."""
        seen = self.trial.measurement
        steps = blocks(seen.step_seconds) if seen is not None else []
        return interval(steps) if len(steps) > 1 else None

    @property
    def verdict(self) -> str:
        """`BEST`, `tie with 12`, `slower`, `inconclusive`, `safe fallback`, or why it failed."""
        said: str = self.word.value
        if self.word is Word.TIE:
            said = f"tie with {self.best}"
        elif self.word is Word.FAILED and self.trial.measurement is not None:
            said = self.trial.measurement.outcome.value.replace("_", " ")
        return f"safe fallback, {said}" if self.fallback else said


def due(trials: Sequence[Trial], rules: Rules) -> Trial | None:
    """The plan to be measured next: of those that need it the one with the fewest fresh runs; None once all is told.

    Two rounds for each contender and one for a safe fallback; then more of the best and of those that cannot be told
    from it, but are not known to be as fast either.
    """
    first = contenders(trials, rules)
    safe = fallback(fitting(trials, rules), first[0], rules) if first else None
    rounds = Counter(trial.plan for trial in trials if trial.kind == "confirm" and was_run(trial))
    needed = {one.plan: LEAST_ROUNDS for one in first}
    if safe is not None:
        needed.setdefault(safe.plan, 1)
    asked = [*first, *([] if safe is None else [safe])]
    waiting = [one for one in asked if rounds[one.plan] < needed[one.plan]]
    if not waiting:
        told = confirmed(trials, rules)
        open_ = {one.trial.plan for one in told if one.word is Word.INCONCLUSIVE}
        open_ |= {one.trial.plan for one in told if open_ and one.word is Word.BEST}
        waiting = [one for one in asked if one.plan in open_ and rounds[one.plan] < MOST_ROUNDS]
    return min(waiting, key=lambda one: rounds[one.plan], default=None)


def contenders(trials: Sequence[Trial], rules: Rules) -> list[Trial]:
    """The plans that the search's own numbers say may be the fastest, its leader first; none that failed since."""
    alive = {trial.plan for trial in fitting(trials, rules)}
    searched = [trial for trial in trials if trial.kind != "confirm" and trial.plan in alive]
    first = leader(searched, rules)
    if first is None:
        return []
    others = [one for one in fitting(searched, rules) if one.plan != first.plan]
    near = [one for one in others if paid(one, rules) <= paid(first, rules) * (1 + REACH)]
    return [first, *sorted(near, key=lambda one: paid(one, rules))[: CONTENDERS - 1]]


def fallback(fit: Sequence[Trial], best: Trial, rules: Rules) -> Trial | None:
    """The plan to take where the budget turns out tighter than was said: the fastest of those that leave a tenth of it
    free, or where none does the smallest, if its charge is notably below the best's. None where the best leaves a
    tenth itself.
    """
    room = (1 - ROOM) * rules.budget_bytes
    if _charged(best) <= room:
        return None
    smaller = [one for one in fit if one.plan != best.plan and _charged(one) < (1 - NOTABLE) * _charged(best)]
    roomy = [one for one in smaller if _charged(one) <= room]
    if roomy:
        return min(roomy, key=lambda one: paid(one, rules))
    return min(smaller, key=_charged, default=None)


def confirmed(trials: Sequence[Trial], rules: Rules) -> list[Confirmed]:
    """Every plan that was measured afresh: the best, then the others by their fresh times, then what failed."""
    fresh: dict[Plan, list[Trial]] = {}
    for trial in trials:
        if trial.kind == "confirm" and trial.plan is not None and was_run(trial):
            fresh.setdefault(trial.plan, []).append(trial)
    fit = [one for one in fitting(trials, rules) if one.plan in fresh]
    alive = {one.plan for one in fit}
    failed = [Confirmed(_broken(runs), Word.FAILED, len(runs), ()) for plan, runs in fresh.items() if plan not in alive]
    best = winner(trials, rules)
    if best is None or best.plan is None or best.plan not in alive:
        return failed
    samples = {plan: _turns(runs) for plan, runs in fresh.items()}
    safe = fallback(fit, best, rules)
    found = []
    for one in sorted(fit, key=lambda one: (one.plan != best.plan, paid(one, rules))):
        assert one.plan is not None
        mine, theirs, rounds = samples[one.plan], samples[best.plan], len(fresh[one.plan])
        if one.plan == best.plan:
            found.append(Confirmed(one, Word.BEST, rounds, mine))
        else:
            beside = change(mine, theirs) if min(len(mine), len(theirs)) > 1 else None
            found.append(Confirmed(one, _word(beside), rounds, mine, beside, best.number, one is safe))
    return found + failed


def document(found: Sequence[Confirmed]) -> list[dict[str, Any]]:
    """The table for programs: base units in the names, an interval as its middle, low and high; None for unknown."""
    return [
        {
            "trial": one.trial.number,
            "verdict": one.verdict,
            "rounds": one.rounds,
            "step_peak_bytes": one.trial.measurement.step_peak_bytes if one.trial.measurement else None,
            "step_charged_bytes": one.trial.measurement.step_charged_bytes if one.trial.measurement else None,
            "step_seconds": to_json(one.seconds) if one.seconds else None,
            "time_ratio": to_json(one.ratio) if one.ratio else None,
            "beside_best": to_json(one.beside) if one.beside else None,
        }
        for one in found
    ]


def _word(beside: Change | None) -> Word:
    if beside is None:
        return Word.INCONCLUSIVE
    if beside.low > 1:
        return Word.SLOWER
    return Word.TIE if beside.high < 1 + NOTICED else Word.INCONCLUSIVE


def _turns(runs: Sequence[Trial]) -> tuple[float, ...]:
    """Block by block within each run: a run's last block may be a step short."""
    return tuple(chain.from_iterable(turns(run.measurement) for run in runs if run.measurement is not None))


def _broken(runs: Sequence[Trial]) -> Trial:
    """The first run that did not hold; where all did, the plan had failed before, and the last stands for it."""
    bad = [run for run in runs if run.measurement is not None and run.measurement.outcome is not Outcome.OK]
    return (bad or list(runs))[0 if bad else -1]


def _charged(trial: Trial) -> int:
    charged = trial.measurement.step_charged_bytes if trial.measurement is not None else None
    return 0 if charged is None else charged
