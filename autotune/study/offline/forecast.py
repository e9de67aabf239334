"""Forecast a study before anything trains: the predicted Pareto front with its error ranges, trials and time."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.ir.costs import Costs
from autotune.ir.graph import TrainGraph
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners.auto import best_plan
from autotune.planners.candidates import Candidate, find_smallest
from autotune.planners.space import Space
from autotune.predict.simulate import Estimate, simulate
from autotune.records.config import Config
from autotune.records.trial import Trial
from autotune.study.front.budget_levels import LEVELS
from autotune.study.offline.calibration import (
    CHARGE_NOISE_BYTES,
    ErrorRanges,
    Range,
    compute_error_ranges,
    median_trial_seconds,
)
from autotune.study.session import PLANNED
from autotune.study.verdicts.front import FRONT_RUNS
from autotune.study.verdicts.next_run import CONFIRMATIONS

BUDGETS = 8
"""Number of budgets of the forecast, evenly from the lowest reachable peak to the traced one."""
PLANNING_SECONDS = 60.0
"""Planning time of all budgets together; each budget gets its first plan in any case."""
START_SECONDS = 10.0
"""Seconds of a trial for starting processes, importing torch and capturing the step."""
UNTIMED_STEPS = 10
"""Number of steps of a trial that are not timed: comparison, recording, warm-up."""
MIN_TRIALS = 2
"""Least number of trials: the baseline and one plan."""


@dataclass(frozen=True, slots=True)
class ForecastPoint:
    """A plan of the Pareto front, with the ranges that its measurement is expected in."""

    candidate: Candidate
    ratio: float
    """Predicted seconds over the traced plan's."""
    nbytes: Range
    """Range of the step's charge."""
    seconds: Range
    """Range of the step's seconds."""
    ratios: Range
    """Range of the seconds over the traced plan's."""
    source: str
    """Source of the error ranges, for people."""


@dataclass(frozen=True, slots=True)
class SearchForecast:
    """Expected number of trials and time of a search."""

    trials: int
    trial_seconds: float
    seconds: float
    """Total seconds."""
    ended_by: str
    """Limit that ends the search: `--time`, `--trials`, or `no gain`, after which more follow while plans get better."""


def simulate_traced(graph: TrainGraph, costs: Costs) -> Estimate:
    """Return the estimate of the step as captured."""
    return simulate(graph, lower(graph, Plan.traced(graph)), costs)


def forecast_frontier(
    graph: TrainGraph, costs: Costs, searched: Space, extra_budgets: Sequence[int] = ()
) -> list[Candidate]:
    """Return the predicted Pareto front of bytes and seconds, smallest first.

    `extra_budgets` are planned for besides the evenly spaced ones.
    """
    low, high = find_smallest(graph, costs, searched), simulate_traced(graph, costs).peak_bytes
    lowest = low.estimate.peak_bytes
    steps = range(BUDGETS) if high > lowest else range(1)
    budgets = {lowest + (high - lowest) * step // (BUDGETS - 1) for step in steps}
    # a budget below the smallest plan is planned for, too: the planners may reach it, see `find_lowest`
    budgets |= {budget for budget in extra_budgets if 0 < budget < high}
    patience = PLANNING_SECONDS / len(budgets)
    candidates = [low, *(best_plan(graph, costs, budget, searched, seconds=patience) for budget in sorted(budgets))]
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda plan: (plan.estimate.peak_bytes, plan.estimate.seconds)):
        if not front or candidate.estimate.seconds < front[-1].estimate.seconds:
            front.append(candidate)
    return front


def forecast_point(
    candidate: Candidate, reference: Estimate, past: Sequence[Sequence[Trial]], noise: float
) -> ForecastPoint:
    """Return a plan with its error ranges; waits for a store are predicted within a factor of two."""
    expected, errors = candidate.estimate, compute_error_ranges(candidate.settings, past, noise)
    waits = expected.seconds - expected.stall_seconds / 2, expected.seconds + expected.stall_seconds
    return ForecastPoint(
        candidate=candidate,
        ratio=expected.seconds / reference.seconds,
        nbytes=_bytes(expected.peak_bytes, errors),
        seconds=(waits[0] * errors.seconds[0], waits[1] * errors.seconds[1]),
        ratios=(waits[0] * errors.ratio[0] / reference.seconds, waits[1] * errors.ratio[1] / reference.seconds),
        source=errors.source,
    )


def forecast_search(config: Config, step_seconds: float, past: Sequence[Sequence[Trial]]) -> SearchForecast:
    """Return the expected effort of a search, from the duration of past trials or else from the steps of a trial."""
    steps = UNTIMED_STEPS + 4 * config.samples  # each timed step has an untimed one, and eager runs as many
    each = median_trial_seconds(past) or START_SECONDS + steps * step_seconds
    planned, confirmed = (LEVELS, FRONT_RUNS) if config.objective == "pareto" else (PLANNED, CONFIRMATIONS)
    ends = {"no gain": 2 + planned + config.patience + confirmed, "--time": int(config.time_seconds / each) - 1}
    if config.trials is not None:
        ends["--trials"] = config.trials + confirmed
    ended_by = min(ends, key=lambda end: ends[end])
    trials = max(MIN_TRIALS, ends[ended_by])
    # the baseline and its reference take as long as one more trial
    return SearchForecast(trials, each, (trials + 1) * each, ended_by)


def _bytes(predicted: int, errors: ErrorRanges) -> Range:
    low, high = (predicted * factor for factor in errors.nbytes)
    return min(low, predicted - CHARGE_NOISE_BYTES), max(high, predicted + CHARGE_NOISE_BYTES)
