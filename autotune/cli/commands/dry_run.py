"""`autotune tune --dry-run`: what a study is likely to find and to take; no step of the model is run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.commands.session import answering, harness, print_json, say
from autotune.measure.device import profile as device_profile
from autotune.planners.space import chosen_space
from autotune.records.json_codec import to_json
from autotune.study.offline.calibration import past_runs
from autotune.study.offline.forecast import Forecast, Point, forecast, frontier, point, traced
from autotune.study.outcome import impossible, too_small
from autotune.study.verdicts.ranking import Rules, aim_bytes
from autotune.units import fmt_bytes, fmt_seconds, mib

if TYPE_CHECKING:
    from autotune.measure.survey import Surveyed
    from autotune.records.config import Config


def run(config: "Config", *, json: bool) -> None:
    """Print the frontier, trials and time; InfeasibleError after that where the budget lies below all of it."""
    with answering() as out:
        with harness(config) as runner:
            say(f"capturing {config.ref} and profiling its ops; nothing is trained")
            surveyed = runner.survey()
        graph, costs = surveyed.graph, surveyed.costs
        reference = traced(graph, costs)
        budget = config.parsed_budget.step_bytes(
            floor_bytes=surveyed.floor_bytes, baseline_step_bytes=reference.peak_bytes
        )
        searched = chosen_space(config.planners.model_dump(), surveyed.device.kind, costs.stores)
        profile = device_profile.find(Path(config.runs), surveyed.device)
        past = past_runs(Path(config.runs), str(config.ref), surveyed.device)
        noise = profile.noise if profile else 0.0
        points = [
            point(made, reference, past, noise)
            for made in frontier(graph, costs, searched, (aim_bytes(budget, []), budget))
        ]
        expected = forecast(config, reference.seconds, past)
        if json:
            print_json(_document(points, expected, budget, surveyed), out)
        else:
            noted = (
                [] if profile else ["no device profile: autotune device probe measures the noise that bars leave out"]
            )
            lines = [*_table(points), *_words(config, surveyed, points, expected, budget), *noted]
            out.write("\n".join(lines) + "\n")
    rules = Rules(budget, surveyed.floor_bytes, None, reference.seconds)
    low = points[0].made.estimate
    if low.peak_bytes > budget:
        raise impossible(config, rules, graph, costs) or too_small(
            config, rules, low.peak_bytes, low.peak_op, stores=bool(costs.stores)
        )


def _table(points: list[Point]) -> list[str]:
    rows = [("step MiB", "", "step time", "", "beside the traced plan", "")]
    for one in points:
        expected, (low, high) = one.made.estimate, one.nbytes
        rows.append(
            (
                mib(expected.peak_bytes), f"({mib(low)} to {mib(high)})",
                fmt_seconds(expected.seconds), f"({fmt_seconds(one.seconds[0])} to {fmt_seconds(one.seconds[1])})",
                _percent(one.ratio), f"({_percent(one.ratios[0])} to {_percent(one.ratios[1])})",
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _words(config: "Config", surveyed: "Surveyed", points: list[Point], expected: Forecast, budget: int) -> list[str]:
    inside = [one for one in points if one.made.estimate.peak_bytes <= aim_bytes(budget, [])]
    holds = [one for one in points if one.nbytes[1] <= budget]
    best = (
        f"the fastest plan for it is predicted at {_percent(inside[-1].ratio)}" if inside else "no plan is sure to fit"
    )
    sure = f", one that fits even at the upper end of its bar at {_percent(holds[-1].ratio)}" if holds else ""
    return [
        "",
        f"budget  {config.budget}: {fmt_bytes(max(budget, 0))} for the step above a floor of "
        f"{fmt_bytes(surveyed.floor_bytes)}; {best}{sure}",
        f"bars    {', '.join(dict.fromkeys(one.source for one in points))}",
        f"search  about {expected.trials} trials of {fmt_seconds(expected.trial_seconds)}, "
        f"{fmt_seconds(expected.seconds)} in all; ended by {expected.ended_by}",
    ]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _document(points: list[Point], expected: Forecast, budget: int, surveyed: "Surveyed") -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "budget_bytes": budget,
        "floor_bytes": surveyed.floor_bytes,
        "device": to_json(surveyed.device),
        "frontier": [
            {
                "settings": one.made.settings,
                "estimate": to_json(one.made.estimate),
                "ratio": one.ratio,
                "step_bytes_range": one.nbytes,
                "seconds_range": one.seconds,
                "ratio_range": one.ratios,
                "bars": one.source,
            }
            for one in points
        ],
        "search": asdict(expected),
    }
