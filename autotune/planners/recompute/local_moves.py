"""Local moves: take back a few recomputations, fill the room that is missing anew, keep what became cheaper."""

import random

from autotune.planners.recompute.editable_order import Runs
from autotune.planners.recompute.eviction import Eviction, undo

EFFORT = 60_000_000
"""Rounds times the square of the order's length, at most: a round looks at every candidate once."""


def improve(runs: Runs, limit: int, greed: float, rounds: int, seed: int = 0) -> Runs:
    """The cheapest order at or under the limit that a fixed number of moves finds; never dearer than `runs`."""
    rng = random.Random(len(runs.sequence) + seed)
    best, seconds = runs, runs.seconds
    for _ in range(min(rounds, EFFORT // max(1, len(runs.sequence)) ** 2)):
        repeats = sorted(best.repeats(), key=best.at)
        if not repeats:
            break
        trial = best.copy()
        trial.limit = limit
        _take_back(trial, _some(repeats, rng))
        taste = [rng.uniform(0.5, 1.0) for _ in trial.graph.ops]
        Eviction(trial, greed * rng.choice((0.7, 1.0, 1.4)), taste).fit(limit)
        if trial.peak > limit:
            continue
        undo(trial, limit)
        if trial.seconds < seconds:
            best, seconds = trial, trial.seconds
    return best


def _some(repeats: list[int], rng: random.Random) -> list[int]:
    """A few repeated runs: neighbours, or from anywhere."""
    count = min(len(repeats), rng.choice((1, 2, 4, 8)))
    if rng.random() < 0.5:
        start = rng.randrange(len(repeats) - count + 1)
        return repeats[start : start + count]
    return rng.sample(repeats, count)


def _take_back(runs: Runs, chosen: list[int]) -> None:
    for run in chosen:
        if runs.at(run) >= 0 and runs.is_repeat(run):
            change = runs.change(removed=[run])
            if change is not None:
                runs.apply(change)
