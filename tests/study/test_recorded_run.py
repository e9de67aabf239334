"""Records of a run: figures of a report are those that the study judged its plans with."""

from pathlib import Path

from autotune.records.config import Config, dump_config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import RunDir, write_json
from autotune.records.trial import Trial, TrialKind, append_trial
from autotune.study.recorded_run import RecordedRun


def test_a_run_without_a_plan_has_the_budget_that_its_plans_were_judged_with(tmp_path: Path):
    """The idle process of the study takes 600 bytes, and that of the baseline's measurement 500."""
    files = RunDir(tmp_path)
    files.config.write_text(dump_config(Config(workload="w", budget="1000B")), encoding="utf-8")
    baseline = Measurement(Outcome.OK, peak_bytes=1500, charged_bytes=1600, floor_bytes=500)
    append_trial(files.trials, Trial(0, TrialKind.BASELINE, "w", "digest", measurement=baseline))
    assert RecordedRun.load(tmp_path).budget_step_bytes == 500
    write_json(files.study, {"trials": 1, "budget_bytes": 400, "floor_bytes": 600})
    assert RecordedRun.load(tmp_path).budget_step_bytes == 400
