"""Trials as rows of words and figures, for a screen and for the report alike."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.knobs import KnobValue
from autotune.measurement import Outcome
from autotune.trial import Trial

COLUMNS = (
    "plan", "kind", "order", "update", "recompute", "offload",
    "peak MiB", "charged MiB", "step ms", "ratio", "verdict",
)  # fmt: skip
"""Of a row's cells; from `peak MiB` to `ratio` figures, the rest words."""
FIGURES = frozenset({"plan", "peak MiB", "charged MiB", "step ms", "ratio"})


@dataclass(frozen=True, slots=True)
class Row:
    """One trial. A figure with `~` before it was predicted, not measured."""

    trial: Trial
    cells: tuple[str, ...]
    best: bool = False


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
    return Row(trial, cells, best)


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


def mib(nbytes: float | None) -> str:
    """Mebibytes with one decimal, without the unit."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f}"


def _short(value: KnobValue) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
