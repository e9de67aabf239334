"""Records of a busy machine on the report's page and in MLflow."""

from dataclasses import replace

import pytest

from autotune.records.measurement import Measurement
from autotune.report.page_rows import prediction_rows, summarize_accuracy
from autotune.report.summary import list_run_facts
from autotune.report.tracking.fields import progress_metrics, trial_metrics
from autotune.study.recorded_run import RecordedRun
from autotune.study.session import tune
from autotune.testing.fake_runner import FakeRunner
from tests.study.test_session import configured


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    directory = tmp_path_factory.mktemp("busy")
    runner = FakeRunner(disturbed=lambda number: True)
    tune(configured(directory, trials=4), runner, directory / "run", lasting=False)
    return RecordedRun.load(directory / "run")


def test_the_page_states_how_many_measurements_were_disturbed(records: RecordedRun):
    facts = dict(list_run_facts(records))
    assert facts["disturbed by other work"].endswith("such as: other processes used 50 % of the CPUs")
    quiet = replace(records, trials=records.trials[:1])
    assert "disturbed by other work" not in dict(list_run_facts(quiet))


def test_a_disturbed_time_is_no_error_of_the_prediction(records: RecordedRun):
    assert {row[-1] for row in prediction_rows(records)} == {"disturbed"}
    assert "peak" in summarize_accuracy(records)
    assert "time" not in summarize_accuracy(records)


def test_mlflow_gets_seconds_under_no_ratios_name(records: RecordedRun):
    trial = records.trials[1]
    assert trial.measurement is not None
    assert progress_metrics(trial)["trial_time_ratio"] == trial.measurement.time_ratio
    without = replace(trial, measurement=replace(trial.measurement, baseline_seconds=()))
    assert progress_metrics(without)["trial_seconds"] == trial.measurement.median_seconds
    assert "trial_time_ratio" not in progress_metrics(without)


def test_mlflow_tags_a_disturbed_trial_and_counts_it(records: RecordedRun):
    trial = records.trials[1]
    assert isinstance(trial.measurement, Measurement)
    assert trial_metrics(trial)["disturbed"] == 1.0
    assert trial_metrics(replace(trial, measurement=replace(trial.measurement, disturbed="")))["disturbed"] == 0.0
