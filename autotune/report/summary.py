"""State the result of a run in one headline, one sentence and two lists of facts."""

from autotune.records.budget import Budget
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.trial import Trial
from autotune.study.outcome import describe_disturbance
from autotune.study.recorded_run import RecordedRun
from autotune.units import fmt_bytes, fmt_seconds

NEGLIGIBLE = 0.005
"""Largest relative difference of step times that the headline calls no difference."""


def summarize_run(records: RecordedRun) -> tuple[str, str]:
    """Return the result of a run as (headline, one more sentence)."""
    budget = str(records.config.get("budget", "its budget"))
    if not records.trials:
        return "No plan tried yet", "The run holds no trials; go on with autotune resume."
    best = records.best
    if best is None or best.measurement is None:
        return f"No plan that was tried fits {budget}", _describe_lowest(records)
    return _describe_best(records, best, best.measurement, budget)


def list_run_facts(records: RecordedRun) -> list[tuple[str, str]]:
    """Return workload, budget, trial count and graph as (term, value)."""
    workload = records.trials[0].workload if records.trials else str(records.config.get("workload", ""))
    budget, step = str(records.config.get("budget", "-")), records.budget_step_bytes
    graph = records.graph
    return [
        ("workload", workload),
        ("budget", budget if step is None else f"{budget}: {fmt_bytes(step)} for the step{_tolerance(records)}"),
        ("trials", str(len(records.trials))),
        (
            "graph",
            "-" if graph is None else f"{graph.name}, {len(graph.ops)} ops, {len(graph.values)} values, {graph.digest}",
        ),
        ("results of the best plan", _verification(records)),
        *([("disturbed by other work", disturbed)] if (disturbed := describe_disturbance(records.trials)) else []),
    ]


def list_device_facts(records: RecordedRun) -> list[tuple[str, str]]:
    """Return device, software and measuring conditions as (term, value); empty without a recorded device."""
    device = records.device
    if device is None:
        return []
    measurement = records.best.measurement if records.best else None
    facts = [
        ("silicon", f"{device.silicon} ({device.kind}), {device.cores} cores"),
        ("memory", fmt_bytes(device.memory_bytes)),
        ("software", f"torch {device.torch}" + (f", driver {device.driver}" if device.driver else "")),
    ]
    if measurement is not None:
        floor = measurement.floor_bytes
        facts.append(("idle process (floor)", "-" if floor is None else fmt_bytes(floor)))
        facts.append(("meter", measurement.meter or "-"))
        facts.append(("enforced limit", measurement.limit or "none"))
    return facts


def _describe_lowest(records: RecordedRun) -> str:
    """Name the plan that came closest to the budget."""
    tried = [trial for trial in records.trials if trial.plan and _measured_or_predicted_bytes(trial) is not None]
    lowest = min(tried, key=lambda trial: _measured_or_predicted_bytes(trial) or 0, default=None)
    step = records.budget_step_bytes
    if lowest is None:
        return f"{len(records.trials)} trials, none of them of a plan."
    verb = "was charged" if lowest.step_bytes is not None else "is predicted to use"
    allowed = "" if step is None else f"; the budget allows {fmt_bytes(max(step, 0))}"
    return (
        f"Plan {lowest.number} came lowest: its step {verb} {fmt_bytes(_measured_or_predicted_bytes(lowest) or 0)}{allowed}. "
        f"Raise the budget, or allow a store."
    )


def _describe_best(records: RecordedRun, best: Trial, measurement: Measurement, budget: str) -> tuple[str, str]:
    """Return (headline, sentence) of a run with a plan that fits."""
    peak, ratio = measurement.step_peak_bytes, measurement.time_ratio
    used = "" if peak is None else fmt_bytes(peak)
    limit = fmt_bytes(Budget.parse(budget).nbytes or 0) if "budget" in records.config and "%" not in budget else ""
    fits = f"Fits in {limit}" if limit else f"The step fits in {used}"
    if ratio is None:
        needs = f" of about {fmt_bytes(records.traced.peak_bytes)}" if records.traced else ""
        return f"{fits}, where plain PyTorch does not fit", (
            f"Plan {best.number} uses {used} and {fmt_seconds(measurement.median_seconds or 0)} a step; "
            f"the eager step{needs} did not run to its end, so there is no time to compare with."
        )
    return f"{fits} {_price(ratio)}", _describe_saving(records, best, peak)


def _price(ratio: float) -> str:
    if ratio >= 1 + NEGLIGIBLE:
        return f"for {100 * (ratio - 1):.0f} % more time"
    return "for no extra time" if ratio > 1 - NEGLIGIBLE else f"and saves {100 * (1 - ratio):.0f} % of the time"


def _describe_saving(records: RecordedRun, best: Trial, peak: int | None) -> str:
    eager = records.baseline.measurement if records.baseline else None
    eager_peak = eager.step_peak_bytes if eager else None
    if peak is None or not eager_peak:
        return ""
    eager_fits = eager is not None and apply_budget(eager, records.budget_step_bytes).outcome is Outcome.OK
    return (
        f"Plan {best.number} lowers the step's peak from {fmt_bytes(eager_peak)} to {fmt_bytes(peak)}, "
        f"{100 * (1 - peak / eager_peak):.0f} % less; "
        f"plain PyTorch {'fits the budget too' if eager_fits else 'is over the budget'}."
    )


def _tolerance(records: RecordedRun) -> str:
    share = records.budget_tolerance
    return f", {100 * share:g} % above it is tolerated" if share else ", without a tolerance"


def _verification(records: RecordedRun) -> str:
    """Describe how the best plan's results were compared with eager's."""
    measurement = records.best.measurement if records.best else None
    return "-" if measurement is None else measurement.verified or NOT_VERIFIED


def _measured_or_predicted_bytes(trial: Trial) -> int | None:
    """Return the bytes that the budget limits: measured, or else predicted."""
    measured = trial.step_bytes
    return trial.estimate.peak_bytes if measured is None and trial.estimate else measured
