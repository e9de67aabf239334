"""How far predictions lie from measurements: what past runs on a device showed, or else the project's own experiments."""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import ConfigError
from autotune.planners.knobs import Settings
from autotune.records.device import Device
from autotune.records.json_codec import from_json
from autotune.records.trial import Trial, load

ENOUGH = 8
"""Plans measured before, from which on they alone make the bars: of nine the ninth lies outside one time in five."""
NEWEST = 10
"""Runs looked at."""
GRAIN_BYTES = 2**20
"""Two processes differ by as much in what is no step's."""

Range = tuple[float, float]

# experiments/frontier and experiments/offload, eight models on two CPU cores: 64 plans were charged 1.002 to 1.044 of the
# predicted peak, those whose weights leave up to 1.29; on malloc instead of an arena plain eager up to 1.68 of its peak.
# 66 plans took 0.62 to 1.19 of the predicted seconds, and of what the other plans of the same model took beside their
# predictions 0.88 to 1.10.
_ARENA_BYTES, _WEIGHTS_LEAVE_BYTES, _MALLOC_BYTES = (0.99, 1.05), (0.99, 1.30), (0.97, 1.70)
_SECONDS, _RATIO = (0.6, 1.25), (0.85, 1.15)
_ELSEWHERE = "what 66 plans of eight models showed on two CPU cores"


@dataclass(frozen=True, slots=True)
class Bars:
    """Measured over predicted, lowest and highest."""

    nbytes: Range
    """Of what the step is charged, which a budget binds. Its peak on fresh memory may lie lower: an op's scratch is seldom
    touched as a whole."""
    seconds: Range
    ratio: Range
    """Of seconds beside those of another plan in the same run: what all plans of a run are off by is left out."""
    source: str
    """Where they come from, for people."""


def past_runs(runs: Path, workload: str, device: Device) -> list[list[Trial]]:
    """Trials of this workload on this silicon, by run; what cannot be read is passed over."""
    found: list[list[Trial]] = []
    for path in sorted(runs.glob("*/trials.jsonl"), key=lambda one: -one.stat().st_mtime):
        if len(found) < NEWEST and _is_of(path, workload, device):
            try:
                found.append(load(path))
            except ConfigError:
                continue
    return found


def bars(settings: Settings, past: Sequence[Sequence[Trial]], noise: float) -> Bars:
    """For a plan of these settings; `noise` is the device's own, by which seconds are off in any case."""
    alike = [[trial for trial in run if _kind(trial.settings) == _kind(settings)] for run in past]
    off = [ratio for run in alike for ratio in _bytes_off(run)]
    slow = [list(_seconds_off(run)) for run in alike]
    among = [one / statistics.median(run) for run in slow for one in run]
    seconds = list(itertools.chain.from_iterable(slow))
    enough = len(seconds) >= ENOUGH
    return Bars(
        nbytes=_range(off, _default_bytes(settings), alone=enough),
        seconds=_wider(_range(seconds, _SECONDS, alone=enough), noise),
        ratio=_wider(_range(among, _RATIO, alone=enough), noise),
        source=f"what {len(seconds)} plans of it showed here" if enough else _ELSEWHERE,
    )


def trial_seconds(past: Sequence[Sequence[Trial]]) -> float | None:
    """What a trial that ran took from its start to the next one's; None where no two followed each other."""
    taken = [
        after.started - before.started
        for run in past
        for before, after in itertools.pairwise(run)
        if before.estimate and before.kind != "repeat" and before.measurement and before.measurement.step_seconds
    ]
    return statistics.median(taken) if taken else None


def _is_of(trials: Path, workload: str, device: Device) -> bool:
    try:
        known = from_json(Device, json.loads(trials.with_name("device.json").read_text()), where="")
        with trials.open() as lines:
            return known.key == device.key and json.loads(next(lines))["workload"] == workload
    except (OSError, ValueError, ConfigError, StopIteration, KeyError):
        return False


def _kind(settings: Settings) -> tuple[str, bool]:
    """What the error of a plan's bytes hangs on: its allocator, and whether weights leave."""
    return str(settings.get("allocator", {}).get("planner")), settings.get("offload", {}).get("what") == "all"


def _default_bytes(settings: Settings) -> Range:
    allocator, weights_leave = _kind(settings)
    if allocator != "arena":
        return _MALLOC_BYTES
    return _WEIGHTS_LEAVE_BYTES if weights_leave else _ARENA_BYTES


def _bytes_off(run: Iterable[Trial]) -> Iterator[float]:
    for trial in run:
        charged = trial.measurement.step_charged_bytes if trial.measurement else None
        if charged is not None and trial.estimate and trial.kind != "repeat":
            yield charged / max(trial.estimate.peak_bytes, 1)


def _seconds_off(run: Iterable[Trial]) -> Iterator[float]:
    for trial in run:
        seen = trial.measurement.median_seconds if trial.measurement else None
        if seen is not None and trial.estimate and trial.estimate.seconds and trial.kind != "repeat":
            yield seen / trial.estimate.seconds


def _range(seen: Sequence[float], default: Range, *, alone: bool) -> Range:
    known = seen if alone else (*seen, *default)
    return min(known), max(known)


def _wider(known: Range, noise: float) -> Range:
    return known[0] * max(0.0, 1 - noise), known[1] * (1 + noise)
