"""Log a run directory to MLflow: what is on disk is the truth, what MLflow lacks of it is added, nothing twice."""

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

from autotune.records.config import Config
from autotune.records.device import Device
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.provenance import git_sha
from autotune.records.trial import Trial, frame, load
from autotune.report.mlflow_store import connect, faults, public, settle_environment, tracking_uri
from autotune.study.events import Event, Finished
from autotune.study.verdicts.ranking import pool

_logger = logging.getLogger(__name__)

CONFIRMED = "confirmed.json"
"""What the plans that were measured afresh came to, as `autotune.study.verdicts.confirm.document` tells it."""

RECORDS = frozenset({".json", ".jsonl", ".yaml", ".html", ".csv"})
"""Of the run directory all files of these kinds are artifacts: what the report is made from, and the report."""


def experiment_name(workload: str, device_key: str) -> str:
    """One per workload and device. No slashes: MLflow's pages show only what follows the last."""
    return f"autotune.{re.sub(r'[^A-Za-z0-9_.-]+', '-', workload).strip('-.')}.{device_key}"


class Tracker:
    """Listens to a study and logs between its measurements. Nothing that MLflow does ends the study."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.uri = tracking_uri(Path(config.runs), config.tracking_uri)
        self.problem = ""
        """Why logging stopped, in one line; `finish` tries once more."""
        self._log: _Log | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Finished(_, _, _, False) if not self.problem:
                with self._tolerant():
                    self._logged().catch_up(load(self.run_dir / "trials.jsonl"))
                if self.problem:
                    _logger.warning(
                        "not logged to %s: %s. The search goes on; at its end this is tried again",
                        public(self.uri), self.problem,
                    )  # fmt: skip

    def finish(self, *, interrupted: int = 0) -> str:
        """Log what is missing and the artifacts; one line that says where it lies, or why it does not."""
        trials = load(self.run_dir / "trials.jsonl")
        if not trials:
            return ""
        self.problem = ""
        with self._tolerant():
            log = self._logged()
            log.catch_up(trials)
            log.close(trials, interrupted)
            return f"{log.experiment}: {self._where(log)}"
        return f"not logged to {public(self.uri)}: {self.problem}. autotune report {self.run_dir} --log logs it later"

    def tag(self, tags: Mapping[str, str]) -> None:
        """Say more of a run that was logged."""
        if self._log is not None:
            with self._tolerant():
                self._log.tag(tags)

    def _where(self, log: "_Log") -> str:
        """The address of the run's page on a server, else the command that starts one, and the address there."""
        page = f"#/experiments/{log.experiment_id}/runs/{log.run_id}"
        if self.uri.startswith("http"):
            return f"{public(self.uri).rstrip('/')}/{page}"
        near = (
            f"sqlite:///{Path(self.config.runs)}/mlflow.db"  # shorter than the whole path, where runs/ lies below here
        )
        same = Path(near.removeprefix("sqlite:///")).resolve() == Path(self.uri.removeprefix("sqlite:///")).resolve()
        shown = near if same else public(self.uri)
        return f"mlflow ui --backend-store-uri {shown}, then http://127.0.0.1:5000/{page}"

    def _logged(self) -> "_Log":
        if self._log is None:
            self._log = _Log(self.config, self.run_dir, self.uri)
        return self._log

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        settle_environment()
        try:
            yield
        except faults() as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._log = None
            self.problem = public(said.partition(" with exception ")[0][:300])


class _Log:
    """The parent run of one run directory, and which of its trials have a child."""

    def __init__(self, config: Config, run_dir: Path, uri: str) -> None:
        self.config, self.run_dir = config, run_dir
        told = json.loads((run_dir / "device.json").read_text())
        self.device = from_json(Device, told, where=f"{run_dir}/device.json")
        self.experiment = experiment_name(config.workload, self.device.key)
        self.client = connect(uri, Path(config.runs))
        self.experiment_id = self._find_experiment(uri)
        self._parent = ""
        self._children: dict[int, str] = {}

    @property
    def run_id(self) -> str:
        """Of the parent; empty before the first `catch_up`."""
        return self._parent

    def catch_up(self, trials: Sequence[Trial]) -> None:
        """A child for every notable trial that has none yet."""
        if not self._parent:
            self._open(trials)
        for trial in notable(trials):
            if trial.number not in self._children:
                self._children[trial.number] = self._log_trial(trial)

    def close(self, trials: Sequence[Trial], interrupted: int) -> None:
        """Name the best, add the artifacts, end the parent."""
        study = _study(self.run_dir)
        best = next((trial for trial in trials if trial.number == study.get("best")), None)
        for number, run in self._children.items():
            self.client.set_tag(run, "autotune.best", str(best is not None and number == best.number).lower())
        if best is not None and best.measurement is not None:
            whole = pool([trial for trial in trials if (trial.plan, trial.kind) == (best.plan, best.kind)])
            metrics = {f"best_{key}": value for key, value in _metrics(whole).items()}
            told = {key: study.get(key) for key in ("budget_bytes", "floor_bytes", "capture_error")}
            metrics |= {key: float(value) for key, value in told.items() if value is not None}
            self._batch(self._parent, time.time(), metrics, {})
            self.client.set_tag(self._parent, "autotune.best_trial", best.number)
        self.client.set_tag(self._parent, "autotune.trials", len(trials))
        self._confirmed()
        frame(trials).to_csv(self.run_dir / "trials.csv", index=False)
        for path in sorted(self.run_dir.iterdir()):
            if path.suffix in RECORDS and not path.name.startswith("."):
                self.client.log_artifact(self._parent, str(path))
        self.client.set_terminated(self._parent, "KILLED" if interrupted else "FINISHED")

    def _confirmed(self) -> None:
        """On the last fresh run of each plan what all of them came to."""
        path = self.run_dir / CONFIRMED
        for told in json.loads(path.read_text()) if path.exists() else []:
            run = self._children[told["trial"]]
            self.client.set_tag(run, "autotune.verdict", told["verdict"])
            metrics = {
                f"confirmed_{name}_{part}": value
                for name in ("step_seconds", "time_ratio", "beside_best")
                for part, value in (told[name] or {}).items()
            }
            self._batch(run, time.time(), metrics | {"confirmed_rounds": told["rounds"]}, {})

    def tag(self, tags: Mapping[str, str]) -> None:
        """On the parent."""
        for key, value in tags.items():
            self.client.set_tag(self._parent, key, value)

    def _find_experiment(self, uri: str) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        # a server has a place of its own; beside a database that is asked directly there is none
        beside = None if uri.startswith("http") else (Path(self.config.runs).resolve() / "mlruns").as_uri()
        return self.client.create_experiment(self.experiment, artifact_location=beside)

    def _open(self, trials: Sequence[Trial]) -> None:
        """Find this run directory's parent and children by their tags, or begin it."""
        first = trials[0]
        # the name alone may have been used before, and deleted
        identity = f"{self.run_dir.name}.{first.graph_digest[:8]}.{int(first.started * 1000)}"
        same = self._search(f"tags.`autotune.run` = '{identity}'")
        if same:
            self._parent = same[0].info.run_id
            self.client.update_run(self._parent, status="RUNNING")
            children = self._search(f"tags.`mlflow.parentRunId` = '{self._parent}'")
            # a child that was not ended was cut short: it is written once more, over what it has
            self._children = {
                int(run.data.tags["autotune.trial"]): run.info.run_id
                for run in children
                if run.info.status != "RUNNING" and "autotune.trial" in run.data.tags
            }
            for run in children:
                if run.info.status == "RUNNING":
                    self.client.delete_run(run.info.run_id)
            return
        tags = {"autotune.kind": "study", "autotune.run": identity, **self._common_tags(first)}
        made = self.client.create_run(
            self.experiment_id, int(first.started * 1000), tags, f"{self.run_dir.name} {self.config.budget}"
        )
        self._parent = made.info.run_id
        self._batch(self._parent, first.started, {}, _study_params(self.config))

    def _log_trial(self, trial: Trial) -> str:
        tags = {
            "mlflow.parentRunId": self._parent,
            "autotune.kind": trial.kind,
            "autotune.trial": str(trial.number),
            **self._common_tags(trial),
        }
        seen = trial.measurement or Measurement(Outcome.CRASHED)
        tags |= {"autotune.outcome": seen.outcome.value, "autotune.detail": seen.detail[:4000], "meter": seen.meter}
        if seen.limit:
            tags["limit"] = seen.limit
        started = int(trial.started * 1000)
        name = f"t{trial.number:04d} {trial.kind}"
        run = self.client.create_run(self.experiment_id, started, tags, name).info.run_id
        params = {"workload": trial.workload, "budget": self.config.budget, **_settings_params(trial)}
        self._batch(run, trial.started, _metrics(trial), params, samples=seen.step_seconds)
        self.client.set_terminated(run, "FAILED" if seen.outcome is Outcome.CRASHED else "FINISHED")
        return str(run)

    def _batch(
        self,
        run: str,
        seconds: float,
        metrics: Mapping[str, float],
        params: Mapping[str, Any],
        *,
        samples: Sequence[float] = (),
    ) -> None:
        """Log at a time since the epoch. MLflow shows the latest of a metric: what may be logged anew is stamped with now."""
        from mlflow.entities import Metric, Param

        at = int(seconds * 1000)
        points = [Metric(key, float(value), at, 0) for key, value in metrics.items() if math.isfinite(value)]
        points += [Metric("sample_seconds", sample, at, number) for number, sample in enumerate(samples[:500])]
        self.client.log_batch(run, points, [Param(key, str(value)[:5000]) for key, value in params.items()])

    def _common_tags(self, trial: Trial) -> dict[str, str]:
        tags = {"autotune.schema": "1", "workload": trial.workload, "graph.digest": trial.graph_digest}
        tags |= {f"version.{name}": version(name) for name in ("autotune", "optuna", "mlflow")}
        tags |= {f"device.{key}": str(value) for key, value in to_json(self.device).items() if value != ""}
        tags |= {"device.key": self.device.key, "version.torch": self.device.torch}
        if sha := git_sha():
            tags["git.sha"] = sha
        return tags

    def _search(self, filter_string: str) -> list[Any]:
        found: list[Any] = []
        token: str | None = None
        while token is not None or not found:
            page = self.client.search_runs([self.experiment_id], filter_string, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                break
        return found


def notable(trials: Sequence[Trial]) -> list[Trial]:
    """Baseline, smallest, each new leader, failures and confirmations: a run of its own for all would flood the list."""
    found = []
    lead = math.inf
    for trial in trials:
        seen = trial.measurement
        if seen is None or trial.kind == "repeat":
            continue
        leads = trial.plan is not None and seen.outcome is Outcome.OK and _cost(seen) < lead
        if leads:
            lead = _cost(seen)
        failed = seen.outcome not in (Outcome.OK, Outcome.OVER_BUDGET, Outcome.STOPPED_EARLY)
        if leads or failed or trial.kind in ("baseline", "smallest", "confirm"):
            found.append(trial)
    return found


def interrupted(run_dir: Path) -> int:
    """Number of the signal that ended the last session of a run; 0 for none."""
    return int(_study(run_dir).get("interrupted", 0))


def _study(run_dir: Path) -> dict[str, Any]:
    """What the study wrote down at its end: the winner and the budget; empty where it did not get so far."""
    path = run_dir / "study.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _cost(seen: Measurement | None) -> float:
    if seen is None:
        return math.inf
    ratio = seen.median_seconds if seen.time_ratio is None else seen.time_ratio
    return math.inf if ratio is None else ratio


def _metrics(trial: Trial) -> dict[str, float]:
    """Base units in the names, as in the types."""
    found: dict[str, Any] = {}
    if trial.estimate is not None:
        known = to_json(trial.estimate)
        found |= {f"estimate_{key}": value for key, value in known.items() if not isinstance(value, str)}
    seen = trial.measurement
    if seen is not None:
        found |= {
            "peak_bytes": seen.peak_bytes,
            "charged_bytes": seen.charged_bytes,
            "floor_bytes": seen.floor_bytes,
            "step_peak_bytes": seen.step_peak_bytes,
            "step_charged_bytes": seen.step_charged_bytes,
            "step_seconds": seen.median_seconds,
            "baseline_seconds": statistics.median(seen.baseline_seconds) if seen.baseline_seconds else None,
            "time_ratio": seen.time_ratio,
            "stall_seconds": seen.stall_seconds,
            "transfer_bytes": seen.transfer_bytes,
            "max_error": seen.max_error,
            "hidden_share": seen.lanes.hidden if seen.lanes else None,
        }
    return {key: value for key, value in found.items() if value is not None}


def _settings_params(trial: Trial) -> dict[str, Any]:
    return {
        kind if knob == "planner" else f"{kind}.{knob}": value
        for kind, knobs in trial.settings.items()
        for knob, value in knobs.items()
    }


def _study_params(config: Config) -> dict[str, Any]:
    """The config, flat."""
    known = config.model_dump(mode="json")
    flat = {key: value for key, value in known.items() if not isinstance(value, dict)}
    for key in ("arguments", "stores", "planners"):
        flat |= {f"{key}.{name}": value for name, value in known[key].items() if value is not None}
    return {key: value for key, value in flat.items() if value is not None}
