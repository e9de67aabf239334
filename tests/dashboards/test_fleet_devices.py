"""The fleet's page: what it says of a class is what the records say."""

from dataclasses import replace
from pathlib import Path

from autotune.records.trial import TrialKind
from autotune.study.recorded_run import RecordedRun
from autotune.study.runner import make_lost_measurement
from dashboards.fleet_devices import HEAD, class_rows, collect_classes
from tests.dashboards import sample_runs

NOW = 1e9


def on_class(run: RecordedRun, name: str, host: str, started: float, lost: tuple[str, ...] = ()) -> RecordedRun:
    trials = [
        replace(trial, started=started, measurement=replace(trial.measurement, node=host, lost_nodes=lost))
        for trial in run.trials
        if trial.measurement is not None
    ]
    return replace(run, config={**run.config, "on": name}, trials=tuple(trials))


def test_a_class_has_its_hosts_its_losses_and_its_active_studies(tmp_path: Path):
    run = RecordedRun.load(sample_runs.study(tmp_path, "one"))
    count = sum(trial.measurement is not None for trial in run.trials)
    studies = {
        "here": run,
        "old": on_class(run, "a100", "n6", NOW - 90_000, ("n5",)),
        "new": on_class(run, "a100", "n7", NOW - 60),
        "other": on_class(run, "l4", "n9", NOW - 60, ("n8",)),
    }
    first, second = collect_classes(studies, {"new": NOW - 600, "here": NOW}, NOW)
    assert (first.name, first.hosts, first.studies) == ("a100", ("n6", "n7"), 2)
    assert (first.trials, first.recent_trials, first.recent_losses) == (2 * count, count, ())
    assert first.active[0].startswith("new on n7 since ")
    assert (second.name, second.recent_losses, second.active) == ("l4", ("n8",) * count, ())
    assert [len(row) for row in class_rows([first, second])] == [len(HEAD)] * 2
    assert collect_classes({"here": run}, {}, NOW) == []


def test_a_plan_that_lost_its_devices_is_a_loss_and_a_repeat_is_no_measurement(tmp_path: Path):
    run = on_class(RecordedRun.load(sample_runs.study(tmp_path, "one")), "a100", "n7", NOW - 60, ("n5",))
    measured, repeat, lost = run.trials[:3]
    trials = (
        measured,
        replace(repeat, kind=TrialKind.REPEAT),
        replace(lost, measurement=make_lost_measurement(["n5", "n6"], None)),
    )
    (record,) = collect_classes({"one": replace(run, trials=trials)}, {}, NOW)
    assert (record.trials, record.recent_trials) == (1, 1)
    assert record.recent_losses == ("n5", "n5", "n6")
