"""Two plans beside each other: what they decide, what was predicted and seen of them, what lives at their peaks."""

from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.planners import KINDS
from autotune.predict.simulate import Estimate
from autotune.predict.step_view import Walk
from autotune.records.measurement import Measurement
from autotune.records.trial import Trial
from autotune.report.tables import words
from autotune.study.recorded_run import Records
from autotune.units import fmt_bytes, fmt_seconds, mib


@dataclass(frozen=True)
class Side:
    """One of the two."""

    name: str
    trial: Trial
    walk: Walk
    budget_bytes: int | None
    device: str
    """Its silicon."""

    @property
    def plan(self) -> Plan:
        """The baseline's is the step as traced."""
        return self.trial.plan or Plan.traced(self.walk.graph)


def choices(records: Records) -> dict[int, str]:
    """Trials that two plans can be chosen from, in words by number; the best first, then the baseline."""
    best = records.best.number if records.best else -1
    found = [trial for trial in records.trials if trial.kind != "repeat" and (trial.plan or trial.kind == "baseline")]
    found.sort(key=lambda trial: (trial.number != best, trial.kind != "baseline", trial.number))
    return {trial.number: _words(trial, best=trial.number == best) for trial in found}


def side(records: Records, number: int, name: str) -> Side:
    """A trial, walked; ConfigError where the run has not the graph that this takes."""
    trial = next((trial for trial in records.trials if trial.number == number), None)
    if trial is None:
        raise ConfigError(f"{name}: no trial {number}; choose another")
    if records.graph is None or records.costs is None:
        raise ConfigError(f"{name}: no graph.json and costs.json; the run ended before its step was captured")
    plan = trial.plan or Plan.traced(records.graph)
    device = records.device.silicon if records.device else "?"
    return Side(name, trial, Walk(records.graph, records.costs, plan), records.budget_step_bytes, device)


def timelines(first: Side, second: Side) -> list[tuple[str, float, float]]:
    """(plan, milliseconds, MiB) of both, over the simulated time of one step."""
    found = []
    for one in (first, second):
        seconds, nbytes = one.walk.band
        ends = [*seconds, one.walk.seconds]  # the last height holds to the end
        found += [(one.name, 1e3 * at, high / 2**20) for at, high in zip(ends, [*nbytes, nbytes[-1]], strict=True)]
    return found


def budgets(first: Side, second: Side) -> list[tuple[str, int]]:
    """(name, bytes) of what their steps may take: one where it is the same of both, none of whose it is not known."""
    if first.budget_bytes == second.budget_bytes:
        return [] if first.budget_bytes is None else [("budget", first.budget_bytes)]
    known = (("first budget", first.budget_bytes), ("second budget", second.budget_bytes))
    return [(name, nbytes) for name, nbytes in known if nbytes is not None]


def decisions(first: Side, second: Side) -> list[tuple[str, str, str]]:
    """(what, first, second): the planners of every kind with their knobs, and what came of them."""
    settings = first.trial.settings, second.trial.settings
    chosen = [(kind, words(settings[0].get(kind, {})), words(settings[1].get(kind, {}))) for kind in KINDS]
    return chosen + [(what, tell(first), tell(second)) for what, tell in _MADE]


def figures(first: Side, second: Side) -> list[tuple[str, str, str, str]]:
    """(what, first, second, second beside first): predicted, then measured; `-` for what is not known."""
    found = []
    for what, form, read in _FIGURES:
        one, other = read(first), read(second)
        found.append((what, _told(form, one), _told(form, other), _beside(one, other)))
    return found


def alive(first: Side, second: Side, most: int = 15) -> list[tuple[str, float, float, float]]:
    """(layer, first MiB, second MiB, more in the second) at each one's own peak, the largest differences first."""
    before, now = first.walk.at_peak(), second.walk.at_peak()
    layers = sorted({*before, *now}, key=lambda layer: (-abs(now[layer] - before[layer]), layer))[:most]
    return [
        (layer, before[layer] / 2**20, now[layer] / 2**20, (now[layer] - before[layer]) / 2**20) for layer in layers
    ]


def _words(trial: Trial, *, best: bool) -> str:
    seen = trial.measurement
    taken = seen.step_charged_bytes if seen else None
    ratio = seen.time_ratio if seen else None
    what = "eager, as traced" if trial.plan is None else trial.kind
    parts = [f"{trial.number} {what}"]
    parts += [f"{mib(taken)} MiB"] if taken is not None else []
    parts += [f"{ratio:.2f}x"] if ratio is not None and trial.plan is not None else []
    return ", ".join(parts) + (" (best)" if best else "")


def _recomputed(one: Side) -> str:
    return f"{one.plan.recomputed} runs, {fmt_seconds(_again(one))}" if one.plan.recomputed else "nothing"


def _again(one: Side) -> float:
    return one.trial.estimate.recompute_seconds if one.trial.estimate else 0.0


def _offloaded(one: Side) -> str:
    if not one.plan.offload:
        return "nothing"
    moved = one.trial.estimate.transfer_bytes if one.trial.estimate else 0
    values = len({swap.value for swap in one.plan.offload})
    return f"{values} values to {one.plan.store}, window of {one.plan.window}, {fmt_bytes(moved)} a step"


_MADE: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("ops run again", _recomputed),
    ("sent away", _offloaded),
    ("made in place", lambda one: f"{len(one.plan.inplace)} values" if one.plan.inplace else "nothing"),
)


def _expected(read: Callable[[Estimate], float | None]) -> Callable[[Side], float | None]:
    return lambda one: None if one.trial.estimate is None else read(one.trial.estimate)


def _seen(read: Callable[[Measurement], float | None]) -> Callable[[Side], float | None]:
    return lambda one: None if one.trial.measurement is None else read(one.trial.measurement)


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}x"


_FIGURES: tuple[tuple[str, Callable[[float], str], Callable[[Side], float | None]], ...] = (
    ("peak of the step, predicted", fmt_bytes, lambda one: one.walk.peak_bytes),
    ("peak of the step, measured", fmt_bytes, _seen(lambda seen: seen.step_peak_bytes)),
    ("charged for the step, predicted", fmt_bytes, _expected(lambda expected: expected.charged_bytes)),
    ("charged for the step, measured", fmt_bytes, _seen(lambda seen: seen.step_charged_bytes)),
    ("step time, predicted", fmt_seconds, lambda one: one.walk.seconds),
    ("step time, measured", fmt_seconds, _seen(lambda seen: seen.median_seconds)),
    ("time over plain eager's", _ratio, _seen(lambda seen: seen.time_ratio)),
    ("computing again, predicted", fmt_seconds, _expected(lambda expected: expected.recompute_seconds)),
    ("waiting for a store, predicted", fmt_seconds, _expected(lambda expected: expected.stall_seconds)),
    ("waiting for a store, measured", fmt_seconds, _seen(lambda seen: seen.stall_seconds)),
    ("through the store, predicted", fmt_bytes, _expected(lambda expected: expected.transfer_bytes)),
)


def _told(form: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else form(value)


def _beside(first: float | None, second: float | None) -> str:
    """`-12.5 %`; nothing where there is nothing to compare."""
    return "" if not first or second is None else f"{100 * (second / first - 1):+.1f} %"
