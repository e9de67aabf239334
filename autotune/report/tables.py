"""Trials as rows of words and figures, for a screen and for the report alike."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.planners.knobs import KnobValue
from autotune.records.measurement import Outcome
from autotune.records.trial import Trial
from autotune.study.verdicts.confirm import Confirmed, Word
from autotune.study.verdicts.statistics import Interval, blocks, interval, percent
from autotune.units import mib

COLUMNS = (
    "plan", "kind", "order", "update", "recompute", "offload",
    "peak MiB", "charged MiB", "step ms", "ratio", "verdict",
)  # fmt: skip
"""Of a row's cells; from `peak MiB` to `ratio` figures, the rest words."""
FRESH_COLUMNS = (
    "plan", "peak MiB", "charged MiB", "step ms", "95 %", "overhead", "of it 95 %", "beside the best", "rounds", "verdict",
)  # fmt: skip
"""Of what was measured afresh, plain eager first."""
FIGURES = frozenset({"plan", "peak MiB", "charged MiB", "step ms", "ratio", "95 %", "overhead", "of it 95 %", "rounds"})


@dataclass(frozen=True, slots=True)
class Row:
    """One trial. A figure with `~` before it was predicted, not measured."""

    trial: Trial
    cells: tuple[str, ...]
    best: bool = False
    pale: bool = False
    """Nothing that could be chosen."""


def rows(trials: Iterable[Trial], best: Trial | None = None) -> list[Row]:
    """In order of their numbers; bytes are the step's own, above the process's floor."""
    return [_row(trial, best is not None and trial.number == best.number) for trial in trials]


def _row(trial: Trial, best: bool) -> Row:
    seen = trial.measurement
    peak = seen.step_peak_bytes if seen else None
    predicted = trial.estimate.peak_bytes if trial.estimate and peak is None else None
    charged = seen.step_charged_bytes if seen else None
    seconds = seen.median_seconds if seen else None
    ratio = seen.time_ratio if seen else None
    chosen = [words(trial.settings.get(kind, {})) for kind in ("order", "update", "recompute", "offload")]
    if trial.plan is None:
        chosen = ["eager", "-", "-", "-"]
    cells = (
        str(trial.number),
        trial.kind,
        *chosen,
        mib(peak) if predicted is None else f"~{mib(predicted)}",
        mib(charged),
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        "-" if ratio is None else f"{ratio:.3f}",
        verdict(trial, best),
    )
    return Row(trial, cells, best, cells[-1] not in ("ok", "BEST"))


def fresh_rows(found: Sequence[Confirmed], baseline: Trial) -> list[Row]:
    """Plain eager as it ran beside them, then the plans that were measured afresh; bytes are the step's own."""
    if not found:
        return []
    seen = [one.trial.measurement for one in found if one.trial.measurement is not None]
    beside = blocks([seconds for one in seen for seconds in one.baseline_seconds])
    plain = baseline.measurement
    eager = (
        "eager", mib(plain.step_peak_bytes if plain else None), mib(plain.step_charged_bytes if plain else None),
        *_seconds(interval(beside) if len(beside) > 1 else None), "-", "-", "-", "-", "baseline",
    )  # fmt: skip
    return [Row(baseline, eager), *(_fresh(one) for one in found)]


def _fresh(one: Confirmed) -> Row:
    seen, ratio = one.trial.measurement, one.ratio
    within = "-" if ratio is None else f"{percent(ratio.low)} to {percent(ratio.high)}"
    cells = (
        str(one.trial.number), mib(seen.step_peak_bytes if seen else None), mib(seen.step_charged_bytes if seen else None),
        *_seconds(one.seconds), "-" if ratio is None else percent(ratio.middle), within,
        "-" if one.beside is None else str(one.beside), str(one.rounds), one.verdict,
    )  # fmt: skip
    return Row(one.trial, cells, one.word is Word.BEST)


def _seconds(found: Interval | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{found.middle * 1e3:.1f}", f"{found.low * 1e3:.1f} to {found.high * 1e3:.1f}"


def verdict(trial: Trial, best: bool = False) -> str:
    """What became of a trial, in two words at most."""
    if trial.measurement is None:
        return "unfinished"
    outcome = trial.measurement.outcome
    if best:
        return "BEST"
    if trial.kind == "repeat":
        return "seen before"
    if outcome is Outcome.OVER_BUDGET and trial.measurement.peak_bytes is None:
        return "not run"
    return outcome.value.replace("_", " ")


def words(knobs: Mapping[str, KnobValue]) -> str:
    """`greedy`, `window store=ssd window=2`: a planner and its knobs; `-` for none."""
    name = str(knobs.get("planner", "-"))
    rest = (f"{knob}={_short(value)}" for knob, value in knobs.items() if knob != "planner")
    return " ".join((name, *rest))


def _short(value: KnobValue) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
