"""Improve an order by local moves: remove a few recomputations, evict again, and keep the result if it is cheaper."""

import random

from autotune.planners.recompute.editable_order import EditableOrder
from autotune.planners.recompute.eviction import Eviction, undo

EFFORT = 60_000_000
"""Maximum of rounds times the squared length of the order: a round visits every candidate once."""


def improve(runs: EditableOrder, limit: int, greed: float, rounds: int, seed: int = 0) -> EditableOrder:
    """Return the cheapest order within the limit after so many rounds; never more expensive than `runs`."""
    rng = random.Random(len(runs.sequence) + seed)
    best, seconds = runs, runs.seconds
    for _ in range(min(rounds, EFFORT // max(1, len(runs.sequence)) ** 2)):
        repeats = sorted(best.repeats(), key=best.position)
        if not repeats:
            break
        trial = best.copy()
        trial.limit = limit
        _remove(trial, _sample(repeats, rng))
        perturbation = [rng.uniform(0.5, 1.0) for _ in trial.graph.ops]
        Eviction(trial, greed * rng.choice((0.7, 1.0, 1.4)), perturbation).fit(limit)
        if trial.peak > limit:
            continue
        undo(trial, limit)
        if trial.seconds < seconds:
            best, seconds = trial, trial.seconds
    return best


def _sample(repeats: list[int], rng: random.Random) -> list[int]:
    """Return a few repeated runs: neighbours, or a random sample."""
    count = min(len(repeats), rng.choice((1, 2, 4, 8)))
    if rng.random() < 0.5:
        start = rng.randrange(len(repeats) - count + 1)
        return repeats[start : start + count]
    return rng.sample(repeats, count)


def _remove(runs: EditableOrder, chosen: list[int]) -> None:
    for run in chosen:
        if runs.position(run) >= 0 and runs.is_repeat(run):
            edit = runs.weigh_edit(removed=[run])
            if edit is not None:
                runs.apply(edit)
