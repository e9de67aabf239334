"""Log a run directory to MLflow, idempotently: the files are the source of truth, and only missing runs are added."""

import json
import logging
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.errors import DISTRIBUTION
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.provenance import git_sha
from autotune.records.run_dir import RunDir, RunsDir
from autotune.records.trial import Trial, TrialKind, load_trials, to_frame
from autotune.report.mlflow_store import connect, redact_password, set_environment, store_errors, tracking_uri
from autotune.study.events import Event, Finished
from autotune.study.outcome import describe_disturbance
from autotune.study.verdicts.ranking import pool_runs

_logger = logging.getLogger(__name__)

ARTIFACT_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".html", ".csv"})
"""Suffixes of the run directory's files that are logged as artifacts: the report, and the records it is made from."""

MAX_SAMPLES, MAX_PARAM, MAX_DETAIL = 500, 5000, 4000
"""Maximum samples logged per trial, and maximum characters of a param and of a failure's detail."""


def experiment_name(workload: str, device_key: str) -> str:
    """Return the experiment of a workload on a device, without slashes: MLflow's pages show only the last part of a path.

    >>> experiment_name("models/net.py:tiny", "cpu-x")
    'autotune.models-net.py-tiny.cpu-x'
    """
    return f"autotune.{re.sub(r'[^A-Za-z0-9_.-]+', '-', workload).strip('-.')}.{device_key}"


class Tracker:
    """Listener of a study that logs between its measurements. An MLflow failure never ends the study."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.uri = tracking_uri(Path(config.runs), config.tracking_uri)
        self.problem = ""
        """Reason in one line that logging stopped; `finish` retries."""
        self._log: _StudyRun | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Finished(_, _, _, False) if not self.problem:
                with self._catching_errors():
                    self._study_run().catch_up(load_trials(RunDir(self.run_dir).trials))
                if self.problem:
                    _logger.warning(
                        "not logged to %s: %s. The search continues; logging is retried when it ends",
                        redact_password(self.uri), self.problem,
                    )  # fmt: skip

    def finish(self, *, interrupted: int = 0) -> str:
        """Log missing trials and the artifacts; return one line with the place of the run, or with the reason of failure.

        `interrupted` is the number of the signal that ended the study. Without a trial the line is empty.
        """
        trials = load_trials(RunDir(self.run_dir).trials)
        if not trials:
            return ""
        self.problem = ""
        with self._catching_errors():
            log = self._study_run()
            log.catch_up(trials)
            log.close(trials, interrupted)
            return f"{log.experiment}: {self._address(log)}"
        return f"not logged to {redact_password(self.uri)}: {self.problem}. autotune report {self.run_dir} --log logs it later"

    def tag(self, tags: Mapping[str, str]) -> None:
        """Add tags to the study's run, if it was logged."""
        if self._log is not None:
            with self._catching_errors():
                self._log.tag(tags)

    def _address(self, log: "_StudyRun") -> str:
        """Return the run's page on a server, or the command that starts a server and the page there."""
        page = f"#/experiments/{log.experiment_id}/runs/{log.run_id}"
        if self.uri.startswith("http"):
            return f"{redact_password(self.uri).rstrip('/')}/{page}"
        # shorter than the absolute path where runs/ is below the current directory
        relative = f"sqlite:///{RunsDir(Path(self.config.runs)).mlflow_store}"
        is_same = (
            Path(relative.removeprefix("sqlite:///")).resolve() == Path(self.uri.removeprefix("sqlite:///")).resolve()
        )
        store = relative if is_same else redact_password(self.uri)
        return f"mlflow ui --backend-store-uri {store}, then http://127.0.0.1:5000/{page}"

    def _study_run(self) -> "_StudyRun":
        if self._log is None:
            self._log = _StudyRun(self.config, self.run_dir, self.uri)
        return self._log

    @contextmanager
    def _catching_errors(self) -> Iterator[None]:
        set_environment()
        try:
            yield
        except store_errors() as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._log = None
            self.problem = redact_password(first_line.partition(" with exception ")[0][:300])


class _StudyRun:
    """MLflow's parent run of one run directory, and its children, one for each logged trial."""

    def __init__(self, config: Config, run_dir: Path, uri: str) -> None:
        self.config, self.run_dir = config, run_dir
        path = RunDir(run_dir).device
        self.device = from_json(Device, json.loads(path.read_text()), where=str(path))
        self.experiment = experiment_name(config.workload, self.device.key)
        self.client = connect(uri, Path(config.runs))
        self.experiment_id = self._find_experiment(uri)
        self._parent = ""
        self._children: dict[int, str] = {}

    @property
    def run_id(self) -> str:
        """Id of the parent run; empty before the first `catch_up`."""
        return self._parent

    def catch_up(self, trials: Sequence[Trial]) -> None:
        """Create a child run for every notable trial without one."""
        if not self._parent:
            self._open(trials)
        for trial in select_notable(trials):
            if trial.number not in self._children:
                self._children[trial.number] = self._log_trial(trial)

    def close(self, trials: Sequence[Trial], interrupted: int) -> None:
        """Log the best trial, the artifacts and the final status."""
        study = _read_study(self.run_dir)
        best = next((trial for trial in trials if trial.number == study.get("best")), None)
        for number, run in self._children.items():
            self.client.set_tag(run, "autotune.best", str(best is not None and number == best.number).lower())
        if best is not None and best.measurement is not None:
            pooled = pool_runs([trial for trial in trials if (trial.plan, trial.kind) == (best.plan, best.kind)])
            metrics = {f"best_{key}": value for key, value in _trial_metrics(pooled).items()}
            limits = {key: study.get(key) for key in ("budget_bytes", "floor_bytes", "capture_error")}
            metrics |= {key: float(value) for key, value in limits.items() if value is not None}
            self._log_batch(self._parent, time.time(), metrics, {})
            self.client.set_tag(self._parent, "autotune.best_trial", best.number)
        self.client.set_tag(self._parent, "autotune.trials", len(trials))
        if disturbed := describe_disturbance(trials):
            self.client.set_tag(self._parent, "autotune.disturbed", disturbed)
        self._log_confirmed()
        to_frame(trials).to_csv(self.run_dir / "trials.csv", index=False)
        for path in sorted(self.run_dir.iterdir()):
            if path.suffix in ARTIFACT_SUFFIXES and not path.name.startswith("."):
                self.client.log_artifact(self._parent, str(path))
        self.client.set_terminated(self._parent, "KILLED" if interrupted else "FINISHED")

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the parent run."""
        for key, value in tags.items():
            self.client.set_tag(self._parent, key, value)

    def _log_confirmed(self) -> None:
        """Log each re-measured plan's pooled results to the child run of its last trial."""
        path = RunDir(self.run_dir).confirmed
        for plan in json.loads(path.read_text()) if path.exists() else []:
            run = self._children[plan["trial"]]
            self.client.set_tag(run, "autotune.verdict", plan["verdict"])
            self._log_batch(run, time.time(), _confirmed_metrics(plan), {})

    def _find_experiment(self, uri: str) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        # a server chooses the artifacts' place; a database that is used directly needs one beside it
        location = None if uri.startswith("http") else (Path(self.config.runs).resolve() / "mlruns").as_uri()
        return self.client.create_experiment(self.experiment, artifact_location=location)

    def _open(self, trials: Sequence[Trial]) -> None:
        """Find this run directory's parent and children by their tags, or create the parent."""
        first = trials[0]
        # a deleted run directory may have had the same name
        identity = f"{self.run_dir.name}.{first.graph_digest[:8]}.{int(first.started * 1000)}"
        if parents := self._search(f"tags.`autotune.run` = '{identity}'"):
            self._reopen(parents[0].info.run_id)
            return
        tags = {"autotune.kind": "study", "autotune.run": identity, **self._common_tags(first)}
        run = self.client.create_run(
            self.experiment_id, int(first.started * 1000), tags, f"{self.run_dir.name} {self.config.budget}"
        )
        self._parent = run.info.run_id
        self._log_batch(self._parent, first.started, {}, _study_params(self.config))

    def _reopen(self, parent: str) -> None:
        """Continue a parent run. Children without an end were cut short: they are deleted, and logged again."""
        self._parent = parent
        self.client.update_run(parent, status="RUNNING")
        children = self._search(f"tags.`mlflow.parentRunId` = '{parent}'")
        self._children = {
            int(run.data.tags["autotune.trial"]): run.info.run_id
            for run in children
            if run.info.status != "RUNNING" and "autotune.trial" in run.data.tags
        }
        for run in children:
            if run.info.status == "RUNNING":
                self.client.delete_run(run.info.run_id)

    def _log_trial(self, trial: Trial) -> str:
        tags = {
            "mlflow.parentRunId": self._parent,
            "autotune.kind": trial.kind.value,
            "autotune.trial": str(trial.number),
            **self._common_tags(trial),
        }
        measurement = trial.measurement or Measurement(Outcome.CRASHED)
        tags |= {
            "autotune.outcome": measurement.outcome.value,
            "autotune.detail": measurement.detail[:MAX_DETAIL],
            "meter": measurement.meter,
        }
        if measurement.disturbed:
            tags["autotune.disturbed"] = measurement.disturbed
        if measurement.limit:
            tags["limit"] = measurement.limit
        started = int(trial.started * 1000)
        name = f"t{trial.number:04d} {trial.kind}"
        run = self.client.create_run(self.experiment_id, started, tags, name).info.run_id
        params = {"workload": trial.workload, "budget": self.config.budget, **_settings_params(trial)}
        self._log_batch(run, trial.started, _trial_metrics(trial), params, samples=measurement.step_seconds)
        self.client.set_terminated(run, "FAILED" if measurement.outcome is Outcome.CRASHED else "FINISHED")
        return str(run)

    def _log_batch(
        self,
        run: str,
        seconds: float,
        metrics: Mapping[str, float],
        params: Mapping[str, Any],
        *,
        samples: Sequence[float] = (),
    ) -> None:
        """Log with a time stamp in seconds since the epoch.

        MLflow shows a metric's latest value: metrics that may be logged again need the current time.
        """
        from mlflow.entities import Metric, Param

        stamp = int(seconds * 1000)
        points = [Metric(key, float(value), stamp, 0) for key, value in metrics.items() if math.isfinite(value)]
        points += [Metric("sample_seconds", sample, stamp, step) for step, sample in enumerate(samples[:MAX_SAMPLES])]
        self.client.log_batch(run, points, [Param(key, str(value)[:MAX_PARAM]) for key, value in params.items()])

    def _common_tags(self, trial: Trial) -> dict[str, str]:
        tags = {"autotune.schema": "1", "workload": trial.workload, "graph.digest": trial.graph_digest}
        packages = {"autotune": DISTRIBUTION, "optuna": "optuna", "mlflow": "mlflow"}
        tags |= {f"version.{name}": version(package) for name, package in packages.items()}
        fields = to_json(self.device)
        tags |= {f"environment.{key}": value for key, value in fields.pop("environment").items()}
        tags |= {f"device.{key}": str(value) for key, value in fields.items() if value != ""}
        tags |= {"device.key": self.device.key, "version.torch": self.device.torch}
        if sha := git_sha():
            tags["git.sha"] = sha
        return tags

    def _search(self, filter_string: str) -> list[Any]:
        runs: list[Any] = []
        token: str | None = None
        while token is not None or not runs:
            page = self.client.search_runs([self.experiment_id], filter_string, max_results=1000, page_token=token)
            runs += page
            token = page.token
            if not token:
                break
        return runs


def select_notable(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that get a run: baseline, smallest, each new leader, failures and re-measurements.

    A run for every trial would flood MLflow's list.
    """
    notable = []
    lowest = math.inf
    for trial in trials:
        measurement = trial.measurement
        if measurement is None or trial.kind == TrialKind.REPEAT:
            continue
        leads = trial.plan is not None and measurement.outcome is Outcome.OK and (trial.time_cost or math.inf) < lowest
        if leads:
            lowest = trial.time_cost or math.inf
        failed = measurement.outcome not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.STOPPED_EARLY)
        if leads or failed or trial.kind in (TrialKind.BASELINE, TrialKind.SMALLEST, TrialKind.CONFIRM):
            notable.append(trial)
    return notable


def interrupt_signal(run_dir: Path) -> int:
    """Return the number of the signal that ended a run's last session; 0 for none."""
    return int(_read_study(run_dir).get("interrupted", 0))


def _read_study(run_dir: Path) -> dict[str, Any]:
    """Return the content of `study.json`, written when a study ends; empty without it."""
    path = RunDir(run_dir).study
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _trial_metrics(trial: Trial) -> dict[str, float]:
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
        }
    return {key: value for key, value in metrics.items() if value is not None}


METRIC_NAMES: Mapping[str, str] = {"beside_best": "ratio_to_best", "middle": "median"}
"""Plain metric names of keys of `confirmed.json`."""


def _confirmed_metrics(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the pooled results of one re-measured plan, an interval as three metrics."""
    metrics = {
        f"confirmed_{METRIC_NAMES.get(name, name)}_{METRIC_NAMES.get(part, part)}": value
        for name in ("step_seconds", "time_ratio", "beside_best")
        for part, value in (plan[name] or {}).items()
    }
    return metrics | {"confirmed_rounds": plan["rounds"]}


def _settings_params(trial: Trial) -> dict[str, Any]:
    return {
        kind if knob == "planner" else f"{kind}.{knob}": value
        for kind, knobs in trial.settings.items()
        for knob, value in knobs.items()
    }


def _study_params(config: Config) -> dict[str, Any]:
    """Return the config as flat params."""
    document = config.model_dump(mode="json")
    flat = {key: value for key, value in document.items() if not isinstance(value, dict)}
    for key in ("arguments", "stores", "planners"):
        flat |= {f"{key}.{name}": value for name, value in document[key].items() if value is not None}
    return {key: value for key, value in flat.items() if value is not None}
