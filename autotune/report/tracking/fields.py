"""Derive what MLflow's runs hold from the records: metrics, params, tags, notes, and the batch as a dataset."""

import getpass
import hashlib
import json
import statistics
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import autotune
from autotune.errors import DISTRIBUTION
from autotune.ir.graph import Role, TrainGraph
from autotune.predict.simulate import Estimate
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.json_codec import to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.provenance import git_sha
from autotune.records.trial import Trial
from autotune.units import fmt_bytes, fmt_seconds

TRIAL, BEST = "autotune.trial", "autotune.best"
"""Tags of a trial's run: its number, and `true` for the best trial, else `false`."""


def source_tags() -> dict[str, str]:
    """Return the tags by which MLflow's pages name the user, the program and the commit."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = ""
    sha = git_sha()
    commit = {"git.sha": sha, "mlflow.source.git.commit": sha} if sha else {}
    name = {"mlflow.user": user} if user else {}
    return {"mlflow.source.name": DISTRIBUTION, "mlflow.source.type": "LOCAL", **name, **commit}


MAX_TAG = 5000
"""Maximum characters of a tag's value; MLflow's databases refuse more than 8000."""


def cut_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags that every store accepts: long values are cut, and a NUL, which PostgreSQL refuses, is replaced."""
    return {name: value.replace("\0", "?")[:MAX_TAG] for name, value in tags.items()}


def describe_trial(trial: Trial) -> str:
    """Return the note of a trial's run, as Markdown: the estimate beside the measurement, and the reason of a failure."""
    measurement = trial.measurement
    if measurement is None:
        return ""
    rows = []
    if trial.estimate is not None:
        pairs = (
            ("peak of the step", fmt_bytes, trial.estimate.peak_bytes, measurement.step_peak_bytes),
            ("charged for the step", fmt_bytes, trial.estimate.charged_bytes, measurement.step_charged_bytes),
            ("step time", fmt_seconds, trial.estimate.seconds, measurement.median_seconds),
        )
        rows = [
            f"| {name} | {'-' if predicted is None else fmt(predicted)} | {'-' if measured is None else fmt(measured)} |"
            for name, fmt, predicted, measured in pairs
        ]
    table = ["| | estimate | measurement |", "|---|---|---|", *rows, ""] if rows else []
    detail = measurement.detail.strip().splitlines()
    return "\n".join([f"**{measurement.outcome}**{f': {detail[0]}' if detail else ''}", "", *table])


MAX_NAME = 500
"""Maximum characters of a data set's name in MLflow."""


def describe_batch(graph: TrainGraph, workload: str) -> dict[str, str]:
    """Return the fields of MLflow's dataset for the batch: tensors by name and bytes, without their numbers."""
    tensors = {value.name: value.nbytes for value in graph.values if value.role is Role.BATCH}
    profile = json.dumps({"tensors": len(tensors), "bytes": sum(tensors.values()), "bytes_by_tensor": tensors})
    return {
        "name": f"batch of {workload}"[:MAX_NAME],
        "digest": hashlib.sha256(f"{workload}{profile}".encode()).hexdigest()[:16],
        "source_type": "code",
        "source": json.dumps({"tags": {"workload": workload}}),
        "profile": profile,
    }


def system_metrics() -> dict[str, float]:
    """Return the machine's load under MLflow's names; the share of the processors is since the last call."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(interval=None),
        "system/system_memory_usage_megabytes": (memory.total - memory.available) / 1e6,
        "system/system_memory_usage_percentage": memory.percent,
    }


def progress_metrics(trial: Trial) -> dict[str, float]:
    """Return the figures of one trial that the study's run holds by trial number."""
    ratio = trial.measurement.time_ratio if trial.measurement is not None else None
    time = {
        "trial_seconds" if ratio is None else "trial_time_ratio": trial.time_cost
    }  # seconds where eager does not fit
    figures = {**time, "trial_charged_bytes": trial.step_charged_bytes}
    return {name: value for name, value in figures.items() if value is not None}


def _relative_error(estimate: Estimate | None, measured: float | None, name: str) -> float | None:
    """Return an estimate over its measurement, less one; None where either is missing."""
    return None if estimate is None or not measured else float(getattr(estimate, name)) / measured - 1


def trial_metrics(trial: Trial) -> dict[str, float]:
    """Return estimate and measurement as metrics; the base unit is part of each name."""
    metrics: dict[str, Any] = {}
    if trial.estimate is not None:
        fields = to_json(trial.estimate)
        metrics |= {f"estimate_{key}": value for key, value in fields.items() if not isinstance(value, str)}
    measurement = trial.measurement
    if measurement is not None:
        baseline = measurement.baseline_seconds
        metrics |= {
            "peak_bytes": measurement.peak_bytes,
            "charged_bytes": measurement.charged_bytes,
            "floor_bytes": measurement.floor_bytes,
            "step_peak_bytes": measurement.step_peak_bytes,
            "step_charged_bytes": measurement.step_charged_bytes,
            "step_seconds": measurement.median_seconds,
            "baseline_seconds": statistics.median(baseline) if baseline else None,
            "time_ratio": measurement.time_ratio,
            "stall_seconds": measurement.stall_seconds,
            "transfer_bytes": measurement.transfer_bytes,
            "max_error": measurement.max_error,
            "disturbed": float(bool(measurement.disturbed)) if measurement.step_seconds else None,
            "hidden_share": measurement.lanes.hidden if measurement.lanes else None,
            "estimate_peak_error": _relative_error(trial.estimate, measurement.step_peak_bytes, "peak_bytes"),
            "estimate_seconds_error": _relative_error(trial.estimate, measurement.median_seconds, "seconds"),
        }
    return {key: value for key, value in metrics.items() if value is not None}


METRIC_NAMES: Mapping[str, str] = {"beside_best": "ratio_to_best", "middle": "median"}
"""Plain metric names of keys of `confirmed.json`."""


def confirmed_metrics(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the pooled results of one re-measured plan, an interval as three metrics."""
    metrics = {
        f"confirmed_{METRIC_NAMES.get(name, name)}_{METRIC_NAMES.get(part, part)}": value
        for name in ("step_seconds", "time_ratio", "beside_best")
        for part, value in (plan[name] or {}).items()
        if value is not None
    }
    return metrics | {"confirmed_rounds": plan["rounds"]}


def settings_params(trial: Trial) -> dict[str, Any]:
    return {
        kind if knob == "planner" else f"{kind}.{knob}": value
        for kind, knobs in trial.settings.items()
        for knob, value in knobs.items()
    }


def study_params(config: Config) -> dict[str, Any]:
    """Return the config as flat params."""
    document = config.model_dump(mode="json")
    flat = {key: value for key, value in document.items() if not isinstance(value, dict)}
    for key in ("arguments", "stores", "planners"):
        flat |= {f"{key}.{name}": value for name, value in document[key].items() if value is not None}
    return {key: value for key, value in flat.items() if value is not None}


MAX_DETAIL = 4000
"""Maximum characters of a failure's detail, and of a move."""


def common_tags(trial: Trial, device: Device) -> dict[str, str]:
    """Return the tags of a study's run and of its trials' runs; `device` stands for one that the trial does not record."""
    tags = {"autotune.schema": "1", "workload": trial.workload, "graph.digest": trial.graph_digest}
    tags["version.autotune"] = autotune.__version__
    tags |= {f"version.{name}": version(name) for name in ("optuna", "mlflow")}
    device = (trial.measurement.device if trial.measurement else None) or device
    fields = to_json(device)
    tags |= {f"environment.{key}": value for key, value in fields.pop("environment").items()}
    tags |= {f"device.{key}": str(value) for key, value in fields.items() if value != ""}
    tags |= {"device.key": device.key, "version.torch": device.torch}
    return tags | source_tags()


def trial_tags(trial: Trial, parent: str, device: Device) -> dict[str, str]:
    """Return the tags of a trial's run below the study's run `parent`; see `common_tags` for `device`."""
    measurement = trial.measurement or Measurement(Outcome.CRASHED)
    tags = {
        "mlflow.parentRunId": parent,
        "autotune.kind": trial.kind.value,
        TRIAL: str(trial.number),
        BEST: "false",
        **common_tags(trial, device),
        "autotune.outcome": measurement.outcome.value,
        "autotune.detail": measurement.detail[:MAX_DETAIL],
        "autotune.verified": measurement.verified,
        "meter": measurement.meter,
        "mlflow.note.content": describe_trial(trial),
    }
    if trial.move:
        tags |= {"autotune.move": trial.move[:MAX_DETAIL], "autotune.parent": str(trial.parent)}
    if measurement.disturbed:
        tags["autotune.disturbed"] = measurement.disturbed
    if measurement.limit:
        tags["limit"] = measurement.limit
    return tags
