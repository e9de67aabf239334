"""Turn the records of a run into the charts of its report."""

from dataclasses import replace

from autotune.predict.step_view import ByteUse, StepTimeline
from autotune.records.measurement import Outcome, TransferTrace
from autotune.records.trial import Trial, TrialKind
from autotune.report import charts
from autotune.report.charts import EngineBars, MemoryPanel, PointKind, TrialPoint
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.front import FrontPoint
from autotune.units import fmt_bytes, fmt_seconds

PHASE_COLOURS = {
    "executing": charts.SKY,
    "forward": charts.SKY,
    "backward": charts.BLUE,
    "recompute": charts.ORANGE,
    "update": charts.GREEN,
    "waiting": charts.VERMILION,
    "save": charts.PURPLE,
    "load": charts.GREY,
}
ROLE_COLOURS: dict[str, str] = dict(
    zip(
        ByteUse,
        (charts.BLUE, charts.SKY, charts.GREY, charts.PALE, charts.ORANGE, charts.GREEN, charts.PURPLE, charts.YELLOW),
        strict=True,
    )
)


def draw_charts(records: RecordedRun) -> dict[str, str]:
    """Return the charts `frontier`, `memory` and `lanes` as SVG; a chart without data is an empty string."""
    return {"frontier": _frontier(records), "memory": _memory(records), "lanes": _transfers(records)}


def draw_trial(records: RecordedRun, trial: Trial) -> str:
    """Return the memory chart of a trial that ran, beside the traced step; an empty string without a graph or a plan."""
    if records.traced is None or records.costs is None or trial.plan is None or not trial.was_run:
        return ""
    timeline = StepTimeline(records.traced.graph, records.costs, trial.plan)
    panels = [
        _memory_panel("as traced", records.traced, records.baseline),
        _memory_panel(f"plan {trial.number}", timeline, trial),
    ]
    return charts.draw_memory(panels, ROLE_COLOURS, records.budget_step_bytes)


def trial_points(records: RecordedRun) -> list[TrialPoint]:
    """Return a point for each trial with bytes and a time, measured or predicted; `cost_label` names the unit of time."""
    points = []
    verified = {point.trial.number: point for point in records.front}
    intervals = {plan.trial.number: plan.ratio for plan in records.confirmed} if records.has_ratios else {}
    for trial in records.trials:
        if trial.measurement is None or trial.kind == TrialKind.REPEAT:
            continue
        nbytes, cost = trial.step_bytes, _measured_cost(trial, as_ratio=records.has_ratios)
        is_measured = nbytes is not None and cost is not None
        if not is_measured and trial.estimate is not None:
            nbytes, cost = trial.estimate.peak_bytes, trial.estimate.seconds / _cost_unit(records)
        if nbytes is not None and cost is not None:
            kind = _point_kind(records, trial, trial.measurement.outcome, is_measured=is_measured)
            point = TrialPoint(trial.number, nbytes, cost, kind)
            if (interval := intervals.get(trial.number)) is not None:
                point = replace(point, cost=interval.middle, interval=(interval.low, interval.high))
            points.append(_mark_verified(point, verified[trial.number]) if trial.number in verified else point)
    return points


def _mark_verified(point: TrialPoint, verified: FrontPoint) -> TrialPoint:
    """Return the point of a plan's last run as a point of the front: all runs pooled, under the plan's own number."""
    cost = point.cost if verified.ratio is None else verified.ratio.middle
    kind = PointKind.BEST if point.kind is PointKind.BEST else PointKind.FRONT
    return replace(point, number=verified.number, nbytes=verified.charged_bytes, cost=cost, kind=kind, is_verified=True)


def cost_label(records: RecordedRun) -> str:
    """Return the axis label of the points' costs."""
    return "step time / eager step time" if records.has_ratios else "step time, ms"


def _point_kind(records: RecordedRun, trial: Trial, outcome: Outcome, *, is_measured: bool) -> PointKind:
    if trial.kind == TrialKind.BASELINE:
        return PointKind.BASELINE
    if records.best is not None and trial.number == records.best.number:
        return PointKind.BEST
    match outcome:
        case Outcome.OVER_BUDGET:
            return PointKind.OVER_BUDGET if is_measured else PointKind.PREDICTED
        case Outcome.OK | Outcome.STOPPED_EARLY:
            return PointKind.WITHIN_BUDGET if is_measured else PointKind.PREDICTED
        case _:
            return PointKind.FAILED


def _cost_unit(records: RecordedRun) -> float:
    """Return the seconds of one unit on the cost axis: the predicted traced step, or a millisecond."""
    return records.traced.seconds if records.has_ratios and records.traced else 1e-3


def _measured_cost(trial: Trial, *, as_ratio: bool) -> float | None:
    """Return the ratio to the baseline's time, or else milliseconds."""
    if trial.measurement is None:
        return None
    seconds = trial.measurement.median_seconds
    if as_ratio:
        return 1.0 if trial.kind == TrialKind.BASELINE and seconds is not None else trial.measurement.time_ratio
    return None if seconds is None else 1e3 * seconds


def _frontier(records: RecordedRun) -> str:
    points = trial_points(records)
    if not points:
        return ""
    return charts.draw_frontier(points, budget_bytes=records.budget_step_bytes, cost_label=cost_label(records))


def _memory(records: RecordedRun) -> str:
    if records.traced is None:
        return ""
    panels = [_memory_panel("as traced", records.traced, records.baseline)]
    if records.best is not None and records.chosen is not None:
        panels.append(_memory_panel(f"plan {records.best.number}", records.chosen, records.best))
    return charts.draw_memory(panels, ROLE_COLOURS, records.budget_step_bytes)


def _memory_panel(name: str, timeline: StepTimeline, trial: Trial | None) -> MemoryPanel:
    """Return a step's panel, with the measured peak of its trial."""
    seconds, _ = timeline.highest_bytes
    roles = {role: (*nbytes, *nbytes[-1:]) for role, nbytes in timeline.bytes_by_role.items()}
    title = f"{name}: peak {fmt_bytes(timeline.peak_bytes)}, {fmt_seconds(timeline.seconds)}"
    measured = trial.measurement.step_peak_bytes if trial is not None and trial.measurement else None
    stamps = (*seconds, timeline.seconds)[: len(roles["parameters"])]
    return MemoryPanel(title, stamps, roles, measured, timeline.phase_starts)


def _transfers(records: RecordedRun) -> str:
    if records.chosen is None or not records.chosen.schedule.store:
        return ""
    panels: dict[str, EngineBars] = {"simulated": records.chosen.engine_bars()}
    measurement = records.best.measurement if records.best else None
    if measurement is not None and measurement.lanes is not None:
        panels["measured"] = _measured_bars(measurement.lanes)
    return charts.draw_transfers(panels, PHASE_COLOURS)


def _measured_bars(lanes: TransferTrace) -> EngineBars:
    """Return the measured bars of one step in the form of `StepTimeline.engine_bars`."""
    waits = sorted((*lanes.save_stalls, *lanes.load_stalls))
    ends = [0.0, *(end for _, end in waits)]
    begins = [*(begin for begin, _ in waits), lanes.seconds]
    ran = [(end, begin, "executing") for end, begin in zip(ends, begins, strict=True)]
    return {
        "execute": [*ran, *((*wait, "waiting") for wait in waits)],
        "load": [(*span, "load") for span in lanes.loads],
        "save": [(*span, "save") for span in lanes.saves],
    }
