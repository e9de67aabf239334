"""What a study is likely to find, before anything trains: the predicted frontier with its error bars, trials and time."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import KINDS, space
from autotune.planners.auto import Plans, leaders
from autotune.planners.candidates import Candidate, smallest
from autotune.planners.knobs import Settings
from autotune.predict.simulate import Estimate, simulate
from autotune.records.config import Config
from autotune.records.trial import Trial
from autotune.study.offline.calibration import GRAIN_BYTES, Bars, Range, bars, trial_seconds
from autotune.study.session import CONFIRMATIONS, PLANNED

BUDGETS = 8
"""From the lowest peak that is reached to the traced one, evenly."""
PLANNING_SECONDS = 60.0
"""For all budgets together; each has its first answer in any case."""
START_SECONDS = 10.0
"""Of a trial: processes start, import torch and capture the step."""
OWN_STEPS = 10
"""Of a trial: compared, recorded and warmed up, beside those that are timed in turns."""
FEWEST = 4
"""Trials in any case: baseline, two plans, a confirmation."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan of the frontier, and between what its measurement is expected."""

    made: Candidate
    ratio: float
    """Predicted seconds over the traced plan's."""
    nbytes: Range
    """Of what the step is charged."""
    seconds: Range
    ratios: Range
    source: str
    """Of the bars."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a search is likely to take."""

    trials: int
    trial_seconds: float
    seconds: float
    """In all."""
    ended_by: str
    """`--time`, `--trials`, or `no gain`: then more follow where plans keep getting better."""


def traced(graph: TrainGraph, costs: Costs) -> Estimate:
    """The step as it was captured."""
    return simulate(graph, lower(graph, Plan.traced(graph)), costs)


def frontier(graph: TrainGraph, costs: Costs, searched: space.Space, wanted: Sequence[int] = ()) -> list[Candidate]:
    """The plans that no other beats in bytes and seconds both, the smallest first; `wanted` are budgets to look at too."""
    low, high = smallest(graph, costs, searched), traced(graph, costs).peak_bytes
    lowest = low.estimate.peak_bytes
    steps = range(BUDGETS) if high > lowest else range(1)
    budgets = {lowest + (high - lowest) * step // (BUDGETS - 1) for step in steps}
    budgets |= {budget for budget in wanted if lowest < budget < high}
    patience = PLANNING_SECONDS / len(budgets)
    made = [low, *(_fastest(graph, costs, searched, budget, patience) for budget in sorted(budgets))]
    best: list[Candidate] = []
    for one in sorted(made, key=lambda one: (one.estimate.peak_bytes, one.estimate.seconds)):
        if not best or one.estimate.seconds < best[-1].estimate.seconds:
            best.append(one)
    return best


def point(made: Candidate, reference: Estimate, past: Sequence[Sequence[Trial]], noise: float) -> Point:
    """With error bars; waits for a store are predicted within a factor of two."""
    expected, off = made.estimate, bars(made.settings, past, noise)
    waits = expected.seconds - expected.stall_seconds / 2, expected.seconds + expected.stall_seconds
    return Point(
        made=made,
        ratio=expected.seconds / reference.seconds,
        nbytes=_bytes(expected.peak_bytes, off),
        seconds=(waits[0] * off.seconds[0], waits[1] * off.seconds[1]),
        ratios=(waits[0] * off.ratio[0] / reference.seconds, waits[1] * off.ratio[1] / reference.seconds),
        source=off.source,
    )


def forecast(config: Config, step_seconds: float, past: Sequence[Sequence[Trial]]) -> Forecast:
    """By what trials took before, or by the steps that one is made of."""
    steps = OWN_STEPS + 4 * config.samples  # a timed step has one beside it that is not, and eager's run in turns
    each = trial_seconds(past) or START_SECONDS + steps * step_seconds
    ends = {"no gain": 2 + PLANNED + config.patience + CONFIRMATIONS, "--time": int(config.time_seconds / each) - 1}
    if config.trials is not None:
        ends["--trials"] = config.trials + CONFIRMATIONS
    ended_by = min(ends, key=lambda end: ends[end])
    trials = max(FEWEST, ends[ended_by])
    # the baseline and its reference take as long as a trial more
    return Forecast(trials, each, (trials + 1) * each, ended_by)


def _bytes(predicted: int, off: Bars) -> Range:
    low, high = (predicted * factor for factor in off.nbytes)
    return min(low, predicted - GRAIN_BYTES), max(high, predicted + GRAIN_BYTES)


def _fastest(graph: TrainGraph, costs: Costs, searched: space.Space, budget_bytes: int, seconds: float) -> Candidate:
    """The best of what planners find for a budget in so many seconds."""
    plans = Plans(graph, costs, budget_bytes)
    choices = {kind: tuple(planners) for kind, planners in searched.items()}
    begun, best = time.monotonic(), Settings()
    for found in leaders(plans, choices, functools.partial(space.preset, KINDS, searched)):
        best = found
        if time.monotonic() - begun > seconds:
            break
    return Candidate(best, *plans.make(best))
