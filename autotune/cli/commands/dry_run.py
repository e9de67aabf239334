"""`autotune tune --dry-run`: predict the Pareto front, the trials and the time of a study without running a step."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autotune.api.launch import estimate_batch_size, survey
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import InfeasibleError
from autotune.records.config import BATCH_OBJECTIVES
from autotune.records.json_codec import to_json
from autotune.study.batch.description import describe_estimate
from autotune.study.offline.study_forecast import forecast_study
from autotune.study.verdicts.statistics import format_percent
from autotune.units import fmt_bytes, fmt_seconds, mib

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.study.offline.forecast import ForecastPoint
    from autotune.study.offline.study_forecast import StudyForecast

TOO_NOISY = 1.0
"""Relative noise of the device's times above which bars around predicted times mean nothing."""


def run(config: "Config", *, json: bool, without_effect: Sequence[str] = ()) -> None:
    """Print the forecast of a study; then raise InfeasibleError where no plan fits the budget.

    `without_effect` are given options that only a study uses; a note names them.
    """
    if without_effect:
        print_note(f"--dry-run does not use {', '.join(without_effect)}")
    if config.objective in BATCH_OBJECTIVES:
        estimate_sizes(config, json=json)
        return
    with answer_stream() as out:
        surveyed = survey(config, print_note)
        print_note(f"planning {len(surveyed.graph.ops)} ops for several budgets: minutes for thousands of ops")
        forecast = forecast_study(config, surveyed)
        if json:
            print_json(_document(forecast, config.objective), out)
        else:
            is_busy = forecast.noise is not None and forecast.noise > TOO_NOISY
            table = _table(forecast.points, with_times=not is_busy)
            out.write("\n".join([*table, "", *_summary(config, forecast), *_note_noise(forecast.noise)]) + "\n")
    if forecast.error is not None:
        raise forecast.error


def estimate_sizes(config: "Config", *, json: bool) -> None:
    """Print the largest batch sizes by estimate; then raise InfeasibleError where none fits the budget."""
    with answer_stream() as out:
        estimate = estimate_batch_size(config, print_note)
        if json:
            print_json(to_json(estimate), out)
        else:
            lines = describe_estimate(estimate)
            if config.objective == "throughput":
                lines = [*lines, "note    samples per second are not estimated: leave --dry-run out to measure them"]
            out.write("\n".join(lines) + "\n")
    if not estimate.largest:
        raise InfeasibleError(
            f"{estimate.workload}: no batch size fits {estimate.budget} by estimate: {estimate.argument}={estimate.size} needs "
            f"{fmt_bytes(estimate.largest_bytes)} with the smallest plan; raise --budget"
        )


def _note_noise(noise: float | None) -> list[str]:
    if noise is None:
        return ["no device profile: autotune device probe measures the noise that the error bars lack"]
    if noise > TOO_NOISY:
        return [
            f"times are not predicted: the machine was too busy when it was profiled, equal work varied by {100 * noise:.0f} %; "
            "end other work, then: autotune device probe"
        ]
    return []


def _table(points: "Sequence[ForecastPoint]", *, with_times: bool) -> list[str]:
    rows: list[tuple[str, ...]] = [("step MiB", "", "step time", "", "vs. traced plan", "")]
    for point in points:
        estimate, (low, high) = point.candidate.estimate, point.nbytes
        rows.append(
            (
                mib(estimate.peak_bytes), f"({mib(low)} to {mib(high)})",
                fmt_seconds(estimate.seconds), f"({fmt_seconds(point.seconds[0])} to {fmt_seconds(point.seconds[1])})",
                format_percent(point.ratio), f"({format_percent(point.ratios[0])} to {format_percent(point.ratios[1])})",
            )
        )  # fmt: skip
    if not with_times:
        rows = [row[:2] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _summary(config: "Config", forecast: "StudyForecast") -> list[str]:
    fitting = [point for point in forecast.points if point.candidate.estimate.peak_bytes <= forecast.target_bytes]
    certain = [point for point in forecast.points if point.nbytes[1] <= forecast.budget_bytes]
    best = (
        f"the fastest plan is predicted at {format_percent(fitting[-1].ratio)}"
        if fitting
        else "no plan is certain to fit"
    )
    safe = (
        f", the fastest that fits at the upper end of its bar at {format_percent(certain[-1].ratio)}" if certain else ""
    )
    floor, search = forecast.surveyed.floor_bytes, forecast.search
    if config.objective == "pareto":
        best, safe = _describe_front(fitting), ""
    return [
        f"budget  {'up to ' if config.objective == 'pareto' else ''}{config.budget}: "
        f"{fmt_bytes(max(forecast.budget_bytes, 0))} for the step above a floor of {fmt_bytes(floor)}; {best}{safe}",
        f"bars    {', '.join(dict.fromkeys(point.source for point in forecast.points))}",
        f"search  about {search.trials} trials of {fmt_seconds(search.trial_seconds)}, "
        f"{fmt_seconds(search.seconds)} in total; ended by {search.ended_by}",
    ]


def _describe_front(points: "Sequence[ForecastPoint]") -> str:
    """Describe both ends of the predicted front below the limit."""
    if not points:
        return "no plan is certain to fit"
    smallest, fastest = (
        f"{fmt_bytes(point.candidate.estimate.peak_bytes)} at {format_percent(point.ratio)}"
        for point in (points[0], points[-1])
    )
    return f"the front is predicted from {smallest} to {fastest}"


def _document(forecast: "StudyForecast", objective: str) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    return {
        "objective": objective,
        "budget_bytes": forecast.budget_bytes,
        "floor_bytes": forecast.surveyed.floor_bytes,
        "device": to_json(forecast.surveyed.device),
        "frontier": [
            {
                "settings": point.candidate.settings,
                "estimate": to_json(point.candidate.estimate),
                "ratio": point.ratio,
                "step_bytes_range": point.nbytes,
                "seconds_range": point.seconds,
                "ratio_range": point.ratios,
                "bars": point.source,
            }
            for point in forecast.points
        ],
        "search": asdict(forecast.search),
    }
