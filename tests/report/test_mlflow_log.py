"""A study in a real MLflow on SQLite: complete, logged once, and errors of an unreachable store."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from autotune.api.launch import run_tracked
from autotune.cli import main as cli
from autotune.cli.commands import report
from autotune.cli.commands.report import run as log_again
from autotune.errors import ConfigError, DeviceLostError, LockedError
from autotune.ir.plan import Plan
from autotune.records.config import Config
from autotune.records.json_codec import from_json, to_json
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import lock_run_dir
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.report import tables
from autotune.report.html import write_report
from autotune.report.mlflow_log import Tracker
from autotune.report.mlflow_store import BEST_TRIAL, ENVIRONMENT, MLFLOW_VIEW, experiment_name, relocate_artifacts
from autotune.report.tracking.artifacts import INCOMPLETE
from autotune.report.tracking.fields import MAX_NAME, MAX_TAG, trial_metrics
from autotune.study.recorded_run import read_session_end
from autotune.study.session import StudyResult, tune
from autotune.study.verdicts.confirm import to_table
from autotune.testing.fake_runner import DEVICE, FakeRunner
from autotune.testing.graphs import training_chain
from autotune.units import mib
from tests.study.test_front_session import configured as front_config
from tests.study.test_front_session import runner as front_runner
from tests.study.test_session import configured
from tests.support.postgres import ABSENT, find_programs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def open_client(uri: str) -> "MlflowClient":
    """Return a client of a store."""
    from mlflow import MlflowClient  # deferred: the import takes seconds

    return MlflowClient(tracking_uri=uri)


def refuse(*arguments: object, **options: object) -> None:
    """Fail in place of a client's method."""
    raise OSError("no credentials for s3://results\nset AWS_ACCESS_KEY_ID")


class Logged:
    """One tuned and logged study, and MLflow's view of it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run_dir = directory, directory / "runs" / "first"
        self.config = self.configured()
        self.tracker = Tracker(self.config, self.run_dir)
        self.result = self.tune(self.tracker)
        self.message = self.tracker.finish()
        self.client = open_client(self.tracker.uri)
        self.experiment = self.client.get_experiment_by_name(experiment_name("resnet18", DEVICE.key))

    def configured(self, **fields: object) -> Config:
        return configured(self.directory, runs=str(self.directory / "runs"), trials=6, **fields)

    def tune(self, tracker: Tracker, run_dir: Path | None = None, config: Config | None = None) -> StudyResult:
        report = lambda run_dir: (run_dir / "report.html").write_text("<html>") and run_dir / "report.html"  # noqa: E731
        failing: list[Plan] = []

        def fail_second(plan: Plan) -> Outcome:
            failing.append(plan)
            return Outcome.CRASHED if [plan] == failing[1:2] else Outcome.OK

        return tune(
            config or self.config, FakeRunner(outcome_of=fail_second), run_dir or self.run_dir,
            progress=tracker, write_report=report,
        )  # fmt: skip

    def family(self, name: str, budget: str = "65%") -> "list[Run]":
        """The run of that name, and its children."""
        experiments = self.client.search_experiments(filter_string=f"name LIKE '{self.experiment.name}%'")
        runs = self.client.search_runs([each.experiment_id for each in experiments])
        (parent,) = (run for run in runs if run.info.run_name == f"{name} {budget}")
        return [run for run in runs if parent.info.run_id in (run.info.run_id, run.data.tags.get("mlflow.parentRunId"))]

    def study(self, name: str) -> "Run":
        """The study's run of that name, with its inputs."""
        (found,) = (run for run in self.family(name) if run.data.tags["autotune.kind"] == "study")
        return self.client.get_run(found.info.run_id)

    def runs(self) -> "list[Run]":
        return self.family("first")

    @property
    def parent(self) -> "Run":
        return next(run for run in self.runs() if run.data.tags["autotune.kind"] == "study")

    @property
    def children(self) -> "dict[int, Run]":
        return {int(run.data.tags["autotune.trial"]): run for run in self.runs() if "autotune.trial" in run.data.tags}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield Logged(tmp_path_factory.mktemp("logged"))
    patch.undo()


@pytest.fixture(scope="module")
def later(logged):
    """Directory of a copy of the study, logged at a time long after its last trial."""
    run_dir = logged.directory / "runs" / "later"
    shutil.copytree(logged.run_dir, run_dir)
    os.utime(run_dir / "trials.jsonl", (2e9, 2e9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 3e9)
        Tracker(logged.config, run_dir).finish()
    return run_dir


def test_experiment_stands_for_workload_and_device_without_a_slash(logged):
    assert logged.experiment.name == "autotune.resnet18.cpu-fake-9000-2"
    assert experiment_name("models/net.py:tiny", "cpu-x") == "autotune.models-net.py-tiny.cpu-x"


def test_a_study_that_went_on_on_another_device_is_logged_to_the_experiment_of_its_first_trial(logged):
    run_dir, other = logged.run_dir.parent / "moved-on", replace(DEVICE, silicon="Fake 8000")
    shutil.copytree(logged.run_dir, run_dir)
    (run_dir / "device.json").write_text(json.dumps(to_json(other)))
    assert Tracker(logged.config, run_dir).finish().startswith(f"{logged.experiment.name}: ")
    assert logged.study(run_dir.name).data.tags["device.key"] == DEVICE.key


def test_what_is_said_of_a_logged_run_later_stands_on_its_parent(logged):
    logged.tracker.tag({"autotune.nightly.verdict": "regression"})
    tagged = [run for run in logged.runs() if run.data.tags.get("autotune.nightly.verdict") == "regression"]
    assert [run.info.run_id for run in tagged] == [logged.parent.info.run_id]


def test_every_trial_is_one_child_of_one_parent(logged):
    children = logged.children
    assert set(children) == {trial.number for trial in logged.result.trials}
    assert len(logged.runs()) == len(children) + 1
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {logged.parent.info.run_id}
    failed = [number for number, run in children.items() if run.info.status == "FAILED"]
    assert failed == [trial.number for trial in logged.result.trials if trial.measurement.outcome is Outcome.CRASHED]
    assert len(failed) == 1
    assert logged.parent.info.status == "FINISHED"


def test_metrics_are_the_records_in_base_units(logged):
    best = logged.result.trials[logged.result.best.number]
    metrics = logged.children[best.number].data.metrics
    assert metrics["peak_bytes"] == best.measurement.peak_bytes
    assert metrics["charged_bytes"] == best.measurement.charged_bytes
    assert metrics["step_seconds"] == best.measurement.median_seconds
    assert metrics["time_ratio"] == best.measurement.time_ratio
    assert metrics["estimate_peak_bytes"] == best.estimate.peak_bytes
    whole = logged.parent.data.metrics
    assert whole["best_charged_bytes"] == logged.result.best.measurement.charged_bytes
    assert whole["best_step_seconds"] == logged.result.best.measurement.median_seconds
    samples = logged.client.get_metric_history(logged.children[best.number].info.run_id, "sample_seconds")
    assert [sample.value for sample in samples] == list(best.measurement.step_seconds)


def test_what_its_fresh_runs_came_to_stands_on_the_last_one_of_each_plan(logged):
    table = to_table(logged.result.confirmed)
    assert "BEST" in [plan["verdict"] for plan in table]
    for plan in table:
        run = logged.children[plan["trial"]]
        assert run.data.tags["autotune.verdict"] == plan["verdict"]
        assert run.data.metrics["confirmed_rounds"] == plan["rounds"]
        for name, part in (("median", "middle"), ("low", "low"), ("high", "high")):
            assert run.data.metrics[f"confirmed_step_seconds_{name}"] == plan["step_seconds"][part]
            assert run.data.metrics[f"confirmed_time_ratio_{name}"] == plan["time_ratio"][part]
    names = {artifact.path for artifact in logged.client.list_artifacts(logged.parent.info.run_id)}
    assert "confirmed.json" in names


def test_params_are_settings_and_workload(logged):
    best = logged.result.best
    params = logged.children[best.number].data.params
    assert params["recompute"] == best.settings["recompute"]["planner"]
    assert params["workload"] == "resnet18()"
    assert logged.parent.data.params["budget"] == "65%"
    assert logged.parent.data.params["seed"] == "0"


def test_tags_say_outcome_kind_graph_versions_and_device(logged):
    tags = logged.children[0].data.tags
    assert tags["autotune.kind"] == "baseline"
    assert tags["autotune.outcome"] == "ok"
    assert tags["graph.digest"] == logged.result.baseline.graph_digest
    assert tags["device.key"] == DEVICE.key
    assert logged.parent.data.tags["device.silicon"] == DEVICE.silicon
    assert {"version.torch", "version.optuna", "version.mlflow", "version.autotune"} <= set(tags)
    assert logged.children[logged.result.best.number].data.tags["autotune.best"] == "true"
    assert sum(run.data.tags["autotune.best"] == "true" for run in logged.children.values()) == 1


def test_a_trials_run_holds_its_plan_its_picture_and_its_estimate_beside_its_measurement(logged):
    best = logged.result.best
    run = logged.children[best.number]
    names = {artifact.path for artifact in logged.client.list_artifacts(run.info.run_id)}
    assert names == {"plan.json", "memory.svg"}
    where = logged.client.download_artifacts(run.info.run_id, "plan.json", str(logged.directory))
    assert from_json(Plan, json.loads(Path(where).read_text()), where=where) == best.plan
    error = best.estimate.peak_bytes / best.measurement.step_peak_bytes - 1
    assert run.data.metrics["estimate_peak_error"] == pytest.approx(error)
    assert "| peak of the step | " in run.data.tags["mlflow.note.content"]


def test_steps_and_trials_carry_the_time_at_which_they_ended(logged):
    best = logged.result.trials[logged.result.best.number]
    run = logged.children[best.number].info
    samples = logged.client.get_metric_history(run.run_id, "sample_seconds")
    stamps = [sample.timestamp for sample in samples]
    assert run.start_time < stamps[0]
    assert stamps == sorted(set(stamps))
    pairs = zip(best.measurement.step_seconds, best.measurement.baseline_seconds, strict=True)
    assert stamps[-1] == run.start_time + int(1000 * sum(map(sum, pairs)))
    history = logged.client.get_metric_history(logged.parent.info.run_id, "trial_time_ratio")
    timed = [trial for trial in logged.result.trials if trial.time_cost is not None]
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (trial.number, trial.time_cost, int(1000 * trial.started)) for trial in timed
    ]


def test_a_trial_ends_after_what_was_measured_in_it_and_no_run_ends_when_it_is_logged(logged, later):
    for number, run in logged.children.items():
        measurement = logged.result.trials[number].measurement
        measured = sum(measurement.step_seconds) + sum(measurement.baseline_seconds)
        assert run.info.end_time - run.info.start_time >= int(1000 * measured)
    ends = [run.info.end_time for run in logged.family(later.name) if "autotune.trial" in run.data.tags]
    assert max(ends) == logged.study(later.name).info.end_time == int(2e12)


def test_a_refused_study_logs_nothing_and_changes_nothing_of_a_running_one(logged, later):
    run_dir = later
    parent = next(run for run in logged.family(later.name) if run.data.tags["autotune.kind"] == "study")
    logged.client.update_run(parent.info.run_id, status="RUNNING")
    before = len(logged.family(later.name))

    def refused(config: Config, runner: FakeRunner) -> str:
        with pytest.raises((LockedError, ConfigError)) as error:
            run_tracked(config, runner, run_dir, lambda event: None)
        assert logged.client.get_run(parent.info.run_id).info.status == "RUNNING"
        return str(error.value)

    with lock_run_dir(run_dir):
        assert "works here" in refused(logged.config, FakeRunner())
        with pytest.raises(LockedError, match="runs this study"):
            report.run(run_dir, pictures=None, log=True, json=False)
    assert "tune under another --name" in refused(
        logged.configured(workload="gpt2"), FakeRunner(graph=training_chain(12))
    )
    assert len(logged.family(later.name)) == before
    assert {experiment.name for experiment in logged.client.search_experiments()} == {
        "Default", logged.experiment.name,
    }  # fmt: skip


def test_the_studys_run_names_user_source_batch_load_and_headline(logged):
    tags = logged.parent.data.tags
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("autotune-training", "LOCAL")
    assert tags["mlflow.user"]
    assert tags.get("mlflow.source.git.commit") == tags.get("git.sha")
    assert tags["mlflow.note.content"].startswith("**")
    (batch,) = logged.client.get_run(logged.parent.info.run_id).inputs.dataset_inputs
    assert batch.dataset.name == "batch of resnet18()"
    assert json.loads(batch.dataset.profile)["bytes"] > 0
    load = logged.client.get_metric_history(logged.parent.info.run_id, "system/cpu_utilization_percentage")
    assert len(load) >= len(logged.result.trials)


def test_plan_report_and_all_trials_are_artifacts(logged):
    names = {artifact.path for artifact in logged.client.list_artifacts(logged.parent.info.run_id)}
    assert names >= {"plan.json", "report.html", "trials.jsonl", "trials.csv", "graph.json", "config.yaml"}
    assert (logged.directory / "runs" / "mlruns").is_dir()
    where = logged.client.download_artifacts(logged.parent.info.run_id, "trials.csv", str(logged.directory))
    assert len(Path(where).read_text().splitlines()) == 1 + len(logged.result.trials)


def test_the_message_names_the_experiment_the_command_that_shows_it_and_the_page(logged, monkeypatch):
    command = "mlflow ui --backend-store-uri sqlite:///"
    page = f"#/experiments/{logged.experiment.experiment_id}/runs/{logged.parent.info.run_id}{MLFLOW_VIEW}"
    then = f", then http://127.0.0.1:5000/{page}"
    assert logged.message == f"{logged.experiment.name}: {command}{logged.directory}/runs/mlflow.db{then}"
    monkeypatch.chdir(logged.directory)
    near = Tracker(logged.config.model_copy(update={"runs": "runs"}), logged.run_dir)
    logged.tune(near)
    assert near.finish() == f"{logged.experiment.name}: {command}runs/mlflow.db{then}"


def test_the_message_is_the_address_of_the_run_where_there_is_a_server(logged, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@tracking.example/")
    tracker = Tracker(logged.config, logged.run_dir)
    log = logged.tracker._study_run()
    log.catch_up(logged.result.trials)
    page = f"#/experiments/{logged.experiment.experiment_id}/runs/{logged.parent.info.run_id}{MLFLOW_VIEW}"
    assert tracker._address(log) == f"https://me:***@tracking.example/{page}"


def test_every_figure_of_a_trials_row_is_a_metric_of_its_run(logged):
    children = logged.children
    rows = [row for row in tables.trial_rows(logged.result.trials) if row.trial.number in children]
    assert len(rows) > 3
    for row in rows:
        metrics = children[row.trial.number].data.metrics
        cells = dict(zip(tables.COLUMNS, row.cells, strict=True))
        predicted = f"~{mib(metrics['estimate_peak_bytes'])}" if "estimate_peak_bytes" in metrics else "-"
        seconds, ratio = metrics.get("step_seconds"), metrics.get("time_ratio")
        assert cells["peak MiB"] == (mib(metrics["step_peak_bytes"]) if "step_peak_bytes" in metrics else predicted)
        assert cells["charged MiB"] == mib(metrics.get("step_charged_bytes"))
        assert cells["step ms"] == ("-" if seconds is None else f"{1e3 * seconds:.1f}")
        assert cells["ratio"] == ("-" if ratio is None else f"{ratio:.3f}")


def test_budget_floor_and_proofs_are_metrics_of_the_parent(logged):
    metrics = logged.parent.data.metrics
    assert metrics["budget_bytes"] == logged.result.budget_bytes
    assert metrics["floor_bytes"] == logged.result.floor_bytes
    best = logged.result.best.estimate
    for name in ("lower_bound_bytes", "lower_bound_seconds", "recompute_seconds", "stall_seconds", "layout_bytes"):
        assert metrics[f"best_estimate_{name}"] == getattr(best, name)


def test_the_plans_of_a_front_are_logged_with_its_table_and_each_plan_has_its_status(logged, monkeypatch):
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)
    runs = logged.directory / "runs"
    config = front_config(logged.directory, runs=str(runs), trials=6)
    tracker = Tracker(config, runs / "front")
    result = tune(config, front_runner(), runs / "front", progress=tracker)
    message = tracker.finish()
    assert "not logged" not in message
    client = logged.client
    assert tracker.uri == logged.tracker.uri
    found = logged.family("front", budget="110%")
    (parent,) = [run for run in found if run.data.tags["autotune.kind"] == "study"]
    assert parent.data.metrics["front_points"] == len(result.front) > 0
    names = {file.path for file in client.list_artifacts(parent.info.run_id, "front")}
    assert names == {f"front/{name}" for name in ("table.json", "table.csv")} | {
        f"front/{path.name}" for path in result.front_paths
    }
    verdicts = {
        int(run.data.tags["autotune.trial"]): run.data.tags.get("autotune.verdict") for run in found if run != parent
    }
    for point in result.front_plans:
        assert verdicts[point.trial.number] == point.status


def test_the_same_report_is_made_of_what_mlflow_holds_alone(logged, tmp_path):
    run_dir = logged.directory / "runs" / "whole"
    config = logged.config.model_copy(update={"trials": 4})
    tracker = Tracker(config, run_dir)
    tune(config, FakeRunner(store=True), run_dir, progress=tracker, write_report=write_report)
    line = tracker.finish()
    match = re.search(r"/runs/(\w+)\?workflowType=machine_learning$", line)
    assert match is not None, line
    run = match[1]
    page = (run_dir / "report.html").read_text()
    assert "<h1>The step fits in" in page
    shutil.rmtree(run_dir)
    copy = tmp_path / "whole"
    copy.mkdir()
    for artifact in logged.client.list_artifacts(run):
        logged.client.download_artifacts(run, artifact.path, str(copy))
    assert (copy / "report.html").read_text() == page
    (copy / "report.html").unlink()
    assert write_report(copy).read_text() == page


def test_runs_can_be_moved_and_everything_is_found_in_the_new_place(logged, tmp_path, monkeypatch):
    runs = tmp_path / "moved" / "kept"
    shutil.copytree(logged.directory / "runs", runs)
    (runs / "mlruns" / logged.parent.info.run_id / "artifacts" / "trials.csv").write_text("the moved one")
    left = {path: path.stat().st_mtime_ns for path in (logged.directory / "runs").rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "moved/kept/first"])
    assert not ended.value.code
    client = open_client(f"sqlite:///{runs}/mlflow.db")
    copied = client.search_runs([logged.experiment.experiment_id])
    assert {run.info.run_id for run in logged.runs()} <= {run.info.run_id for run in copied}
    assert all(run.info.artifact_uri == f"{runs.as_uri()}/mlruns/{run.info.run_id}/artifacts" for run in copied)
    parent = logged.parent.info.run_id
    assert Path(client.download_artifacts(parent, "trials.csv", str(tmp_path))).read_text() == "the moved one"
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{runs}/first/optuna.db")
    assert len(study.trials) == len(logged.result.trials)

    gone_on: list[Config] = []
    monkeypatch.setattr("autotune.cli.commands.tune.run_study", lambda config, where, progress: gone_on.append(config))
    with pytest.raises(SystemExit):
        cli.main(["resume", "moved/kept/first"])
    from mlflow.tracking._tracking_service.utils import _artifact_repos_cache as artifact_cache

    artifact_cache.clear()  # as in another process: this one remembers where it wrote for each run
    tracker = Tracker(gone_on[0], Path("moved/kept/first"))
    logged.tune(tracker, Path("moved/kept/first"), gone_on[0])
    assert "--backend-store-uri sqlite:///moved/kept/mlflow.db" in tracker.finish()
    assert len(client.search_runs([logged.experiment.experiment_id])) == len(copied)
    assert Path(client.download_artifacts(parent, "trials.csv", str(tmp_path))).read_text() != "the moved one"
    assert {path: path.stat().st_mtime_ns for path in (logged.directory / "runs").rglob("*") if path.is_file()} == left


def test_a_study_whose_paths_have_quotes_and_characters_of_an_address_is_logged_once(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = tmp_path / "50%41 it's what?"
    config, run_dir = configured(directory, runs=str(directory / "runs"), trials=3), directory / "runs" / "it's mine"
    tune(config, FakeRunner(), run_dir)
    for _ in range(2):
        tracker = Tracker(config, run_dir)
        assert "mlflow ui --backend-store-uri" in tracker.finish(), tracker.problem
        client = open_client(tracker.uri)
        experiment = client.get_experiment_by_name(experiment_name("resnet18", DEVICE.key))
        runs = client.search_runs([experiment.experiment_id], "tags.`autotune.kind` = 'study'")
        assert [run.data.tags["autotune.run"].partition(".")[0] for run in runs] == ["it's mine"]
    assert (directory / "runs" / "mlflow.db").is_file()
    assert (directory / "runs" / "mlruns" / runs[0].info.run_id / "artifacts" / "trials.csv").is_file()
    assert list(tmp_path.iterdir()) == [directory], "no other directory"


def test_logging_again_adds_nothing_and_a_lost_child_is_added(logged):
    before = sorted(run.info.run_id for run in logged.runs())
    again = Tracker(logged.config, logged.run_dir)
    assert logged.tune(again).trials == logged.result.trials
    assert again.finish() == logged.message
    assert sorted(run.info.run_id for run in logged.runs()) == before
    lost = logged.children[1]
    logged.client.delete_run(lost.info.run_id)
    cut_short = logged.children[0]
    logged.client.update_run(cut_short.info.run_id, status="RUNNING")
    again = Tracker(logged.config, logged.run_dir)
    logged.tune(again)
    again.finish()
    assert len(logged.runs()) == len(before)
    assert logged.children[1].data.metrics == lost.data.metrics
    assert logged.children[0].info.status == "FINISHED"


def test_a_run_of_the_users_below_a_study_that_is_logged_again_stays(logged):
    parent = logged.parent.info.run_id
    other = logged.client.create_run(logged.experiment.experiment_id, tags={"mlflow.parentRunId": parent}).info.run_id
    try:
        Tracker(logged.config, logged.run_dir).finish()
        run = logged.client.get_run(other).info
        assert (run.lifecycle_stage, run.status) == ("active", "RUNNING")
    finally:
        logged.client.delete_run(other)


def test_only_the_children_whose_rank_changed_get_the_tag_of_the_best_trial_again(logged, monkeypatch):
    from mlflow import MlflowClient

    set_tag, keys = MlflowClient.set_tag, []

    def record(client: MlflowClient, run: str, key: str, value: object) -> None:
        keys.append(key)
        set_tag(client, run, key, value)

    summary = logged.run_dir / "study.json"
    study = json.loads(summary.read_text())
    Tracker(logged.config, logged.run_dir).finish()
    monkeypatch.setattr(MlflowClient, "set_tag", record)
    counts = []
    for best in (study["best"], None, study["best"]):
        summary.write_text(json.dumps({**study, "best": best}))
        keys.clear()
        Tracker(logged.config, logged.run_dir).finish()
        counts.append(keys.count("autotune.best"))
    assert counts == [0, 1, 1]


def test_a_slow_store_gets_the_trials_when_the_search_ends_and_what_it_has_no_time_for_later(
    logged, monkeypatch, capfd
):
    run_dir = logged.run_dir.parent / "slow"
    with monkeypatch.context() as patch:
        patch.setattr("autotune.report.mlflow_log.GRACE_SECONDS", 0.0)
        patch.setattr("autotune.report.mlflow_log.SHARE", 0.0)
        patch.setattr("autotune.report.tracking.allowance.TimeAllowance.elapsed", 0.0)
        tracker = Tracker(logged.config, run_dir)
        count = len(logged.tune(tracker, run_dir).trials)
        assert tracker._log is None, "no request while the search runs"
        assert capfd.readouterr().err.count("answers slowly") == 1
        assert f"{count} of {count} trials are left" in tracker.finish()
    assert logged.study("slow").info.status == "RUNNING"
    assert Tracker(logged.config, run_dir).finish().startswith(f"{logged.experiment.name}: ")
    assert len(logged.family("slow")) == 1 + count
    assert logged.study("slow").info.status == "FINISHED"


def test_what_is_logged_anew_is_what_is_shown_also_where_it_is_less(logged):
    study, table = (json.loads((logged.run_dir / name).read_text()) for name in ("study.json", "confirmed.json"))
    plan = next(plan for plan in table if plan["rounds"])

    def shown(study: Any, table: Any) -> tuple[float, float]:
        (logged.run_dir / "study.json").write_text(json.dumps(study))
        (logged.run_dir / "confirmed.json").write_text(json.dumps(table))
        Tracker(logged.config, logged.run_dir).finish()
        rounds = logged.children[plan["trial"]].data.metrics["confirmed_rounds"]
        return logged.parent.data.metrics["best_charged_bytes"], rounds

    smallest = logged.result.trials[1]
    less = shown({**study, "best": smallest.number}, [{**entry, "rounds": 0} for entry in table])
    assert less == (smallest.measurement.charged_bytes, 0)
    assert shown(study, table) == (logged.result.best.measurement.charged_bytes, plan["rounds"])


def test_a_study_whose_winner_was_withdrawn_names_no_best_trial(logged):
    summary = logged.run_dir / "study.json"
    study = json.loads(summary.read_text())
    named = []
    for best in (None, study["best"]):
        summary.write_text(json.dumps({**study, "best": best}))
        Tracker(logged.config, logged.run_dir).finish()
        named.append(logged.parent.data.tags.get(BEST_TRIAL))
    assert named == [None, str(study["best"])]


def test_artifacts_that_a_store_refuses_are_named_and_stored_later_and_all_else_is_logged(logged):
    run_dir = logged.run_dir.parent / "refused"
    tracker = Tracker(logged.config, run_dir)
    with pytest.MonkeyPatch.context() as patch:
        for method in ("log_artifact", "log_artifacts", "log_text"):
            patch.setattr(f"mlflow.MlflowClient.{method}", refuse)
        result = logged.tune(tracker, run_dir)
        message = tracker.finish()
    assert message.endswith("; artifacts are missing: no credentials for s3://results")
    runs = {run.data.tags.get("autotune.trial", "study"): run for run in logged.family(run_dir.name)}
    seconds = {str(trial.number): trial.measurement.median_seconds for trial in result.trials}
    assert {name: run.data.metrics.get("step_seconds") for name, run in runs.items() if name != "study"} == seconds
    assert {run.info.status for run in runs.values()} <= {"FINISHED", "FAILED"}
    incomplete = {name: run.data.tags[INCOMPLETE] for name, run in runs.items() if INCOMPLETE in run.data.tags}
    assert set(incomplete) >= {"study", *(str(trial.number) for trial in result.trials if trial.plan is not None)}
    assert set(incomplete.values()) == {"no credentials for s3://results"}

    assert "artifacts are missing" not in Tracker(logged.config, run_dir).finish()
    assert not any(INCOMPLETE in run.data.tags for run in logged.family(run_dir.name))
    for name, files in ((str(result.best.number), {"plan.json", "memory.svg"}), ("study", {"trials.csv"})):
        assert {file.path for file in logged.client.list_artifacts(runs[name].info.run_id)} >= files


def test_a_study_whose_run_was_created_without_params_gets_them_later(logged):
    run_dir = logged.run_dir.parent / "begun"
    tune(logged.config, FakeRunner(), run_dir, lasting=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlflow.MlflowClient.log_batch", refuse)
        assert Tracker(logged.config, run_dir).finish().startswith("not logged to ")
    assert "budget" not in logged.study(run_dir.name).data.params
    Tracker(logged.config, run_dir).finish()
    study = logged.study(run_dir.name)
    assert study.data.params["budget"] == "65%"
    assert len(study.inputs.dataset_inputs) == 1


def test_a_workload_with_long_arguments_is_logged(logged):
    run_dir, config = logged.run_dir.parent / "long", logged.configured(arguments={"note": MAX_NAME * "x"})
    tune(config, FakeRunner(), run_dir, lasting=False)
    assert Tracker(config, run_dir).finish().startswith(f"{logged.experiment.name}: ")
    (batch,) = logged.study(run_dir.name).inputs.dataset_inputs
    assert batch.dataset.name == f"batch of {config.ref}"[:MAX_NAME]


def test_a_trial_with_a_long_text_or_a_nul_in_it_has_tags_that_every_store_takes(logged):
    class Verbose(FakeRunner):
        def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
            result = super().measure(plan, budget_bytes=budget_bytes, beat=beat)
            return replace(result, verified=f"\0{2 * MAX_TAG * 'x'}")

    run_dir = logged.run_dir.parent / "verbose"
    tune(logged.config, Verbose(), run_dir, lasting=False)
    assert Tracker(logged.config, run_dir).finish().startswith(f"{logged.experiment.name}: ")
    values = [value for run in logged.family(run_dir.name) for value in run.data.tags.values()]
    assert max(map(len, values)) == MAX_TAG
    assert not any("\0" in value for value in values)


def test_a_study_whose_experiment_was_deleted_is_logged_to_the_next_number(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, run_dir = configured(tmp_path, runs=str(tmp_path), trials=3), tmp_path / "run"
    result = tune(config, FakeRunner(), run_dir, lasting=False)
    names = []
    for _ in range(3):
        tracker = Tracker(config, run_dir)
        names.append(tracker.finish().partition(": ")[0])
        client = open_client(tracker.uri)
        experiment = client.get_experiment_by_name(names[-1])
        assert len(client.search_runs([experiment.experiment_id])) == 1 + len(result.trials)
        client.delete_experiment(experiment.experiment_id)
    name = experiment_name("resnet18", DEVICE.key)
    assert names == [name, f"{name}.2", f"{name}.3"]


def test_baseline_seconds_of_an_even_number_of_samples_lie_between_the_middle_two():
    measurement = Measurement(Outcome.OK, step_seconds=(1.0,), baseline_seconds=(4.0, 1.0, 3.0, 2.0))
    assert (
        trial_metrics(Trial(1, TrialKind.SEARCH, "w", "d", {}, Plan((1,)), measurement=measurement))["baseline_seconds"]
        == 2.5
    )


def test_an_interrupted_study_is_killed_until_it_is_gone_on_with(logged):
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    tracker.finish(interrupted=2)
    assert logged.parent.info.status == "KILLED"
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    assert tracker.finish() == logged.message
    assert logged.parent.info.status == "FINISHED"


def test_a_study_that_is_killed_is_logged_with_the_winner_of_its_records_and_as_killed(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    killed = Logged(tmp_path)
    (killed.run_dir / "study.json").unlink()
    (killed.run_dir / "lock").unlink()  # this process lives
    os.utime(killed.run_dir / "trials.jsonl", (2e9, 2e9))
    log_again(killed.run_dir, pictures=None, log=True, json=False)
    assert killed.parent.info.status == "KILLED"
    assert killed.parent.info.end_time == 2e12
    assert killed.parent.data.tags["autotune.best_trial"] == str(killed.result.best.number)
    assert killed.parent.data.metrics["best_charged_bytes"] == killed.result.best.measurement.charged_bytes
    assert "budget_bytes" in killed.parent.data.metrics


def test_a_study_that_an_error_ends_is_logged_as_killed(logged):
    def lose(runner: FakeRunner) -> None:
        if len(runner.measured) == 2:
            raise DeviceLostError("no device is left; start one")

    run_dir = logged.run_dir.parent / "lost"
    with pytest.raises(DeviceLostError, match="no device is left"):
        run_tracked(logged.config, FakeRunner(before_measure=lose), run_dir, lambda event: None)
    assert json.loads((run_dir / "study.json").read_text())["interrupted"] is None
    assert logged.study(run_dir.name).info.status == "KILLED"


def test_a_session_that_is_killed_after_one_that_ended_is_not_taken_for_the_first(logged, tmp_path):
    trials = load_trials(logged.run_dir / "trials.jsonl")
    assert read_session_end(logged.run_dir, len(trials))["interrupted"] == 0
    assert read_session_end(logged.run_dir, len(trials) + 1) == {}


def test_a_run_is_logged_under_its_own_name_from_within_and_through_a_link(logged, monkeypatch):
    before = len(logged.client.search_runs([logged.experiment.experiment_id]))
    (logged.run_dir.parent / "last").symlink_to("first")
    monkeypatch.chdir(logged.run_dir)
    for path in (Path(), logged.run_dir.parent / "last"):
        log_again(path, pictures=None, log=True, json=False)
    (logged.run_dir.parent / "last").unlink()
    assert len(logged.client.search_runs([logged.experiment.experiment_id])) == before


def test_two_directories_that_share_a_database_keep_their_artifacts_apart(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    places = []
    for name in ("a", "b"):
        runs = tmp_path / name / "runs"
        config = configured(tmp_path / name, runs=str(runs), trials=3, tracking_uri=uri)
        for _ in range(2):
            tracker = Tracker(config, runs / "first")
            tune(config, FakeRunner(), runs / "first", progress=tracker)
            assert "mlflow ui" in tracker.finish(), tracker.problem
        places.append(
            {path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("trials.csv") if "artifacts" in path.parts}
        )
    assert places == [{"a"}, {"a", "b"}]
    assert len(open_client(uri).search_experiments(filter_string="name LIKE 'autotune.%'")) == 2


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_directory_whose_store_others_use_leaves_their_artifacts_in_their_places(order, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "a" / "runs").mkdir(parents=True)
    uri = f"sqlite:///{tmp_path / 'a' / 'runs' / 'mlflow.db'}"
    for name in order:
        runs = tmp_path / name / "runs"
        config = configured(tmp_path / name, runs=str(runs), trials=3, tracking_uri=uri if name == "b" else None)
        tune(config, FakeRunner(), runs / "first", progress=(tracker := Tracker(config, runs / "first")))
        assert "mlflow ui" in tracker.finish(), tracker.problem
    relocate_artifacts(tmp_path / "a" / "runs")
    found = open_client(uri).search_experiments(filter_string="name LIKE 'autotune.%'")
    places = {experiment.artifact_location for experiment in found}
    assert places == {(tmp_path / name / "runs" / "mlruns").as_uri() for name in ("a", "b")}


def test_standard_output_stays_clean(logged, capfd):
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    tracker.finish()
    assert capfd.readouterr().out == ""


def test_without_a_server_the_study_goes_on_says_so_at_once_and_once_more_at_the_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    config = configured(tmp_path, trials=3)
    tracker = Tracker(config, tmp_path / "run")
    result = tune(config, FakeRunner(), tmp_path / "run", progress=tracker, lasting=False)
    assert result.best is not None
    warnings = [line for line in capfd.readouterr().err.splitlines() if "not logged to http://127.0.0.1:9: " in line]
    assert len(warnings) == 1
    assert warnings[0].endswith("The search continues; logging is retried when it ends")
    message = tracker.finish()
    assert message.startswith("not logged to http://127.0.0.1:9: ")
    assert "\n" not in message
    assert f"autotune report {tmp_path / 'run'} --log" in message


def test_the_command_that_logs_a_study_later_is_quoted_for_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    config, run_dir = configured(tmp_path, trials=3), tmp_path / "my run"
    tune(config, FakeRunner(), run_dir, lasting=False)
    assert Tracker(config, run_dir).finish().endswith(f". autotune report '{run_dir}' --log logs it later")


def test_what_a_server_missed_is_delivered_when_it_is_back(logged, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    for name, deliver in (("early", False), ("late", True)):
        config = configured(tmp_path, trials=3, runs=str(tmp_path))
        tracker = Tracker(config, tmp_path / name)
        result = tune(config, FakeRunner(), tmp_path / name, progress=tracker, lasting=False)
        assert tracker.problem
        if deliver:
            assert "--log" in tracker.finish()
            with pytest.raises(SystemExit) as still_down:
                cli.main(["report", str(tmp_path / name), "--log"])
            assert still_down.value.code == 2
            monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.tracker.uri)
            with pytest.raises(SystemExit) as ended:
                cli.main(["report", str(tmp_path / name), "--log"])
            assert not ended.value.code
        else:
            tracker.uri = logged.tracker.uri  # as if it had come back before the end
            tracker.finish()
        family = logged.family(name)
        assert len(family) == 1 + len(result.trials)
        assert {run.info.status for run in family} == {"FINISHED"}


def test_a_database_that_is_gone_costs_seconds_and_its_password_is_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg://me:secret@127.0.0.1:9/runs")
    config = configured(tmp_path, trials=3)
    tracker = Tracker(config, tmp_path / "run")
    tune(config, FakeRunner(), tmp_path / "run", progress=tracker, lasting=False)
    message = tracker.finish()
    assert message.startswith("not logged to postgresql+psycopg://me:***@127.0.0.1:9/runs: ")
    assert "refused" in message


def test_an_address_that_cannot_be_opened_ends_no_study(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mysql+nosuchdriver://127.0.0.1/runs")
    config = configured(tmp_path, trials=3)
    tracker = Tracker(config, tmp_path / "run")
    assert tune(config, FakeRunner(), tmp_path / "run", progress=tracker, lasting=False).best is not None
    assert tracker.finish().startswith("not logged to mysql+nosuchdriver://127.0.0.1/runs: ")


def test_the_configs_address_comes_before_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    config = configured(tmp_path, tracking_uri="postgresql://me@server/runs")
    assert Tracker(config, tmp_path / "run").uri == "postgresql://me@server/runs"


def test_an_address_with_a_password_is_refused_where_it_would_be_logged(tmp_path):
    with pytest.raises(
        ConfigError, match="contains a password, and configs are logged; leave it out and set PGPASSWORD"
    ):
        configured(tmp_path, tracking_uri="postgresql://me:secret@server/runs")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(
    command: list[str], port: int, end: signal.Signals = signal.SIGTERM, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers on its port, ended with everything that it started."""
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0, **options)
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
            time.sleep(0.2)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, end)
        server.wait(30)


@contextmanager
def mlflow_server(store: str, artifacts: Path, port: int) -> Iterator[str]:
    command = [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--artifacts-destination", str(artifacts),
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    with started(command, port, env={**os.environ, **ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}):
        yield f"http://127.0.0.1:{port}"


def tuned(directory: Path, name: str, uri: str) -> tuple[StudyResult, str]:
    config = configured(directory, runs=str(directory), trials=5, tracking_uri=uri)
    tracker = Tracker(config, directory / name)
    result = tune(config, FakeRunner(), directory / name, progress=tracker, write_report=write_report)
    return result, tracker.finish()


def logged_well(client: "MlflowClient", result: StudyResult, run: str, page: str, into: Path) -> None:
    parent = client.get_run(run)
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run}'")
    assert len(children) == len(result.trials)
    assert parent.data.metrics["best_charged_bytes"] == result.best.measurement.charged_bytes
    into.mkdir()
    assert Path(client.download_artifacts(run, "report.html", str(into))).read_text() == page


@pytest.mark.slow
def test_a_server_holds_the_run_its_address_shows_it_and_what_it_missed_is_delivered(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    port = free_port()
    store, artifacts = f"sqlite:///{tmp_path}/server.db", tmp_path / "artifacts"
    with mlflow_server(store, artifacts, port) as uri:
        result, message = tuned(tmp_path, "first", uri)
        run = re.search(rf": {uri}/#/experiments/\d+/runs/(\w+)\?workflowType=machine_learning$", message)[1]
        page = (tmp_path / "first" / "report.html").read_text()
        logged_well(open_client(uri), result, run, page, tmp_path / "got")
        if browser := shutil.which("chromium"):
            command = [browser, "--headless", "--no-sandbox", "--virtual-time-budget=20000", "--dump-dom"]
            shown = subprocess.run([*command, message.split(": ", 1)[1]], capture_output=True, text=True, check=True)
            assert "first 65%" in shown.stdout
    result, message = tuned(tmp_path, "second", uri)
    assert message.startswith(f"not logged to {uri}: ")
    with mlflow_server(store, artifacts, port), pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / "second"), "--log"])
    assert not ended.value.code
    client = open_client(store)
    runs = client.search_runs([client.get_experiment_by_name(experiment_name("resnet18", DEVICE.key)).experiment_id])
    (parent,) = (run for run in runs if run.info.run_name == "second 65%")
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == len(result.trials)


@pytest.mark.slow
@pytest.mark.skipif(find_programs() is None, reason=ABSENT)
def test_a_study_is_logged_to_postgresql_by_its_address_alone(tmp_path, monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    port = free_port()
    binaries = find_programs()
    as_user: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}  # it refuses root
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory)
        if as_user:
            shutil.chown(data, **as_user)
        make = [binaries / "initdb", "-D", data / "db", "-U", "me", "--auth=trust"]
        subprocess.run(make, check=True, capture_output=True, cwd=directory, **as_user)
        serve = [str(binaries / "postgres"), "-D", f"{data}/db", "-k", directory, "-h", "127.0.0.1", "-p", str(port)]
        # at SIGTERM it would wait for its clients, and we are one
        with started(serve, port, signal.SIGINT, cwd=directory, **as_user):
            uri = f"postgresql+psycopg://me@127.0.0.1:{port}/postgres"
            result, message = tuned(tmp_path, "first", uri)
            run = re.search(
                rf"--backend-store-uri {re.escape(uri)}, then http\S+/runs/(\w+)\?workflowType=machine_learning$",
                message,
            )[1]
            page = (tmp_path / "first" / "report.html").read_text()
            logged_well(open_client(uri), result, run, page, tmp_path / "got")


def test_a_run_that_never_got_a_trial_is_not_logged(tmp_path):
    assert Tracker(configured(tmp_path), tmp_path / "run").finish() == ""
