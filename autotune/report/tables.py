"""Format trials as rows of text, for the terminal and for the HTML report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.confirm import ConfirmationStatus, ConfirmedPlan
from autotune.study.verdicts.front import FrontPoint, FrontStatus
from autotune.study.verdicts.ranking import eager_step_bytes
from autotune.study.verdicts.statistics import Interval, block_means, format_percent, median_interval
from autotune.units import mib

COLUMNS = (
    "plan", "kind", "order", "update", "recompute", "offload",
    "peak MiB", "charged MiB", "step ms", "ratio", "verdict",
)  # fmt: skip
"""Columns of the table of trials."""
CONFIRMED_COLUMNS = (
    "plan", "peak MiB", "charged MiB", "step ms", "step interval", "overhead", "overhead interval", "vs. best", "rounds",
    "verdict",
)  # fmt: skip
"""Columns of the table of re-measured plans."""
FRONT_COLUMNS = (
    "plan", "charged MiB", "of eager", "step ms", "overhead", "overhead interval", "rounds", "vs. rival", "verdict",
)  # fmt: skip
"""Columns of the table of a Pareto front."""
NUMERIC_COLUMNS = frozenset({
    "of eager", "plan", "peak MiB", "charged MiB", "step ms", "ratio", "step interval", "overhead", "overhead interval", "rounds",
})  # fmt: skip
"""Columns to align to the right."""
DUPLICATE, NOT_RUN, BEST, DISTURBED = "duplicate", "not run", "BEST", "disturbed"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial as text. A figure with `~` before it is predicted."""

    trial: Trial
    cells: tuple[str, ...]
    best: bool = False
    pale: bool = False
    """True for a trial that cannot be chosen."""


def trial_rows(trials: Iterable[Trial], best: Trial | None = None) -> list[TrialRow]:
    """Return a row under `COLUMNS` for each trial; bytes exclude the idle process."""
    return [_trial_row(trial, best is not None and trial.number == best.number) for trial in trials]


def confirmed_rows(confirmed: Sequence[ConfirmedPlan], baseline: Trial) -> list[TrialRow]:
    """Return rows under `CONFIRMED_COLUMNS`: eager as it ran interleaved with them, then the re-measured plans."""
    if not confirmed:
        return []
    measurements = [plan.trial.measurement for plan in confirmed if plan.trial.measurement is not None]
    eager_blocks = block_means([seconds for measurement in measurements for seconds in measurement.baseline_seconds])
    eager = baseline.measurement
    cells = (
        "eager", mib(eager.step_peak_bytes if eager else None), mib(eager.step_charged_bytes if eager else None),
        *_interval_cells(median_interval(eager_blocks) if len(eager_blocks) > 1 else None), "-", "-", "-", "-", "baseline",
    )  # fmt: skip
    return [TrialRow(baseline, cells), *(_confirmed_row(plan) for plan in confirmed)]


def front_rows(points: Sequence[FrontPoint], baseline: Trial | None) -> list[TrialRow]:
    """Return rows under `FRONT_COLUMNS`: the re-measured plans of a study of the front, the smallest first."""
    eager = baseline.measurement if baseline is not None else None
    return [_front_row(point, eager_step_bytes(eager)) for point in points]


def trial_verdict(trial: Trial, best: bool = False) -> str:
    """Return the outcome of a trial in at most two words."""
    if trial.measurement is None:
        return "unfinished"
    outcome = trial.measurement.outcome
    if best:
        return BEST
    if trial.kind == TrialKind.REPEAT:
        return DUPLICATE
    if outcome is Outcome.OVER_BUDGET and trial.measurement.highest_bytes is None:
        return NOT_RUN
    return outcome.value.replace("_", " ")


def mark_disturbed(verdict: str, trial: Trial) -> str:
    """Return the verdict, marked if other work disturbed the times of the trial."""
    is_disturbed = trial.measurement is not None and trial.measurement.disturbed and trial.kind != TrialKind.REPEAT
    return f"{verdict}, {DISTURBED}" if is_disturbed else verdict


def format_knobs(knobs: Mapping[str, object]) -> str:
    """Return a planner and its knobs, as `window store=ssd window=2`; `-` for no planner.

    >>> format_knobs({"planner": "window", "store": "ssd", "window": 2})
    'window store=ssd window=2'
    """
    name = str(knobs.get("planner", "-"))
    rest = (f"{knob}={_short(value)}" for knob, value in knobs.items() if knob != "planner")
    return " ".join((name, *rest))


def _trial_row(trial: Trial, best: bool) -> TrialRow:
    measurement = trial.measurement
    peak = measurement.step_peak_bytes if measurement else None
    predicted = trial.estimate.peak_bytes if trial.estimate and peak is None else None
    charged = measurement.step_charged_bytes if measurement else None
    seconds = measurement.median_seconds if measurement else None
    ratio = measurement.time_ratio if measurement else None
    planners = [format_knobs(trial.settings.get(kind, {})) for kind in ("order", "update", "recompute", "offload")]
    if trial.plan is None and not trial.settings:  # a plan that could not be made has settings
        planners = ["eager", "-", "-", "-"]
    cells = (
        str(trial.number),
        trial.label,
        *planners,
        mib(peak) if predicted is None else f"~{mib(predicted)}",
        mib(charged),
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        "-" if ratio is None else f"{ratio:.3f}",
        mark_disturbed(trial_verdict(trial, best), trial),
    )
    return TrialRow(trial, cells, best, trial_verdict(trial, best) not in ("ok", BEST))


def _confirmed_row(plan: ConfirmedPlan) -> TrialRow:
    measurement, ratio = plan.trial.measurement, plan.ratio
    cells = (
        str(plan.trial.number),
        mib(measurement.step_peak_bytes if measurement else None),
        mib(measurement.step_charged_bytes if measurement else None),
        *_interval_cells(plan.seconds), "-" if ratio is None else format_percent(ratio.middle), _overhead_interval(ratio),
        "-" if plan.versus_best is None else str(plan.versus_best), str(plan.rounds),
        mark_disturbed(plan.label, plan.trial),
    )  # fmt: skip
    return TrialRow(plan.trial, cells, plan.status is ConfirmationStatus.BEST)


def _front_row(point: FrontPoint, eager_bytes: int | None) -> TrialRow:
    ratio, is_front = point.ratio, point.status is FrontStatus.FRONT
    cells = (
        str(point.number),
        mib(point.charged_bytes),
        f"{100 * point.charged_bytes / eager_bytes:.1f} %" if eager_bytes else "-",
        _interval_cells(point.seconds)[0],
        "-" if ratio is None else format_percent(ratio.middle),
        _overhead_interval(ratio),
        str(point.rounds),
        "-" if point.versus_rival is None else str(point.versus_rival),
        mark_disturbed(point.label, point.trial),
    )
    return TrialRow(point.trial, cells, is_front, not is_front)


def _overhead_interval(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    return f"{format_percent(ratio.low)} to {format_percent(ratio.high)} ({ratio.basis})"


def _interval_cells(seconds: Interval | None) -> tuple[str, str]:
    if seconds is None:
        return "-", "-"
    return f"{seconds.middle * 1e3:.1f}", f"{seconds.low * 1e3:.1f} to {seconds.high * 1e3:.1f}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
