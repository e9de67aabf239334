"""A run as one HTML page that opens from disk: what was won, what it costs, and where every byte is."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.predict.order_bounds import order_lower_bound
from autotune.predict.simulate import Estimate
from autotune.predict.step_view import ROLES, Walk
from autotune.records.budget import Budget
from autotune.records.measurement import Lanes, Outcome, held_to
from autotune.records.plan_file import NOT_VERIFIED
from autotune.records.trial import Trial
from autotune.report import charts
from autotune.report import tables as table
from autotune.report.decision_savings import Decision, decisions
from autotune.study.recorded_run import Records
from autotune.units import fmt_bytes, fmt_seconds, mib

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
ROLE_COLOURS = dict(
    zip(
        ROLES,
        (charts.BLUE, charts.SKY, charts.GREY, charts.PALE, charts.ORANGE, charts.GREEN, charts.PURPLE, charts.YELLOW),
        strict=True,
    )
)

DRIVE_BYTES = 600 * 10**12
"""Written over its life, that drives of 1 TB are commonly rated for."""
TRIALS, MODULES, DECISIONS, NOTES = 500, 15, 8, 30
"""Rows of trials, modules of the peak, modules of one kind of decision, and notes of what failed, at most: the page is to stay
small."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a worker said at length, and of which trials."""

    trials: tuple[int, ...]
    verdict: str
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row whose first figure is drawn too."""

    cells: tuple[str, ...]
    share: float
    """Percent of the longest."""
    total: bool = False


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the records of a run, whole or not at all; the same records give the same bytes."""
    path = run_dir / "report.html"
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(render(Records.load(run_dir)), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def write_pictures(run_dir: Path, directory: Path) -> list[Path]:
    """Write the report's pictures, each as an SVG file that stands alone; gives their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, svg in pictures(Records.load(run_dir)).items():
        if svg:
            path = directory / f"{name}.svg"
            path.write_text(svg, encoding="utf-8")
            written.append(path)
    return written


def pictures(records: Records) -> dict[str, str]:
    """`frontier`, `memory` and `lanes` as SVG; empty what the records do not tell."""
    return {"frontier": _frontier(records), "memory": _memory(records), "lanes": _lanes(records)}


def render(records: Records) -> str:
    """The page of a run."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))
    headline, story = words(records)
    shown = _shown(records)
    return page.render(
        name=records.name, headline=headline, story=story, facts=_facts(records),
        **pictures(records),
        chosen=records.chosen is not None, modules=_modules(records), decisions=_decisions(records),
        errors=_errors(records), accuracy=_accuracy(records), certificate=_certificate(records),
        columns=table.COLUMNS, figures=table.FIGURES, rows=table.rows(shown, records.best), why=_why,
        fresh_columns=table.FRESH_COLUMNS, confirmed=_confirmed(records),
        left_out=len(records.trials) - len(shown), notes=_notes(records),
        outcomes=Counter(table.verdict(trial) for trial in records.trials).most_common(), device=_device(records),
    )  # fmt: skip


def words(records: Records) -> tuple[str, str]:
    """(headline, one sentence more): the answer in the user's terms."""
    budget = str(records.config.get("budget", "its budget"))
    if not records.trials:
        return "Nothing was tried yet", "The run holds no trials; go on with autotune resume."
    best, baseline = records.best, records.baseline
    seen = baseline.measurement if baseline else None
    plain = seen.step_peak_bytes if seen else None
    fits = seen is not None and held_to(seen, records.budget_step_bytes).outcome is Outcome.OK
    if best is None or best.measurement is None:
        tried = [trial for trial in records.trials if trial.plan and _bytes(trial) is not None]
        lowest = min(tried, key=lambda trial: _bytes(trial) or 0, default=None)
        step = records.budget_step_bytes
        if lowest is None:
            return f"No plan that was tried fits {budget}", f"{len(records.trials)} trials, none of them of a plan."
        verb = "was charged" if _taken(lowest) is not None else "was predicted to take"
        allowed = "" if step is None else f", where {fmt_bytes(max(step, 0))} is allowed"
        return f"No plan that was tried fits {budget}", (
            f"Plan {lowest.number} came lowest: its step {verb} {fmt_bytes(_bytes(lowest) or 0)}{allowed}. "
            f"Raise the budget, or allow a store."
        )
    peak, ratio = best.measurement.step_peak_bytes, best.measurement.time_ratio
    taken = "" if peak is None else fmt_bytes(peak)
    room = fmt_bytes(Budget.parse(budget).nbytes or 0) if "budget" in records.config and "%" not in budget else ""
    where = f"Fits in {room}" if room else f"The step fits in {taken}"
    if ratio is None:
        needs = f" of about {fmt_bytes(records.traced.peak_bytes)}" if records.traced else ""
        return f"{where}, where plain PyTorch does not fit", (
            f"Plan {best.number} takes {taken} and {fmt_seconds(best.measurement.median_seconds or 0)} a step; "
            f"the plain step{needs} did not run to its end, so there is no time to compare with."
        )
    price = f"for {100 * (ratio - 1):.0f} % more time" if ratio >= 1.005 else "for no extra time" if ratio > 0.995 else (
        f"and saves {100 * (1 - ratio):.0f} % of the time"
    )  # fmt: skip
    saved = "" if peak is None or not plain else (
        f"Plan {best.number} lowers the step from {fmt_bytes(plain)} to {taken}, {100 * (1 - peak / plain):.0f} % less; "
        f"plain PyTorch {'fits the budget too' if fits else 'is over the budget'}."
    )  # fmt: skip
    return f"{where} {price}", saved


def _facts(records: Records) -> list[tuple[str, str]]:
    workload = records.trials[0].workload if records.trials else str(records.config.get("workload", ""))
    budget, step = str(records.config.get("budget", "-")), records.budget_step_bytes
    graph = records.graph
    return [
        ("workload", workload),
        ("budget", budget if step is None else f"{budget}: {fmt_bytes(step)} for the step"),
        ("trials", str(len(records.trials))),
        (
            "graph",
            "-" if graph is None else f"{graph.name}, {len(graph.ops)} ops, {len(graph.values)} values, {graph.digest}",
        ),
        ("results of the best plan", _verified(records)),
    ]


def _verified(records: Records) -> str:
    """Describe how the best plan's results were compared with eager's."""
    seen = records.best.measurement if records.best else None
    return "-" if seen is None else seen.verified or NOT_VERIFIED


def dots(records: Records) -> list[charts.Dot]:
    """Every trial that has bytes and a time, measured or predicted; times as `cost_label` says."""
    traced = records.traced
    found = []
    for trial in records.trials:
        seen = trial.measurement
        if seen is None or trial.kind == "repeat":
            continue
        nbytes = _taken(trial)
        cost = _cost(trial, ratios=records.has_ratios)
        measured = nbytes is not None and cost is not None
        if not measured and trial.estimate is not None:
            nbytes = trial.estimate.peak_bytes
            cost = trial.estimate.seconds / (traced.seconds if records.has_ratios and traced else 1e-3)
        if nbytes is None or cost is None:
            continue
        match seen.outcome:
            case _ if trial.kind == "baseline":
                kind = "baseline"
            case _ if records.best is not None and trial.number == records.best.number:
                kind = "best"
            case Outcome.OVER_BUDGET:
                kind = "over" if measured else "predicted"
            case Outcome.OK | Outcome.STOPPED_EARLY:
                kind = "ok" if measured else "predicted"
            case _:
                kind = "failed"
        found.append(charts.Dot(trial.number, nbytes, cost, kind))
    return found


def cost_label(records: Records) -> str:
    """What the costs of its dots are."""
    return "step time / plain eager's" if records.has_ratios else "step time, ms"


def _frontier(records: Records) -> str:
    found = dots(records)
    if not found:
        return ""
    return charts.frontier(found, budget_bytes=records.budget_step_bytes, cost=cost_label(records))


def _memory(records: Records) -> str:
    if records.traced is None:
        return ""
    panels = [_panel("as traced", records.traced)]
    if records.best is not None and records.chosen is not None:
        panels.append(_panel(f"plan {records.best.number}", records.chosen))
    return charts.memory(panels, ROLE_COLOURS, records.budget_step_bytes)


def _panel(name: str, walk: Walk) -> charts.Panel:
    seconds, _ = walk.band
    roles = {role: (*nbytes, *nbytes[-1:]) for role, nbytes in walk.by_role.items()}
    title = f"{name}: {fmt_bytes(walk.peak_bytes)} at most, {fmt_seconds(walk.seconds)}"
    return charts.Panel(title, (*seconds, walk.seconds)[: len(roles["parameters"])], roles)


def _lanes(records: Records) -> str:
    if records.chosen is None or not records.chosen.schedule.store:
        return ""
    panels: dict[str, charts.Tracks] = {"simulated": records.chosen.tracks()}
    seen = records.best.measurement.lanes if records.best and records.best.measurement else None
    if seen is not None:
        panels["measured"] = _measured_tracks(seen)
    return charts.lanes(panels, PHASE_COLOURS)


def _measured_tracks(seen: Lanes) -> charts.Tracks:
    """As `Walk.tracks`: what one step's lanes did on the device."""
    waits = sorted((*seen.save_stalls, *seen.load_stalls))
    ends = [0.0, *(end for _, end in waits)]
    begins = [*(begin for begin, _ in waits), seen.seconds]
    ran = [(end, begin, "executing") for end, begin in zip(ends, begins, strict=True)]
    return {
        "execute": [*ran, *((*wait, "waiting") for wait in waits)],
        "load": [(*span, "load") for span in seen.loads],
        "save": [(*span, "save") for span in seen.saves],
    }


def _modules(records: Records) -> list[Bar]:
    """(module, the plan's MiB, the traced step's) at each one's own peak."""
    if records.traced is None:
        return []
    before = records.traced.at_peak()
    now = records.chosen.at_peak() if records.chosen else before
    ranked = sorted(now.items(), key=lambda item: (-item[1], item[0]))
    most = ranked[0][1] or 1
    found = [Bar((layer, mib(nbytes), mib(before[layer])), 100 * nbytes / most) for layer, nbytes in ranked[:MODULES]]
    if rest := ranked[MODULES:]:
        others = sum(nbytes for _, nbytes in rest)
        them = mib(before.total() - sum(before[layer] for layer, _ in ranked[:MODULES]))
        found.append(Bar((f"all others ({len(rest)})", mib(others), them), 100 * min(others / most, 1)))
    return [*found, Bar(("together", mib(now.total()), mib(before.total())), 0, total=True)]


def _decisions(records: Records) -> list[Bar]:
    """(kind of decision, module, MiB saved, cost in ms, MiB through the store): each kind as a whole, then its modules."""
    if records.chosen is None:
        return []
    made = decisions(records.chosen)
    most = max((one.saved_bytes for one in made), default=0) or 1
    found = []
    for kind in dict.fromkeys(one.kind for one in made):
        whole, *parts = (one for one in made if one.kind == kind)
        told = [one for one in parts if one.saved_bytes or one.seconds][:DECISIONS] if len(parts) > 1 else []
        where = f"{len(parts)} modules" if len(parts) > 1 else parts[0].layer
        found.append(Bar((kind, where, *_price(whole)), 100 * whole.saved_bytes / most, total=True))
        found += [Bar(("", one.layer, *_price(one)), 100 * one.saved_bytes / most) for one in told]
    return found


def _price(made: Decision) -> tuple[str, str, str]:
    return (
        mib(made.saved_bytes),
        f"{1e3 * made.seconds:.1f}" if made.seconds else "-",
        mib(made.moved_bytes) if made.moved_bytes else "-",
    )


def _shown(records: Records) -> Sequence[Trial]:
    """All trials; of very many those that ran or failed."""
    if len(records.trials) <= TRIALS:
        return records.trials
    passed = ("seen before", "not run")
    told = [trial for trial in records.trials if table.verdict(trial) not in passed]
    best = records.best.number if records.best else -1
    return [trial for at, trial in enumerate(told) if at < TRIALS or trial.number == best]


def _why(trial: Trial) -> str:
    """Why a trial is no candidate, in one line."""
    seen = trial.measurement
    if seen is None or (seen.outcome is Outcome.OK and trial.kind != "repeat"):
        return ""
    line = next(iter(seen.detail.strip().splitlines()), "")
    return line if len(line) <= 160 else f"{line[:159]}…"


def _notes(records: Records) -> list[Note]:
    """What the table has no room for, said once for all trials that it was said of."""
    told: dict[tuple[str, str], list[int]] = {}
    for trial in records.trials:
        detail = trial.measurement.detail.strip() if trial.measurement else ""
        if detail != _why(trial) and trial.kind != "repeat":
            told.setdefault((table.verdict(trial), detail), []).append(trial.number)
    return [Note(tuple(trials), verdict, _middle_out(text)) for (verdict, text), trials in list(told.items())[:NOTES]]


def _middle_out(text: str, head: int = 400, tail: int = 800) -> str:
    """The begin and the end, where an error says what it is and where it stood."""
    return text if len(text) <= head + tail else f"{text[:head]}\n…\n{text[-tail:]}"


def _confirmed(records: Records) -> list[table.Row]:
    return table.fresh_rows(records.confirmed, records.baseline) if records.baseline is not None else []


def _errors(records: Records) -> list[tuple[str, ...]]:
    """(trial, predicted MiB, measured MiB, error %, predicted ms, measured ms, error %) of every plan that ran."""
    found: list[tuple[str, ...]] = []
    for trial in _shown(records):
        expected, seen = trial.estimate, trial.measurement
        if expected is None or seen is None or seen.step_peak_bytes is None or trial.kind == "repeat":
            continue
        seconds = seen.median_seconds
        found.append((
            str(trial.number), mib(expected.peak_bytes), mib(seen.step_peak_bytes),
            _percent(expected.peak_bytes, seen.step_peak_bytes), f"{expected.seconds * 1e3:.1f}",
            "-" if seconds is None else f"{seconds * 1e3:.1f}", _percent(expected.seconds, seconds),
        ))  # fmt: skip
    return found


def _accuracy(records: Records) -> str:
    """How far predictions lay from what was measured, in one sentence."""
    peaks, times = [], []
    for trial in records.trials:
        expected, seen = trial.estimate, trial.measurement
        if expected is None or seen is None or not seen.step_peak_bytes or trial.kind == "repeat":
            continue
        peaks.append(abs(expected.peak_bytes / seen.step_peak_bytes - 1))
        if seen.median_seconds:
            times.append(abs(expected.seconds / seen.median_seconds - 1))
    said = [
        f"{what} {100 * statistics.median(errors):.2f} % off at the median, {100 * max(errors):.2f} % at worst"
        for what, errors in (("the peak", peaks), ("the time", times))
        if errors
    ]
    return f"Predictions are, of {'; of '.join(said)}." if said else ""


def _certificate(records: Records) -> list[tuple[str, str]]:
    expected = records.best.estimate if records.best else None
    if expected is None:
        return []
    slower = f"the plan {100 * expected.seconds_gap:.1f} % more"
    where = f", for {expected.lower_bound_op}" if expected.lower_bound_op else ""
    return [
        ("predicted peak of the step", f"{fmt_bytes(expected.peak_bytes)}, at {expected.peak_op or 'rest'}"),
        ("mean of the step", fmt_bytes(expected.mean_bytes)),
        ("no plan of this graph goes below", f"{fmt_bytes(expected.lower_bound_bytes)}{where}"),
        ("gap in bytes", f"{100 * expected.gap:.1f} %"),
        *_layout(expected),
        *_order_bound(records),
        ("predicted time", fmt_seconds(expected.seconds)),
        ("of it computing again", fmt_seconds(expected.recompute_seconds)),
        ("of it waiting for a store", fmt_seconds(expected.stall_seconds)),
        ("no plan within the budget is faster than", f"{fmt_seconds(expected.lower_bound_seconds)} ({slower})"),
        ("through the store", fmt_bytes(expected.transfer_bytes)),
        *_store_use(records),
    ]


def _layout(expected: Estimate) -> list[tuple[str, str]]:
    if expected.charged_bytes is None:
        return []
    above = f"{100 * expected.layout_gap:.1f} % above what lives in it at once"
    return [
        ("its buffers lie in an arena of", f"{fmt_bytes(expected.layout_bytes)}, {above}"),
        ("so the step is to be charged", fmt_bytes(expected.charged_bytes)),
    ]


def _store_use(records: Records) -> list[tuple[str, str]]:
    """What one step's offloading did on the device, and to it."""
    best = records.best
    seen = best.measurement if best else None
    if best is None or best.plan is None or seen is None or seen.lanes is None:
        return []
    found: list[tuple[str, str]] = []
    hidden = seen.lanes.hidden
    if hidden is not None:
        found.append(("measured beside the step", f"{hidden:.0%} of the store's time hidden"))
    if best.plan.store == "ssd" and seen.transfer_bytes and seen.median_seconds:  # other stores are memory
        written = seen.transfer_bytes / 2  # what is written comes back
        daily = written / seen.median_seconds * 86400
        found.append((
            "written to the drive",
            f"{fmt_bytes(int(written))} a step, {daily / 1e12:.1f} TB a day: one rated for {DRIVE_BYTES // 10**12} TB written"
            f" lasts {DRIVE_BYTES / daily:.0f} days of such steps",
        ))  # fmt: skip
    return found


def _order_bound(records: Records) -> list[tuple[str, str]]:
    graph, costs = records.graph, records.costs
    if graph is None or costs is None or not costs.belong_to(graph):
        return []
    low, op = order_lower_bound(graph, costs, inplace=True)
    return [
        ("with nothing computed again or moved away no order goes below", f"{fmt_bytes(low)}, for {graph.ops[op].name}")
    ]


def _device(records: Records) -> list[tuple[str, str]]:
    device = records.device
    if device is None:
        return []
    seen = records.best.measurement if records.best else None
    facts = [
        ("silicon", f"{device.silicon} ({device.kind}), {device.cores} cores"),
        ("memory", fmt_bytes(device.memory_bytes)),
        ("software", f"torch {device.torch}" + (f", driver {device.driver}" if device.driver else "")),
    ]
    if seen is not None:
        facts.append(("floor of the process", "-" if seen.floor_bytes is None else fmt_bytes(seen.floor_bytes)))
        facts.append(("meter", seen.meter or "-"))
        facts.append(("enforced limit", seen.limit or "none"))
    return facts


def _cost(trial: Trial, *, ratios: bool) -> float | None:
    """What the frontier shows and the best is chosen by: the ratio to the baseline, else milliseconds."""
    if trial.measurement is None:
        return None
    seconds = trial.measurement.median_seconds
    if ratios:
        return 1.0 if trial.kind == "baseline" and seconds is not None else trial.measurement.time_ratio
    return None if seconds is None else 1e3 * seconds


def _bytes(trial: Trial) -> int | None:
    """What the budget binds, as seen or else as predicted."""
    seen = _taken(trial)
    return trial.estimate.peak_bytes if seen is None and trial.estimate else seen


def _taken(trial: Trial) -> int | None:
    seen = trial.measurement
    if seen is None:
        return None
    return seen.step_peak_bytes if seen.step_charged_bytes is None else seen.step_charged_bytes


def _percent(expected: float, seen: float | None) -> str:
    return "-" if not seen else f"{100 * (expected / seen - 1):+.2f} %"
