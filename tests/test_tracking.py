"""A study in a real MLflow on SQLite: what is there, once, and what happens when it is not."""

from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from autotune.config import Config
from autotune.confirm import document
from autotune.measurement import Measurement, Outcome
from autotune.plan import Plan
from autotune.study import Result, tune
from autotune.tracking import Tracker, experiment_name, notable, tracking_uri
from autotune.trial import Trial
from tests.fake_runner import DEVICE, FakeRunner
from tests.test_study import configured


class Logged:
    """One tuned and logged study, and MLflow's view of it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run_dir = directory, directory / "runs" / "first"
        self.config = self.configured()
        self.tracker = Tracker(self.config, self.run_dir)
        self.result = self.tune(self.tracker)
        self.message = self.tracker.finish()
        self.client = MlflowClient(tracking_uri=self.tracker.uri)
        self.experiment = self.client.get_experiment_by_name(experiment_name("resnet18", DEVICE.key))

    def configured(self, **fields: object) -> Config:
        return configured(self.directory, runs=str(self.directory / "runs"), trials=8, **fields)

    def tune(self, tracker: Tracker) -> Result:
        report = lambda run_dir: (run_dir / "report.html").write_text("<html>") and run_dir / "report.html"  # noqa: E731
        failing: list[Plan] = []

        def fail_second(plan: Plan) -> Outcome:
            failing.append(plan)
            return Outcome.CRASHED if [plan] == failing[1:2] else Outcome.OK

        return tune(
            self.config, FakeRunner(outcome_of=fail_second), self.run_dir, progress=tracker, write_report=report
        )

    def runs(self) -> list[Run]:
        return list(self.client.search_runs([self.experiment.experiment_id]))

    @property
    def parent(self) -> Run:
        return next(run for run in self.runs() if run.data.tags["autotune.kind"] == "study")

    @property
    def children(self) -> dict[int, Run]:
        return {int(run.data.tags["autotune.trial"]): run for run in self.runs() if "autotune.trial" in run.data.tags}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield Logged(tmp_path_factory.mktemp("logged"))
    patch.undo()


def test_experiment_stands_for_workload_and_device_without_a_slash(logged):
    assert logged.experiment.name == "autotune.resnet18.cpu-fake-9000-2"
    assert experiment_name("models/net.py:tiny", "cpu-x") == "autotune.models-net.py-tiny.cpu-x"


def test_what_is_said_of_a_logged_run_later_stands_on_its_parent(logged):
    logged.tracker.tag({"autotune.nightly.verdict": "regression"})
    tagged = [run for run in logged.runs() if run.data.tags.get("autotune.nightly.verdict") == "regression"]
    assert [run.info.run_id for run in tagged] == [logged.parent.info.run_id]


def test_every_notable_trial_is_one_child_of_one_parent(logged):
    children = logged.children
    assert set(children) == {trial.number for trial in notable(logged.result.trials)}
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
    told = document(logged.result.confirmed)
    assert "BEST" in [one["verdict"] for one in told]
    for one in told:
        run = logged.children[one["trial"]]
        assert run.data.tags["autotune.verdict"] == one["verdict"]
        assert run.data.metrics["confirmed_rounds"] == one["rounds"]
        for part in ("middle", "low", "high"):
            assert run.data.metrics[f"confirmed_step_seconds_{part}"] == one["step_seconds"][part]
            assert run.data.metrics[f"confirmed_time_ratio_{part}"] == one["time_ratio"][part]
    names = {found.path for found in logged.client.list_artifacts(logged.parent.info.run_id)}
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
    assert {"version.torch", "version.optuna", "version.mlflow", "version.autotune"} <= set(tags)
    assert logged.children[logged.result.best.number].data.tags["autotune.best"] == "true"
    assert sum(run.data.tags["autotune.best"] == "true" for run in logged.children.values()) == 1


def test_plan_report_and_all_trials_are_artifacts(logged):
    names = {found.path for found in logged.client.list_artifacts(logged.parent.info.run_id)}
    assert names >= {"plan.json", "report.html", "trials.jsonl", "trials.csv", "graph.json", "config.yaml"}
    assert (logged.directory / "runs" / "mlruns").is_dir()
    where = logged.client.download_artifacts(logged.parent.info.run_id, "trials.csv", str(logged.directory))
    assert len(Path(where).read_text().splitlines()) == 1 + len(logged.result.trials)


def test_the_message_names_the_experiment_and_the_command_that_shows_it(logged, monkeypatch):
    command = "mlflow ui --backend-store-uri sqlite:///"
    assert logged.message == f"{logged.experiment.name}: {command}{logged.directory}/runs/mlflow.db"
    monkeypatch.chdir(logged.directory)
    near = Tracker(logged.config.model_copy(update={"runs": "runs"}), logged.run_dir)
    logged.tune(near)
    assert near.finish() == f"{logged.experiment.name}: {command}runs/mlflow.db"


def test_the_message_is_an_address_where_there_is_a_server(logged, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example/")
    tracker = Tracker(logged.config, logged.run_dir)
    assert tracker._where(logged.tracker._logged()) == (
        f"https://tracking.example/#/experiments/{logged.experiment.experiment_id}"
    )


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


def test_an_interrupted_study_is_killed_until_it_is_gone_on_with(logged):
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    tracker.finish(interrupted=2)
    assert logged.parent.info.status == "KILLED"
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    assert tracker.finish() == logged.message
    assert logged.parent.info.status == "FINISHED"


def test_standard_output_stays_clean(logged, capfd):
    tracker = Tracker(logged.config, logged.run_dir)
    logged.tune(tracker)
    tracker.finish()
    assert capfd.readouterr().out == ""


def test_without_a_server_the_study_goes_on_and_says_so_once_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    config = configured(tmp_path, trials=3)
    tracker = Tracker(config, tmp_path / "run")
    result = tune(config, FakeRunner(), tmp_path / "run", progress=tracker)
    assert result.best is not None
    message = tracker.finish()
    assert message.startswith("not logged to http://127.0.0.1:9: ")
    assert "\n" not in message
    assert str(tmp_path / "run") in message


def test_the_users_server_comes_before_our_file(tmp_path, monkeypatch):
    config = configured(tmp_path, runs=str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(config) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri(config) == "http://tracker:5000"


def test_failures_are_notable_and_what_was_not_run_is_not():
    def trial(number: int, outcome: Outcome, ratio: float = 1.0, kind: str = "search") -> Trial:
        seen = Measurement(outcome, step_seconds=(ratio,), baseline_seconds=(1.0,))
        return Trial(number, kind, "w", "d", {}, Plan((number,)), measurement=seen)

    trials = [
        trial(0, Outcome.OK, 1.5),
        trial(1, Outcome.OK, 1.6),
        trial(2, Outcome.OUT_OF_MEMORY),
        trial(3, Outcome.OVER_BUDGET),
        trial(4, Outcome.OK, 1.2),
        trial(5, Outcome.OK, 1.1, kind="repeat"),
        trial(6, Outcome.OK, 1.3, kind="confirm"),
    ]
    assert [one.number for one in notable(trials)] == [0, 2, 4, 6]


def test_a_run_that_never_got_a_trial_is_not_logged(tmp_path):
    assert Tracker(configured(tmp_path), tmp_path / "run").finish() == ""
