"""Compare two plans: decisions, predicted and measured figures, and live memory at their peaks."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.planners import KINDS
from autotune.predict.simulate import Estimate
from autotune.predict.step_view import StepTimeline
from autotune.records.measurement import Measurement
from autotune.records.trial import Trial, TrialKind
from autotune.report.tables import format_knobs
from autotune.study.recorded_run import RecordedRun
from autotune.units import fmt_bytes, fmt_seconds, mib


@dataclass(frozen=True)
class PlanSide:
    """One of the two plans."""

    name: str
    trial: Trial
    timeline: StepTimeline
    budget_bytes: int | None
    device: str
    """Silicon of the device that measured it."""

    @property
    def plan(self) -> Plan:
        """Plan of the trial; for the baseline the traced step."""
        return self.trial.plan or Plan.traced(self.timeline.graph)


def list_choices(records: RecordedRun) -> dict[int, str]:
    """Return labels of the trials to compare, by number: the best first, then the baseline."""
    best = records.best.number if records.best else -1
    trials = [
        trial
        for trial in records.trials
        if trial.kind != TrialKind.REPEAT and (trial.plan or trial.kind == TrialKind.BASELINE)
    ]
    trials.sort(key=lambda trial: (trial.number != best, trial.kind != TrialKind.BASELINE, trial.number))
    return {trial.number: _label(trial, best=trial.number == best) for trial in trials}


def build_side(records: RecordedRun, number: int, name: str) -> PlanSide:
    """Return a trial with its simulated step; ConfigError if the trial or the graph is missing."""
    trial = next((trial for trial in records.trials if trial.number == number), None)
    if trial is None:
        raise ConfigError(f"{name}: no trial {number}; choose another")
    if records.graph is None or records.costs is None:
        raise ConfigError(f"{name}: no graph.json and costs.json; the run ended before its step was captured")
    timeline = StepTimeline(records.graph, records.costs, trial.plan or Plan.traced(records.graph))
    device = records.device.silicon if records.device else "?"
    return PlanSide(name, trial, timeline, records.budget_step_bytes, device)


def memory_points(first: PlanSide, second: PlanSide) -> list[tuple[str, float, float]]:
    """Return (plan, milliseconds, MiB) of both plans over the simulated time of one step."""
    points = []
    for side in (first, second):
        seconds, nbytes = side.timeline.highest_bytes
        times, heights = [*seconds, side.timeline.seconds], [*nbytes, nbytes[-1]]  # the last height lasts to the end
        points += [(side.name, 1e3 * second, height / 2**20) for second, height in zip(times, heights, strict=True)]
    return points


def list_budgets(first: PlanSide, second: PlanSide) -> list[tuple[str, int]]:
    """Return (name, bytes) of the step budgets: one if they are equal, none where a budget is unknown."""
    if first.budget_bytes == second.budget_bytes:
        return [] if first.budget_bytes is None else [("budget", first.budget_bytes)]
    budgets = (("first budget", first.budget_bytes), ("second budget", second.budget_bytes))
    return [(name, nbytes) for name, nbytes in budgets if nbytes is not None]


def compare_decisions(first: PlanSide, second: PlanSide) -> list[tuple[str, str, str]]:
    """Return (decision, first, second): planners with their knobs, then the resulting decisions."""
    settings = first.trial.settings, second.trial.settings
    planners = [
        (kind, format_knobs(settings[0].get(kind, {})), format_knobs(settings[1].get(kind, {}))) for kind in KINDS
    ]
    return planners + [(name, describe(first), describe(second)) for name, describe in _DECISIONS]


OWN_TURNS = ("step time, measured", "waiting for the store, measured")
"""Figures of which two trials have no difference: other steps ran beside each, on a machine that changes."""


def compare_figures(first: PlanSide, second: PlanSide) -> list[tuple[str, str, str, str]]:
    """Return (figure, first, second, difference), predicted and measured; `-` for an unknown figure."""
    rows = []
    for name, fmt, read in _FIGURES:
        left, right = read(first), read(second)
        same_turns = name not in OWN_TURNS or first.trial == second.trial
        rows.append((name, _format(fmt, left), _format(fmt, right), _difference(left, right) if same_turns else ""))
    return rows


def compare_peaks(first: PlanSide, second: PlanSide, most: int = 15) -> list[tuple[str, float, float, float]]:
    """Return (layer, first MiB, second MiB, difference) of live memory at each plan's peak, largest difference first."""
    before, after = first.timeline.bytes_at_peak(), second.timeline.bytes_at_peak()
    layers = sorted({*before, *after}, key=lambda layer: (-abs(after[layer] - before[layer]), layer))[:most]
    return [
        (layer, before[layer] / 2**20, after[layer] / 2**20, (after[layer] - before[layer]) / 2**20) for layer in layers
    ]


def _label(trial: Trial, *, best: bool) -> str:
    measurement = trial.measurement
    charged = measurement.step_charged_bytes if measurement else None
    ratio = measurement.time_ratio if measurement else None
    kind = "eager, as traced" if trial.plan is None else trial.label
    parts = [f"{trial.number} {kind}"]
    parts += [f"{mib(charged)} MiB"] if charged is not None else []
    parts += [f"{ratio:.2f}x"] if ratio is not None and trial.plan is not None else []
    return ", ".join(parts) + (" (best)" if best else "")


def _describe_recomputed(side: PlanSide) -> str:
    if not side.plan.recomputed:
        return "nothing"
    seconds = side.trial.estimate.recompute_seconds if side.trial.estimate else 0.0
    return f"{side.plan.recomputed} runs, {fmt_seconds(seconds)}"


def _describe_offloaded(side: PlanSide) -> str:
    if not side.plan.offload:
        return "nothing"
    moved = side.trial.estimate.transfer_bytes if side.trial.estimate else 0
    values = len({swap.value for swap in side.plan.offload})
    return f"{values} values to {side.plan.store}, window of {side.plan.window}, {fmt_bytes(moved)} a step"


def _describe_inplace(side: PlanSide) -> str:
    return f"{len(side.plan.inplace)} values" if side.plan.inplace else "nothing"


_DECISIONS: tuple[tuple[str, Callable[[PlanSide], str]], ...] = (
    ("recomputed", _describe_recomputed),
    ("offloaded", _describe_offloaded),
    ("in-place", _describe_inplace),
)


def _estimated(read: Callable[[Estimate], float | None]) -> Callable[[PlanSide], float | None]:
    return lambda side: None if side.trial.estimate is None else read(side.trial.estimate)


def _measured(read: Callable[[Measurement], float | None]) -> Callable[[PlanSide], float | None]:
    return lambda side: None if side.trial.measurement is None else read(side.trial.measurement)


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.3f}x"


_FIGURES: tuple[tuple[str, Callable[[float], str], Callable[[PlanSide], float | None]], ...] = (
    ("peak of the step, predicted", fmt_bytes, lambda side: side.timeline.peak_bytes),
    ("peak of the step, measured", fmt_bytes, _measured(lambda measurement: measurement.step_peak_bytes)),
    ("charged for the step, predicted", fmt_bytes, _estimated(lambda estimate: estimate.charged_bytes)),
    ("charged for the step, measured", fmt_bytes, _measured(lambda measurement: measurement.step_charged_bytes)),
    ("step time, predicted", fmt_seconds, lambda side: side.timeline.seconds),
    ("step time, measured", fmt_seconds, _measured(lambda measurement: measurement.median_seconds)),
    ("step time over eager", _format_ratio, _measured(lambda measurement: measurement.time_ratio)),
    ("recomputation, predicted", fmt_seconds, _estimated(lambda estimate: estimate.recompute_seconds)),
    ("waiting for the store, predicted", fmt_seconds, _estimated(lambda estimate: estimate.stall_seconds)),
    ("waiting for the store, measured", fmt_seconds, _measured(lambda measurement: measurement.stall_seconds)),
    ("transferred, predicted", fmt_bytes, _estimated(lambda estimate: estimate.transfer_bytes)),
)
"""Name, format and source of each figure."""


def _format(fmt: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else fmt(value)


def _difference(first: float | None, second: float | None) -> str:
    """Return the relative difference, as `-12.5 %`; empty if it is undefined."""
    return "" if not first or second is None else f"{100 * (second / first - 1):+.1f} %"
