"""Log a run directory to MLflow, idempotently: the files are the source of truth, and only missing runs are added."""

import json
import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir, RunsDir, log_command
from autotune.records.tracking_address import mask_secrets, sqlite_address, sqlite_file
from autotune.records.trial import Trial, load_trials, to_frame
from autotune.report.mlflow_store import (
    BEST_TRIAL,
    MLFLOW_VIEW,
    connect,
    experiment_name,
    find_experiment,
    set_environment,
    tracking_uri,
)
from autotune.report.run_charts import draw_trial
from autotune.report.summary import summarize_run
from autotune.report.tracking.allowance import GRACE_SECONDS, SHARE, TimeAllowance
from autotune.report.tracking.artifacts import INCOMPLETE, Artifacts
from autotune.report.tracking.deadline import UnansweredError
from autotune.report.tracking.fields import (
    BEST,
    TRIAL,
    common_tags,
    confirmed_metrics,
    cut_tags,
    describe_batch,
    progress_metrics,
    settings_params,
    study_params,
    system_metrics,
    trial_metrics,
    trial_tags,
)
from autotune.study.events import Event, Finished
from autotune.study.outcome import describe_disturbance
from autotune.study.preparation import find_recorded_device
from autotune.study.recorded_run import RecordedRun, read_session_end
from autotune.study.verdicts.front import FrontStatus
from autotune.study.verdicts.ranking import pool_runs

_logger = logging.getLogger(__name__)

ARTIFACT_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".html", ".csv"})
"""Suffixes of the run directory's files that are logged as artifacts: the report, and the records it is made from."""

MAX_SAMPLES, MAX_PARAM = 500, 5000
"""Maximum samples logged per trial, and maximum characters of a param."""


class Tracker:
    """Listener of a study that logs between its measurements. An MLflow failure never ends the study."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.uri = tracking_uri(Path(config.runs), config.tracking_uri)
        self.problem = ""
        """Reason in one line that logging stopped; `finish` retries."""
        self._log: _StudyRun | None = None
        self._unanswered = False
        self._allowance = TimeAllowance(GRACE_SECONDS, SHARE)
        self._postpones = False
        """True once trials wait for the end of the search, because the store is slow."""

    def __call__(self, event: Event) -> None:
        match event:
            case Finished(_, _, _, False) if not self.problem:
                if not self._allowance.is_left:
                    self._postpone()
                    return
                with self._allowance.use(), self._catching_errors():
                    trials = load_trials(RunDir(self.run_dir).trials)
                    if self._study_run().catch_up(trials, self._allowance, is_live=True):
                        self._postpone()
                if self.problem:
                    _logger.warning(
                        "not logged to %s: %s. The search continues; logging is retried when it ends",
                        mask_secrets(self.uri), self.problem,
                    )  # fmt: skip

    def finish(self, *, interrupted: int | None = 0) -> str:
        """Log missing trials and the artifacts; return one line with the place of the run, or with the reason of failure.

        `interrupted` is the number of the signal that ended the study, None if it was killed. Without a trial the line is
        empty. A slow store gets as much time as the study took; what is missing then is left to a later call.
        """
        trials = load_trials(RunDir(self.run_dir).trials)
        if not trials:
            return ""
        if not self._unanswered:
            self.problem = ""
        allowance = TimeAllowance(GRACE_SECONDS + self._allowance.elapsed if self._postpones else math.inf)
        with allowance.use(), self._catching_errors():
            if self._unanswered:  # the limit on the time of one call is that of the whole study
                raise UnansweredError(self.problem)
            log = self._study_run()
            if left := log.catch_up(trials, allowance):
                seconds = f"{allowance.elapsed:.0f} s"
                raise OSError(f"{left} of {len(trials)} trials are left after {seconds}, because it answers slowly")
            log.close(trials, interrupted)
            missing = f"; artifacts are missing: {log.artifacts.problem}" if log.artifacts.problem else ""
            return f"{log.experiment}: {self._address(log)}{missing}"
        return f"not logged to {mask_secrets(self.uri)}: {self.problem}. {log_command(self.run_dir)} logs it later"

    def _postpone(self) -> None:
        """Warn once that a slow store gets trials when the search ends."""
        if not self._postpones:
            self._postpones = True
            _logger.warning(
                "%s answers slowly: trials that do not fit into %.0f %% of the search's time are logged when it ends",
                mask_secrets(self.uri), 100 * SHARE,
            )  # fmt: skip

    def tag(self, tags: Mapping[str, str]) -> None:
        """Add tags to the study's run, if it was logged."""
        if self._log is not None:
            with self._catching_errors():
                self._log.tag(tags)

    def _address(self, log: "_StudyRun") -> str:
        """Return the run's page on a server, or the command that starts a server and the page there."""
        page = f"#/experiments/{log.experiment_id}/runs/{log.run_id}{MLFLOW_VIEW}"
        if self.uri.startswith("http"):
            return f"{mask_secrets(self.uri).rstrip('/')}/{page}"
        # shorter than the absolute path where runs/ is below the current directory
        near, file = RunsDir(Path(self.config.runs)).mlflow_store, sqlite_file(self.uri)
        is_same = file is not None and file.resolve() == near.resolve()
        store = shlex.quote(sqlite_address(near)) if is_same else mask_secrets(self.uri)
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
        except AutotuneError:
            raise
        except Exception as error:  # noqa: BLE001 - hours of measurements must not end with a fault of a server or a library
            self._unanswered = isinstance(error, UnansweredError)
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._log = None
            self.problem = mask_secrets(first_line.partition(" with exception ")[0][:300])


class _StudyRun:
    """MLflow's parent run of one run directory, and its children, one for each logged trial."""

    def __init__(self, config: Config, run_dir: Path, uri: str) -> None:
        self.config, self.run_dir = config, run_dir
        path = RunDir(run_dir).device
        first = find_recorded_device(run_dir, load_trials(RunDir(run_dir).trials))  # names the parent's experiment
        self.device = first or from_json(Device, json.loads(path.read_text(encoding="utf-8")), where=str(path))
        self.experiment = experiment_name(config.workload, self.device.key, config.on)
        self.client = connect(uri, Path(config.runs))
        self.artifacts = Artifacts(self.client)
        self.experiment, self.experiment_id = find_experiment(self.client, self.experiment, uri, Path(config.runs))
        self._parent = ""
        self._children: dict[int, str] = {}
        self._best_tags: dict[int, str] = {}
        """Recorded value of the tag `BEST` of each child."""

    @property
    def run_id(self) -> str:
        """Id of the parent run; empty before the first `catch_up`."""
        return self._parent

    def catch_up(
        self, trials: Sequence[Trial], allowance: TimeAllowance | None = None, *, is_live: bool = False
    ) -> int:
        """Create a child run for every trial without one, while the allowance lasts; return the number of trials left.

        `is_live` logs the machine's load beside the last trial: no thread samples while a step is measured.
        """
        if not self._parent:
            self._open(trials)
        logged = [trial for trial in trials if trial.measurement is not None]
        left, recorded = 0, RunDir(self.run_dir).trials.stat().st_mtime
        for trial, ended in zip(logged, [*(following.started for following in logged[1:]), recorded], strict=True):
            child = self._children.get(trial.number)
            lacks_artifacts = child in self.artifacts.marked and not self.artifacts.problem
            if (child is None or lacks_artifacts) and allowance is not None and not allowance.is_left:
                left += 1
            elif child is None:
                newest = is_live and trial is logged[-1]
                self._children[trial.number] = self._log_trial(trial, ended, is_live=newest)
                self._best_tags[trial.number] = "false"
            elif lacks_artifacts:
                self._log_artifacts(child, trial)
        return left

    def close(self, trials: Sequence[Trial], interrupted: int | None) -> None:
        """Log the best trial, the artifacts and the final status."""
        study, records = read_session_end(self.run_dir, len(trials)), RecordedRun.load(self.run_dir)
        if not study:
            study = {"budget_bytes": records.budget_step_bytes, "floor_bytes": records.floor_bytes}
            study["best"] = None if records.best is None else records.best.number
        best = next((trial for trial in trials if trial.number == study["best"]), None)
        for number, run in self._children.items():
            is_best = str(best is not None and number == best.number).lower()
            if self._best_tags.get(number) != is_best:  # a request for each child takes minutes on a slow server
                self.client.set_tag(run, BEST, is_best)
                self._best_tags[number] = is_best
        if best is not None and best.measurement is not None:
            pooled = pool_runs([trial for trial in trials if (trial.plan, trial.kind) == (best.plan, best.kind)])
            metrics = {f"best_{key}": value for key, value in trial_metrics(pooled).items()}
            limits = {key: study.get(key) for key in ("budget_bytes", "floor_bytes", "capture_error")}
            metrics |= {key: float(value) for key, value in limits.items() if value is not None}
            self._log_batch(self._parent, time.time(), metrics, {})
            self.client.set_tag(self._parent, BEST_TRIAL, best.number)
        elif BEST_TRIAL in self.client.get_run(self._parent).data.tags:  # the metrics of an earlier winner stay
            self.client.delete_tag(self._parent, BEST_TRIAL)
        self.client.set_tag(self._parent, "autotune.trials", len(trials))
        headline, sentence = summarize_run(records)
        self.client.set_tag(self._parent, "mlflow.note.content", f"**{headline}**\n\n{sentence}")
        if disturbed := describe_disturbance(trials):
            self.client.set_tag(self._parent, "autotune.disturbed", disturbed)
        self._log_confirmed()
        self._log_front()
        to_frame(trials).to_csv(self.run_dir / "trials.csv", index=False)
        for path in sorted(self.run_dir.iterdir()):
            if path.suffix in ARTIFACT_SUFFIXES and not path.name.startswith("."):
                self.artifacts.log_file(self._parent, path)
        self.artifacts.mark(self._parent)
        # not the present time: a study may be logged days later
        files = RunDir(self.run_dir)
        ended = max(path.stat().st_mtime for path in (files.trials, files.study) if path.exists())
        self.client.set_terminated(self._parent, "FINISHED" if interrupted == 0 else "KILLED", int(1000 * ended))

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the parent run."""
        for key, value in tags.items():
            self.client.set_tag(self._parent, key, value)

    def _log_confirmed(self) -> None:
        """Log each re-measured plan's pooled results to the child run of its last trial."""
        path = RunDir(self.run_dir).confirmed
        for plan in json.loads(path.read_text(encoding="utf-8")) if path.exists() else []:
            run = self._children[plan["trial"]]
            self.client.set_tag(run, "autotune.verdict", plan["verdict"])
            self._log_batch(run, time.time(), confirmed_metrics(plan), {})

    def _log_front(self) -> None:
        """Log the table and the plan files of a Pareto front, its number of points, and each plan's status."""
        files = RunDir(self.run_dir)
        if not files.front_table.exists():
            return
        plans = json.loads(files.front_table.read_text(encoding="utf-8"))["plans"]
        for plan in plans:
            self.client.set_tag(self._children[plan["trial"]], "autotune.verdict", plan["status"])
        count = sum(plan["status"] == FrontStatus.FRONT for plan in plans)
        self._log_batch(self._parent, time.time(), {"front_points": count}, {})
        self.artifacts.log_folder(self._parent, files.front)

    def _open(self, trials: Sequence[Trial]) -> None:
        """Find this run directory's parent and children by their tags, or create the parent."""
        first = trials[0]
        # a deleted run directory may have had the same name
        identity = f"{self.run_dir.name}.{first.graph_digest[:8]}.{int(first.started * 1000)}"
        # a filter has no escape for a quote, but `_` of LIKE is any character
        pattern = identity.replace("'", "_")
        comparison = "=" if pattern == identity else "LIKE"
        if parents := self._search(f"tags.`autotune.run` {comparison} '{pattern}'"):
            self._reopen(parents[0])
            if "budget" not in parents[0].data.params:  # its creation was cut short
                self._describe(first)
            return
        tags = {"autotune.kind": "study", "autotune.run": identity, **common_tags(first, self.device)}
        run = self.client.create_run(
            self.experiment_id, int(first.started * 1000), cut_tags(tags), f"{self.run_dir.name} {self.config.budget}"
        )
        self._parent = run.info.run_id
        self._describe(first)

    def _describe(self, first: Trial) -> None:
        """Log the params of the study, and the batch as its input."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if self.records.graph is not None:
            batch = Dataset(**describe_batch(self.records.graph, first.workload))
            tags = [InputTag("mlflow.data.context", "training")]
            self.client.log_inputs(self._parent, [DatasetInput(batch, tags)])
        self._log_batch(self._parent, first.started, {}, study_params(self.config))

    def _reopen(self, parent: Any) -> None:
        """Continue a parent run. Its trials' runs without an end were cut short: they are deleted, and logged again.

        Other runs below it are the user's.
        """
        self._parent = parent.info.run_id
        self.client.update_run(self._parent, status="RUNNING")
        below = self._search(f"tags.`mlflow.parentRunId` = '{self._parent}'")
        children = [run for run in below if TRIAL in run.data.tags]
        ended = {int(run.data.tags[TRIAL]): run for run in children if run.info.status != "RUNNING"}
        self._children = {number: run.info.run_id for number, run in ended.items()}
        self._best_tags = {number: run.data.tags.get(BEST, "") for number, run in ended.items()}
        self.artifacts.marked |= {run.info.run_id for run in (parent, *ended.values()) if INCOMPLETE in run.data.tags}
        for run in children:
            if run.info.status == "RUNNING":
                self.client.delete_run(run.info.run_id)

    @cached_property
    def records(self) -> RecordedRun:
        """Records of the run directory as they were when logging began: graph and costs do not change."""
        return RecordedRun.load(self.run_dir)

    def _log_trial(self, trial: Trial, ended: float, *, is_live: bool) -> str:
        """Log one trial. `ended` is the start of the next one or the time of the last record, in seconds since the epoch.

        Beside trials on other devices, the next one starts before this one ends; then the measured seconds are its duration.
        """
        measurement = trial.measurement or Measurement(Outcome.CRASHED)
        tags = trial_tags(trial, self._parent, self.device)
        started = int(trial.started * 1000)
        name = f"t{trial.number:04d} {trial.label}"
        run = self.client.create_run(self.experiment_id, started, cut_tags(tags), name).info.run_id
        params = {"workload": trial.workload, "budget": self.config.budget, **settings_params(trial)}
        steps, eager = measurement.step_seconds, measurement.baseline_seconds
        self._log_batch(run, trial.started, trial_metrics(trial), params, samples=steps, between=eager)
        points = _to_points(progress_metrics(trial), trial.started, trial.number)
        if is_live:
            points += _to_points(system_metrics(), time.time(), trial.number)
        self.client.log_batch(self._parent, points)
        self._log_artifacts(run, trial)
        status = "FAILED" if measurement.outcome is Outcome.CRASHED else "FINISHED"
        measured = sum(measurement.step_seconds) + sum(measurement.baseline_seconds)
        self.client.set_terminated(run, status, int(1000 * max(ended, trial.started + measured)))
        return str(run)

    def _log_artifacts(self, run: str, trial: Trial) -> None:
        """Store the plan of a trial and the picture of its memory."""
        if trial.plan is not None:
            self.artifacts.log_text(run, json.dumps(to_json(trial.plan)), "plan.json")
        if picture := draw_trial(self.records, trial):
            self.artifacts.log_text(run, picture, "memory.svg")
        self.artifacts.mark(run)

    def _log_batch(
        self,
        run: str,
        seconds: float,
        metrics: Mapping[str, float],
        params: Mapping[str, Any],
        *,
        samples: Sequence[float] = (),
        between: Sequence[float] = (),
    ) -> None:
        """Log with a time stamp in seconds since the epoch.

        MLflow shows a metric's latest value: metrics that may be logged again need the current time. Each of `samples`,
        in seconds, is stamped with its end; `between` are the durations of eager's steps in the same turns.
        """
        from mlflow.entities import Metric, Param

        points, stamp = _to_points(metrics, seconds), int(seconds * 1000)
        ends = accumulate(map(sum, zip_longest(samples[:MAX_SAMPLES], between[: len(samples)], fillvalue=0.0)))
        points += [
            Metric("sample_seconds", sample, stamp + int(1000 * end), number)
            for number, (sample, end) in enumerate(zip(samples[:MAX_SAMPLES], ends, strict=False))
        ]
        self.client.log_batch(run, points, [Param(key, str(value)[:MAX_PARAM]) for key, value in params.items()])

    def _search(self, filter_string: str) -> list[Any]:
        runs: list[Any] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs(
                [self.experiment_id], filter_string, max_results=1000, page_token=token or None
            )
            runs += page
            token = page.token or None
        return runs


def _to_points(metrics: Mapping[str, float], seconds: float, step: int = 0) -> list[Any]:
    """Return MLflow's metrics with one time stamp, in seconds since the epoch; numbers that it refuses are left out."""
    from mlflow.entities import Metric

    stamp = int(1000 * seconds)
    return [Metric(key, float(value), stamp, step) for key, value in metrics.items() if math.isfinite(value)]
