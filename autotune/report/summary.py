"""State the result of a run in one headline, one sentence and two lists of facts."""

from datetime import UTC, datetime
from pathlib import Path

from autotune.ir.plan import REBUILD_PRICE, Plan
from autotune.records.budget import Budget
from autotune.records.device import Device
from autotune.records.measurement import Measurement, Outcome, apply_budget
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.run_dir import resume_command
from autotune.records.trial import Trial
from autotune.study.batch.description import describe_search
from autotune.study.batch.records import BatchSearch
from autotune.study.outcome import describe_disturbance
from autotune.study.recorded_run import RecordedRun
from autotune.study.verdicts.confirm import TIE_MARGIN
from autotune.study.verdicts.front import FrontPoint, FrontStatus
from autotune.study.verdicts.statistics import Interval, format_percent
from autotune.units import fmt_bytes, fmt_seconds

NEGLIGIBLE = 0.005
"""Largest relative difference of step times that the headline calls none, however narrow the interval."""


def summarize_run(records: RecordedRun) -> tuple[str, str]:
    """Return the result of a run as (headline, one more sentence)."""
    budget = str(records.config.get("budget", "its budget"))
    if not records.trials:
        return "No plan tried yet", "The run holds no trials; go on with autotune resume."
    best = records.best
    if all(trial.plan is None for trial in records.trials):
        return "Nothing but the baseline ran yet", f"Go on with {resume_command(records.run_dir or Path(records.name))}"
    if best is None or best.measurement is None:
        return _describe_no_winner(records, budget)
    if records.front:
        return _describe_front(records)
    return _describe_best(records, best, best.measurement, budget)


def list_run_facts(records: RecordedRun) -> list[tuple[str, str]]:
    """Return workload, budget, trial count and graph as (term, value)."""
    workload = records.trials[0].workload if records.trials else str(records.config.get("workload", ""))
    budget, step = str(records.config.get("budget", "-")), records.budget_step_bytes
    graph = records.graph
    return [
        ("workload", workload),
        (
            "largest budget" if records.is_front else "budget",
            budget if step is None else f"{budget}: {fmt_bytes(step)} for the step{_tolerance(records)}",
        ),
        ("trials", str(len(records.trials))),
        (
            "graph",
            "-" if graph is None else f"{graph.name}, {len(graph.ops)} ops, {len(graph.values)} values, {graph.digest}",
        ),
        ("kernels", _capture_name(records)),
        ("results of the best plan", _verification(records)),
        ("time over eager's", _format_ratio(records.time_ratio) + _remark_on_times(records)),
        *([] if records.batch_search is None else _list_size_facts(records.batch_search)),
        ("date", _format_date(records)),
        ("machine", device.silicon if (device := _find_device(records)) else "-"),
        *([("disturbed by other work", disturbed)] if (disturbed := describe_disturbance(records.trials)) else []),
    ]


def list_device_facts(records: RecordedRun) -> list[tuple[str, str]]:
    """Return device, software and measuring conditions as (term, value); empty without a recorded device."""
    device = _find_device(records)
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


def _find_device(records: RecordedRun) -> Device | None:
    """Return the device that measured the best plan, or that of the last session where no record names it."""
    measurement = records.best.measurement if records.best else None
    return (measurement.device if measurement else None) or records.device


def _describe_no_winner(records: RecordedRun, budget: str) -> tuple[str, str]:
    """Return (headline, sentence) of a run in which plans were tried and none won: too large, or failed."""
    results = [
        trial.measurement for trial in records.trials if trial.plan is not None and trial.measurement is not None
    ]
    failed = [result for result in results if result.outcome.is_failure]
    too_large = {Outcome.OVER_BUDGET, Outcome.OUT_OF_MEMORY}
    if not failed or any(result.outcome in too_large for result in results):
        return f"No plan that was tried fits {budget}", _describe_lowest(records)
    words = failed[-1].outcome.value.replace("_", " ")
    reason = failed[-1].detail.strip().partition("\n")[0] or words
    return f"No plan ran to its end: {words}", (
        f"{len(failed)} of {len(results)} plans failed, the last one: {reason}. Nothing is known of the budget. "
        f"Each trial has its reason below; once that is resolved, go on with {resume_command(records.run_dir or Path(records.name))}"
    )


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
    charged = measurement.step_charged_bytes  # a budget limits the charge, which the peak of live tensors may be below
    used = fmt_bytes((peak if charged is None else charged) or 0)
    nbytes = Budget.parse(budget).nbytes if "budget" in records.config else None
    limit = "" if nbytes is None else fmt_bytes(nbytes)
    fits = f"Fits in {limit}" if limit else f"The step fits in {used}"
    if ratio is None:
        needs = f" of about {fmt_bytes(records.traced.peak_bytes)}" if records.traced else ""
        return f"{fits}, where plain PyTorch does not fit", (
            f"Plan {best.number} uses {used} and {fmt_seconds(measurement.median_seconds or 0)} a step; "
            f"the eager step{needs} did not run to its end, so there is no time to compare with."
        )
    headline = f"{fits} {describe_time(records.time_ratio)}{_remark_on_times(records)}"
    return headline, _describe_saving(records, best, peak)


def _describe_front(records: RecordedRun) -> tuple[str, str]:
    """Return (headline, sentence) of a verified front: its number of points and its two ends."""
    smallest, fastest = records.front[0], records.front[-1]
    count = len(records.front)
    if count == 1:
        return f"A front of one plan: {_describe_point(smallest)}", "Go on with autotune resume for more points."
    uncertain = sum(point.status is FrontStatus.UNCERTAIN for point in records.front_plans)
    others = len(records.front_plans) - count
    left = (
        f"{others} other re-measured plans are no points of the front, {uncertain} of them within the noise."
        if others
        else ""
    )
    ends = f"{_describe_point(smallest)} to {_describe_point(fastest)}"
    return f"A front of {count} plans: {ends}", f"Each is faster than every smaller one. {left}".strip()


def _describe_point(point: FrontPoint) -> str:
    """Return `612.0 MiB at +4.8 %`, or with seconds where eager does not fit."""
    if point.ratio is not None:
        return f"{fmt_bytes(point.charged_bytes)} at {format_percent(point.ratio.middle)}"
    seconds = point.seconds.middle if point.seconds is not None else 0.0
    return f"{fmt_bytes(point.charged_bytes)} at {fmt_seconds(seconds)}"


def describe_time(ratio: Interval | None) -> str:
    """Describe a time ratio as the end of a sentence; only an interval without equal times shows a difference.

    An interval with equal times that reaches above a tie is stated as it is.

    >>> describe_time(Interval(1.06, 1.05, 1.07))
    'for 6 % more time'
    >>> describe_time(Interval(0.9, 0.67, 1.02))
    'and is no slower within the noise (-33 % to +2 %)'
    >>> describe_time(Interval(1.05, 0.99, 1.4))
    'and may take -1 % to +40 % more time'
    >>> describe_time(None)
    'but too few steps were timed to compare it with eager'
    """
    if ratio is None:
        return "but too few steps were timed to compare it with eager"
    is_range = ratio.samples > 0 and ratio.confidence is None
    span = f"{100 * (ratio.low - 1):+.0f} % to {100 * (ratio.high - 1):+.0f} %"
    ends = f"{span}, {ratio.basis}" if is_range else span
    if ratio.low <= 1 <= ratio.high:
        if ratio.high <= 1 + TIE_MARGIN:
            return f"and is no slower within the noise ({ends})"
        return f"and may take {span} more time{f' ({ratio.basis})' if is_range else ''}"
    text = f"and saves {100 * (1 - ratio.middle):.0f} % of the time"
    if abs(ratio.middle - 1) < NEGLIGIBLE:
        text = "for no extra time"
    elif ratio.middle > 1:
        text = f"for {100 * (ratio.middle - 1):.0f} % more time"
    return f"{text} ({ends})" if is_range else text


def _describe_saving(records: RecordedRun, best: Trial, peak: int | None) -> str:
    eager = records.baseline.measurement if records.baseline else None
    eager_peak = eager.step_peak_bytes if eager else None
    if peak is None or not eager_peak:
        return ""
    budget = records.budget_step_bytes, records.budget_tolerance
    eager_fits = eager is not None and apply_budget(eager, *budget).outcome is Outcome.OK
    change, direction = ("lowers", "less") if peak <= eager_peak else ("raises", "more")
    return (
        f"Plan {best.number} {change} the step's peak from {fmt_bytes(eager_peak)} to {fmt_bytes(peak)}, "
        f"{100 * abs(1 - peak / eager_peak):.0f} % {direction}; "
        f"plain PyTorch {'fits the budget too' if eager_fits else 'is over the budget'}."
    )


def _list_size_facts(search: BatchSearch) -> list[tuple[str, str]]:
    """Return the chosen batch size and its consequences as (term, value)."""
    lines = [line.partition(" ") for line in describe_search(search)]
    terms = {"size": "batch size", "largest": "largest batch", "rate": "samples per second", "note": "consequence"}
    return [(terms[term], value.strip()) for term, _, value in lines]


def _tolerance(records: RecordedRun) -> str:
    share = records.budget_tolerance
    return f", {100 * share:g} % above it is tolerated" if share else ", without a tolerance"


def _remark_on_times(records: RecordedRun) -> str:
    """Return `, not re-measured` for a time that only the search measured: the fastest of many plans is partly lucky."""
    return "" if records.time_ratio is None or records.is_confirmed else ", not re-measured"


def _format_ratio(ratio: Interval | None) -> str:
    if ratio is None:
        return "-"
    ends = f"{format_percent(ratio.low)} to {format_percent(ratio.high)}"
    return f"{format_percent(ratio.middle)} ({ends}, {ratio.basis})"


def _format_date(records: RecordedRun) -> str:
    started = records.trials[0].started if records.trials else 0.0
    return datetime.fromtimestamp(started, tz=UTC).strftime("%Y-%m-%d") if started else "-"


def _capture_name(records: RecordedRun) -> str:
    """Return kernels, memory format, an unusual rebuild price and number of threads of the plans."""
    kernels, memory_format = (str(records.config.get(key, "")) for key in ("kernels", "memory_format"))
    price, threads = (records.config.get(key) for key in ("rebuild_price", "threads"))
    price = float(price) if isinstance(price, (int, float)) else REBUILD_PRICE
    threads = threads if isinstance(threads, int) else 0
    return Plan((), kernels=kernels, memory_format=memory_format, rebuild_price=price, threads=threads).capture_name


def _verification(records: RecordedRun) -> str:
    """Describe how the best plan's results were compared with eager's."""
    measurement = records.best.measurement if records.best else None
    return "-" if measurement is None else measurement.verified or NOT_VERIFIED


def _measured_or_predicted_bytes(trial: Trial) -> int | None:
    """Return the bytes that the budget limits: measured, or else predicted."""
    measured = trial.step_bytes
    return trial.estimate.peak_bytes if measured is None and trial.estimate else measured
