"""Forecast a whole study from a survey: its Pareto front, its number of trials and its time. Nothing is trained."""

from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.measure.device import profile as device_profile
from autotune.measure.survey import WorkloadSurvey
from autotune.planners.space import space_for_device
from autotune.records.config import Config
from autotune.study.offline.calibration import load_past_runs
from autotune.study.offline.forecast import (
    ForecastPoint,
    SearchForecast,
    forecast_frontier,
    forecast_point,
    forecast_search,
    simulate_traced,
)
from autotune.study.outcome import explain_too_small, prove_infeasible
from autotune.study.verdicts.ranking import Rules, compute_target_bytes
from autotune.workloads.loop import Loop


@dataclass(frozen=True, slots=True)
class StudyForecast:
    """Predicted results of a study, and the effort that it takes."""

    surveyed: WorkloadSurvey
    budget_bytes: int
    """Bytes that the budget leaves to the step, above the process's floor."""
    target_bytes: int
    """Bytes for which planners plan, which leave room for the allocator's waste."""
    points: tuple[ForecastPoint, ...]
    """Pareto front with error bars, the smallest plan first."""
    search: SearchForecast
    noise: float | None
    """Relative noise of the device's times, which the error bars contain; None without a device profile."""
    error: AutotuneError | None
    """Reason why no plan fits the budget; None where a plan may fit."""


def forecast_study(config: Config, surveyed: WorkloadSurvey) -> StudyForecast:
    """Forecast the study of a config on the device of its survey, calibrated by past runs of the same workload."""
    graph, costs = surveyed.graph, surveyed.costs
    traced = simulate_traced(graph, costs)
    budget = config.parsed_budget.step_bytes(floor_bytes=surveyed.floor_bytes, baseline_step_bytes=traced.peak_bytes)
    target = compute_target_bytes(budget, [])
    space = space_for_device(config.planners.model_dump(), surveyed.device.kind, costs.stores)
    profile = device_profile.find(Path(config.runs), surveyed.device)
    past = load_past_runs(Path(config.runs), str(config.ref), surveyed.device)
    noise = profile.noise if profile else 0.0
    candidates = forecast_frontier(graph, costs, space, (target, budget))
    lowest = candidates[0].estimate
    error: AutotuneError | None = None
    if lowest.peak_bytes > budget:
        rules = Rules(budget, surveyed.floor_bytes, None, traced.seconds)
        error = prove_infeasible(config, rules, graph, costs, lowest.peak_bytes) or explain_too_small(
            config, rules, lowest.peak_bytes, lowest.peak_op, stores=bool(costs.stores)
        )
    return StudyForecast(
        surveyed=surveyed,
        budget_bytes=budget,
        target_bytes=target,
        points=tuple(forecast_point(candidate, traced, past, noise) for candidate in candidates),
        # a measured step is a whole update
        search=forecast_search(config, traced.seconds * Loop.parse(surveyed.loop).accumulate, past),
        noise=None if profile is None else profile.noise,
        error=error,
    )
