"""Build the rows of the report's tables: modules, decisions, predictions, and full error messages."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.records.measurement import Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.report.decision_savings import DecisionSaving, evaluate_decisions
from autotune.report.tables import DISTURBED, DUPLICATE, NOT_RUN, trial_verdict
from autotune.study.recorded_run import RecordedRun
from autotune.units import mib

MAX_TRIALS, MAX_MODULES, MAX_DECISIONS, MAX_NOTES = 500, 15, 8, 30
"""Maximum rows of trials, of modules, of modules per kind of decision, and of error messages: they keep the page small."""
MAX_LINE = 160
"""Maximum characters of an error line in the table of trials."""


@dataclass(frozen=True, slots=True)
class ErrorNote:
    """One full error message of a worker, and the trials that ended with it."""

    trials: tuple[int, ...]
    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class BarRow:
    """A table row whose first figure is also drawn as a bar."""

    cells: tuple[str, ...]
    share: float
    """Length of the bar, in percent of the longest."""
    is_total: bool = False


def module_rows(records: RecordedRun) -> list[BarRow]:
    """Return (module, MiB under the plan, MiB of the traced step), each at its own peak; empty without a graph."""
    if records.traced is None:
        return []
    before = records.traced.bytes_at_peak()
    now = records.chosen.bytes_at_peak() if records.chosen else before
    ranked = sorted(now.items(), key=lambda item: (-item[1], item[0]))
    most = ranked[0][1] or 1
    rows = [
        BarRow((layer, mib(nbytes), mib(before[layer])), 100 * nbytes / most) for layer, nbytes in ranked[:MAX_MODULES]
    ]
    if rest := ranked[MAX_MODULES:]:
        others = sum(nbytes for _, nbytes in rest)
        others_before = mib(before.total() - sum(before[layer] for layer, _ in ranked[:MAX_MODULES]))
        rows.append(BarRow((f"all others ({len(rest)})", mib(others), others_before), 100 * min(others / most, 1)))
    return [*rows, BarRow(("total", mib(now.total()), mib(before.total())), 0, is_total=True)]


def decision_rows(records: RecordedRun) -> list[BarRow]:
    """Return (kind, module, MiB saved, cost in ms, MiB transferred) of the best plan's decisions.

    Each kind has a total row, then its modules with the largest savings first. Empty without a plan.
    """
    if records.chosen is None:
        return []
    savings = evaluate_decisions(records.chosen)
    most = max((saving.saved_bytes for saving in savings), default=0) or 1
    rows = []
    for kind in dict.fromkeys(saving.kind for saving in savings):
        total, *modules = (saving for saving in savings if saving.kind == kind)
        notable = [saving for saving in modules if saving.saved_bytes or saving.seconds] if len(modules) > 1 else []
        where = f"{len(modules)} modules" if len(modules) > 1 else modules[0].layer
        rows.append(BarRow((kind, where, *_saving_cells(total)), 100 * total.saved_bytes / most, is_total=True))
        rows += [
            BarRow(("", saving.layer, *_saving_cells(saving)), 100 * saving.saved_bytes / most)
            for saving in notable[:MAX_DECISIONS]
        ]
    return rows


def select_trials(records: RecordedRun) -> Sequence[Trial]:
    """Return the trials to list: all, or in a large run only those that ran or failed."""
    if len(records.trials) <= MAX_TRIALS:
        return records.trials
    notable = [trial for trial in records.trials if trial_verdict(trial) not in (DUPLICATE, NOT_RUN)]
    best = records.best.number if records.best else -1
    return [trial for rank, trial in enumerate(notable) if rank < MAX_TRIALS or trial.number == best]


def first_error_line(trial: Trial) -> str:
    """Return the first line of the reason that disqualified a trial, shortened; empty for a trial that ran well."""
    measurement = trial.measurement
    if measurement is None or (measurement.outcome is Outcome.OK and trial.kind != TrialKind.REPEAT):
        return ""
    line = next(iter(measurement.detail.strip().splitlines()), "")
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


def error_notes(records: RecordedRun) -> list[ErrorNote]:
    """Return every message too long for the table, once for all trials that ended with it."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for trial in records.trials:
        detail = trial.measurement.detail.strip() if trial.measurement else ""
        if detail != first_error_line(trial) and trial.kind != TrialKind.REPEAT:
            numbers.setdefault((trial_verdict(trial), detail), []).append(trial.number)
    notes = list(numbers.items())[:MAX_NOTES]
    return [ErrorNote(tuple(trials), verdict, _omit_middle(text)) for (verdict, text), trials in notes]


def prediction_rows(records: RecordedRun) -> list[tuple[str, ...]]:
    """Return (trial, predicted MiB, measured MiB, error %, predicted ms, measured ms, error %) of each plan that ran."""
    rows: list[tuple[str, ...]] = []
    for trial in select_trials(records):
        estimate, measurement = trial.estimate, trial.measurement
        if (
            estimate is None
            or measurement is None
            or measurement.step_peak_bytes is None
            or trial.kind == TrialKind.REPEAT
        ):
            continue
        seconds = measurement.median_seconds
        error = DISTURBED if measurement.disturbed else _relative_error(estimate.seconds, seconds)
        rows.append((
            str(trial.number), mib(estimate.peak_bytes), mib(measurement.step_peak_bytes),
            _relative_error(estimate.peak_bytes, measurement.step_peak_bytes), f"{estimate.seconds * 1e3:.1f}",
            "-" if seconds is None else f"{seconds * 1e3:.1f}", error,
        ))  # fmt: skip
    return rows


def summarize_accuracy(records: RecordedRun) -> str:
    """Return the median and the largest prediction error of peak and time in one sentence; empty if nothing ran."""
    peaks, times = [], []
    for trial in records.trials:
        estimate, measurement = trial.estimate, trial.measurement
        if estimate is None or measurement is None or not measurement.step_peak_bytes or trial.kind == TrialKind.REPEAT:
            continue
        peaks.append(abs(estimate.peak_bytes / measurement.step_peak_bytes - 1))
        if measurement.median_seconds and not measurement.disturbed:
            times.append(abs(estimate.seconds / measurement.median_seconds - 1))
    parts = [
        f"{quantity} {100 * statistics.median(errors):.2f} % in the median, {100 * max(errors):.2f} % at worst"
        for quantity, errors in (("peak", peaks), ("time", times))
        if errors
    ]
    return f"Prediction error: {'; '.join(parts)}." if parts else ""


def _saving_cells(saving: DecisionSaving) -> tuple[str, str, str]:
    return (
        mib(saving.saved_bytes),
        f"{1e3 * saving.seconds:.1f}" if saving.seconds else "-",
        mib(saving.moved_bytes) if saving.moved_bytes else "-",
    )


def _omit_middle(text: str, head: int = 400, tail: int = 800) -> str:
    """Keep the two ends of a long message: the error's name, and the line that raised it."""
    return text if len(text) <= head + tail else f"{text[:head]}\n…\n{text[-tail:]}"


def _relative_error(predicted: float, measured: float | None) -> str:
    return "-" if not measured else f"{100 * (predicted / measured - 1):+.2f} %"
