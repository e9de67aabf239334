"""Compute the error of predictions from past runs on a device, or else from the project's own experiments."""

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
from autotune.records.run_dir import TRIALS_FILE, RunDir
from autotune.records.trial import Trial, TrialKind, load_trials

MIN_PLANS = 8
"""Number of past plans from which on they alone give the ranges: a ninth one lies outside one time in five."""
MAX_RUNS = 10
"""Maximum number of past runs to read, newest first."""
CHARGE_NOISE_BYTES = 2**20
"""Bytes by which the charges of two processes differ outside the step."""

Range = tuple[float, float]

# Source: experiments/benchmarks/frontier and experiments/benchmarks/offload, eight models on two CPU cores. The charge of 64 plans was 1.002 to
# 1.044 of the predicted peak, and up to 1.29 with offloaded weights; on malloc, eager's was up to 1.68 of its peak.
# The time of 66 plans was 0.62 to 1.19 of the prediction, and 0.88 to 1.10 relative to other plans of the same model.
_ARENA_BYTES, _OFFLOADED_WEIGHTS_BYTES, _MALLOC_BYTES = (0.99, 1.05), (0.99, 1.30), (0.97, 1.70)
_SECONDS, _RATIO = (0.6, 1.25), (0.85, 1.15)
_EXPERIMENTS = "66 plans of eight models on two CPU cores"


@dataclass(frozen=True, slots=True)
class ErrorRanges:
    """Ranges of measured over predicted values, lowest and highest."""

    nbytes: Range
    """Range of the step's charge, which a budget limits. The peak may be lower: ops rarely touch all of their scratch."""
    seconds: Range
    """Range of the step time."""
    ratio: Range
    """Range of the step time relative to other plans of the same run, without the error that these share."""
    source: str
    """Source of the ranges, for people."""


def load_past_runs(runs: Path, workload: str, device: Device) -> list[list[Trial]]:
    """Return the trials of this workload on this device, by run; unreadable runs are skipped."""
    past: list[list[Trial]] = []
    for path in sorted(runs.glob(f"*/{TRIALS_FILE}"), key=lambda path: -path.stat().st_mtime):
        if len(past) < MAX_RUNS and _matches(RunDir(path.parent), workload, device):
            try:
                past.append(load_trials(path))
            except ConfigError:
                continue
    return past


def compute_error_ranges(settings: Settings, past: Sequence[Sequence[Trial]], noise: float) -> ErrorRanges:
    """Return the error ranges of a plan with these settings; `noise` is the device's own relative noise of times."""
    similar = [[trial for trial in run if _error_class(trial.settings) == _error_class(settings)] for run in past]
    nbytes = [error for run in similar for error in _byte_errors(run)]
    by_run = [list(_time_errors(run)) for run in similar]
    relative = [error / statistics.median(run) for run in by_run for error in run]
    seconds = list(itertools.chain.from_iterable(by_run))
    enough = len(seconds) >= MIN_PLANS
    return ErrorRanges(
        nbytes=_range(nbytes, _default_bytes(settings), alone=enough),
        seconds=_widen(_range(seconds, _SECONDS, alone=enough), noise),
        ratio=_widen(_range(relative, _RATIO, alone=enough), noise),
        source=f"{len(seconds)} plans of this workload measured here" if enough else _EXPERIMENTS,
    )


def median_trial_seconds(past: Sequence[Sequence[Trial]]) -> float | None:
    """Return the median seconds from the start of a trial that ran to the next start; None without two such trials."""
    seconds = [
        after.started - before.started
        for run in past
        for before, after in itertools.pairwise(run)
        if before.estimate
        and before.kind != TrialKind.REPEAT
        and before.measurement
        and before.measurement.step_seconds
    ]
    return statistics.median(seconds) if seconds else None


def _matches(files: RunDir, workload: str, device: Device) -> bool:
    try:
        recorded = from_json(Device, json.loads(files.device.read_text(encoding="utf-8")), where="")
        with files.trials.open(encoding="utf-8") as lines:
            return recorded.key == device.key and json.loads(next(lines))["workload"] == workload
    except (OSError, ValueError, ConfigError, StopIteration, KeyError):
        return False


def _error_class(settings: Settings) -> tuple[str, bool]:
    """Return the settings that the error of the bytes depends on: the allocator, and whether weights are offloaded."""
    return str(settings.get("allocator", {}).get("planner")), settings.get("offload", {}).get("what") == "all"


def _default_bytes(settings: Settings) -> Range:
    allocator, offloads_weights = _error_class(settings)
    if allocator != "arena":
        return _MALLOC_BYTES
    return _OFFLOADED_WEIGHTS_BYTES if offloads_weights else _ARENA_BYTES


def _byte_errors(run: Iterable[Trial]) -> Iterator[float]:
    for trial in run:
        charged = trial.step_charged_bytes
        if charged is not None and trial.estimate and trial.kind != TrialKind.REPEAT:
            yield charged / max(trial.estimate.peak_bytes, 1)


def _time_errors(run: Iterable[Trial]) -> Iterator[float]:
    for trial in run:
        # a busy machine is no error of the prediction
        timed = trial.measurement is not None and not trial.measurement.disturbed
        seconds = trial.measurement.median_seconds if trial.measurement is not None and timed else None
        if seconds is not None and trial.estimate and trial.estimate.seconds and trial.kind != TrialKind.REPEAT:
            yield seconds / trial.estimate.seconds


def _range(errors: Sequence[float], default: Range, *, alone: bool) -> Range:
    values = errors if alone else (*errors, *default)
    return min(values), max(values)


def _widen(interval: Range, noise: float) -> Range:
    return interval[0] / (1 + noise), interval[1] * (1 + noise)
