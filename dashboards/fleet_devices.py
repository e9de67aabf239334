"""Describe the devices of a fleet from the records: who measured, who measures now, and what was lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from autotune.fleet.waiting import DeviceWait
from autotune.records.trial import Trial, TrialKind
from autotune.study.recorded_run import RecordedRun

HEAD = ("class", "chip", "hosts", "studies", "trials", "trials in 24 h", "lost in 24 h", "measures now")
WAITING_HEAD = ("waits for a device", "class", "since", "minutes")
DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """Records of one class of devices."""

    name: str
    chip: str
    hosts: tuple[str, ...]
    studies: int
    trials: int
    recent_trials: int
    """Measured trials that began within the last 24 hours."""
    recent_losses: tuple[str, ...]
    """Hosts that were lost within the last 24 hours, once for each loss."""
    active: tuple[str, ...]
    """Studies that run now, each with its host and its begin."""


def collect_classes(studies: Mapping[str, RecordedRun], active: Mapping[str, float], now: float) -> list[ClassRecord]:
    """Return the record of every class that a study was measured on, by name.

    Args:
        studies: records of runs by name.
        active: begin of each run that works now, in seconds since the epoch, by name.
        now: this moment, in seconds since the epoch.
    """
    names = {str(run.config["on"]) for run in studies.values() if run.config.get("on")}
    return [_collect(name, studies, active, now) for name in sorted(names)]


def class_rows(classes: list[ClassRecord]) -> list[tuple[str | int, ...]]:
    """Return rows under `HEAD`."""
    return [
        (
            record.name, record.chip, ", ".join(record.hosts), record.studies, record.trials, record.recent_trials,
            ", ".join(record.recent_losses), ", ".join(record.active),
        )
        for record in classes
    ]  # fmt: skip


def waiting_rows(waits: Sequence[DeviceWait], now: float) -> list[tuple[str | int, ...]]:
    """Return rows under `WAITING_HEAD`."""
    return [
        (
            wait.name, wait.device_class or "this machine",
            datetime.fromtimestamp(wait.since).strftime("%H:%M"), int((now - wait.since) // 60),
        )
        for wait in waits
    ]  # fmt: skip


def _collect(name: str, studies: Mapping[str, RecordedRun], active: Mapping[str, float], now: float) -> ClassRecord:
    runs = {key: run for key, run in studies.items() if run.config.get("on") == name}
    # a repeat carries the measurement of an earlier trial; a plan that lost its devices has losses, but no node
    tried = [trial for run in runs.values() for trial in run.trials if trial.kind is not TrialKind.REPEAT]
    trials = [trial for trial in tried if _host(trial)]
    since = now - DAY_SECONDS
    chips = {trial.measurement.device.silicon for trial in trials if trial.measurement and trial.measurement.device}
    return ClassRecord(
        name=name,
        chip=", ".join(sorted(chips)),
        hosts=tuple(sorted({_host(trial) for trial in trials})),
        studies=len(runs),
        trials=len(trials),
        recent_trials=sum(trial.started > since for trial in trials),
        recent_losses=tuple(
            host
            for trial in tried
            if trial.measurement and trial.started > since
            for host in trial.measurement.lost_nodes
        ),
        active=tuple(_describe_active(key, runs[key], active[key]) for key in runs if key in active),
    )


def _host(trial: Trial) -> str:
    return trial.measurement.node if trial.measurement is not None else ""


def _describe_active(name: str, run: RecordedRun, began: float) -> str:
    hosts = [_host(trial) for trial in run.trials if _host(trial)]
    since = datetime.fromtimestamp(began).strftime("%H:%M")
    return f"{name} on {hosts[-1]} since {since}" if hosts else f"{name} since {since}"
