"""What a study refuses or notes before it measures: the records of another device."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.api.launch import read_baseline
from autotune.errors import ConfigError
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.records.config import Config, load_config
from autotune.records.device import Device
from autotune.records.measurement import Measurement
from autotune.records.run_dir import RunDir
from autotune.records.trial import TrialKind, load_trials
from autotune.study.batch.records import BatchSearch, StepSize, write_batch_search
from autotune.study.events import Event, Logged
from autotune.study.preparation import _locate_seeds
from autotune.study.session import tune
from autotune.testing.fake_runner import DEVICE, FakeRunner
from autotune.testing.runner_contract import make_config

OTHER = replace(DEVICE, silicon="Fake 8000", cores=4)
UPGRADED = replace(DEVICE, torch="2.14.0", driver="Linux 7.0", memory_bytes=DEVICE.memory_bytes - 2**20)


@dataclass
class RunnerOn(FakeRunner):
    """Runner of a device."""

    device: Device = DEVICE

    def prepare(self) -> PreparedWorkload:
        return replace(super().prepare(), device=self.device)


def run(directory: Path, on: str | None, device: Device, trials: int = 5) -> None:
    config = make_config(directory, on=on, trials=trials, moves=False)
    tune(config, RunnerOn(device=device), directory / "run", lasting=False)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "a"), (None, "a"), ("a", None)])
def test_a_study_on_a_fleet_is_not_resumed_on_another_chip(tmp_path: Path, first: str | None, second: str | None):
    run(tmp_path, first, DEVICE)
    files = RunDir(tmp_path / "run")
    recorded = files.trials.read_bytes()
    baseline = json.loads(recorded.splitlines()[0])
    baseline["measurement"]["device"] = None  # as in records of earlier versions, where device.json names it
    for records in (recorded, json.dumps(baseline).encode() + b"\n"):
        files.trials.write_bytes(records)
        before = files.trials.read_bytes(), files.device.read_bytes()
        with pytest.raises(ConfigError) as caught:
            run(tmp_path, second, OTHER, trials=8)
        assert str(caught.value) == (
            f"{files.path}: its trials ran on Fake 9000 (2 cores), this device is Fake 8000 (4 cores); resume on the former, "
            f"or tune under another --name with --seed-from {files.path}"
        )
        assert (files.trials.read_bytes(), files.device.read_bytes()) == before


@pytest.mark.parametrize(
    ("first", "second", "device"),
    [("a", "a", UPGRADED), ("a", "b", DEVICE), (None, None, OTHER), (None, "a", UPGRADED)],
)
def test_an_upgraded_device_another_class_of_equal_ones_and_a_renamed_cpu_here_go_on(
    tmp_path: Path, first: str | None, second: str | None, device: Device
):
    run(tmp_path, first, DEVICE)
    files = RunDir(tmp_path / "run")
    before = files.trials.read_bytes()
    run(tmp_path, second, device, trials=8)
    assert files.trials.read_bytes().startswith(before)
    assert files.trials.read_bytes() != before


def test_a_study_that_goes_on_on_another_cpu_notes_it_and_its_plan_names_the_device_that_measured_it(tmp_path: Path):
    run(tmp_path, None, DEVICE)
    events: list[Event] = []
    config = make_config(tmp_path, trials=8, moves=False)
    result = tune(config, RunnerOn(device=OTHER), tmp_path / "run", progress=events.append, lasting=False)
    (note,) = (event for event in events if isinstance(event, Logged) and event.store == "device")
    assert "other settings: device: recorded Fake 9000, 2 cores, now Fake 8000, 4 cores;" in note.message
    assert result.plan is not None
    assert result.plan.device == DEVICE


def test_a_study_on_this_machine_is_not_resumed_on_another_gpu(tmp_path: Path):
    run(tmp_path, None, DEVICE, trials=2)
    trials = RunDir(tmp_path / "run").trials
    trials.write_text(trials.read_text().replace('"kind":"cpu"', '"kind":"cuda"'))
    with pytest.raises(ConfigError, match=r"ran on Fake 9000 \(2 cores\), this device is Fake 8000 \(4 cores\);"):
        run(tmp_path, None, replace(OTHER, kind="cuda"), trials=3)


def test_a_study_whose_plans_offload_is_not_resumed_on_a_class_without_their_store(tmp_path: Path):
    planners = {"recompute": ["keep"], "reorder": ["keep"], "order": ["traced"], "offload": ["window"]}
    options: dict[str, Any] = {"planners": planners, "budget": "80%", "trials": 2, "moves": False}
    config = make_config(tmp_path, on="a", stores={"ssd": "/a"}, **options)
    tune(config, RunnerOn(store=True), tmp_path / "run", lasting=False)
    with pytest.raises(ConfigError, match="plans offload to ssd, the stores of this device are none; resume"):
        tune(make_config(tmp_path, on="b", **options), RunnerOn(), tmp_path / "run", lasting=False)


def test_the_plan_of_a_measured_batch_size_is_a_seed_where_its_run_lies_now(tmp_path: Path):
    plans, before = RunDir(tmp_path / "now").batch_plans, RunDir(tmp_path / "before").batch_plans
    plans.mkdir(parents=True)
    (plans / "16x1.json").touch()
    assert _locate_seeds(str(before / "16x1.json"), tmp_path / "now") == plans / "16x1.json"
    assert _locate_seeds(str(before / "8x1.json"), tmp_path / "now") == before / "8x1.json"


def on_threads(count: int) -> Device:
    return replace(DEVICE, environment={"torch threads": str(count)})


def test_a_study_that_goes_on_with_other_threads_notes_them(tmp_path: Path):
    events: list[Event] = []
    for threads, trials in ((2, 2), (4, 3)):
        config = make_config(tmp_path, trials=trials, moves=False)
        tune(config, RunnerOn(device=on_threads(threads)), tmp_path / "run", progress=events.append, lasting=False)
    (note,) = (event for event in events if isinstance(event, Logged))
    assert note.store == "device"
    assert "the earlier trials ran with other settings: torch threads: recorded 2, now 4;" in note.message
    assert note.message.endswith(f"--seed-from {tmp_path / 'run'}")


def test_a_study_that_goes_on_with_another_meter_notes_it_once(tmp_path: Path):
    class OtherMeter(RunnerOn):
        def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
            return replace(super().measure(plan, budget_bytes=budget_bytes, beat=beat), meter="other")

    run(tmp_path, None, DEVICE, trials=3)
    events: list[Event] = []
    config = make_config(tmp_path, trials=6, moves=False)
    tune(config, OtherMeter(), tmp_path / "run", progress=events.append, lasting=False)
    (note,) = (event for event in events if isinstance(event, Logged))
    assert "were measured by other, those of earlier plans by fake;" in note.message


def test_the_baseline_keeps_the_device_that_measured_it(tmp_path: Path):
    run(tmp_path, None, on_threads(2), trials=2)
    run(tmp_path, None, on_threads(4), trials=3)
    baseline = load_trials(RunDir(tmp_path / "run").trials)[0].measurement
    assert baseline is not None
    assert baseline.device == on_threads(2)
    assert read_baseline(tmp_path / "run") == (baseline, on_threads(2))


@pytest.mark.parametrize(
    ("fitted", "message"),
    [
        (True, "plain eager fitted in memory, now it does not, .*; free memory, or tune under another --name"),
        (False, "plain eager did not fit in memory, now it does, .*; tune under another --name"),
    ],
)
def test_a_study_is_not_resumed_where_plain_eager_fits_no_more_or_only_now(tmp_path: Path, fitted: bool, message: str):
    def study(trials: int, *, fits: bool) -> None:
        tune(make_config(tmp_path, trials=trials), FakeRunner(baseline_fits=fits), tmp_path / "run", lasting=False)

    study(3, fits=fitted)
    before = RunDir(tmp_path / "run").trials.read_bytes()
    with pytest.raises(ConfigError, match=message):
        study(5, fits=not fitted)
    assert RunDir(tmp_path / "run").trials.read_bytes() == before
    study(5, fits=fitted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "pareto"}, "objective time, not pareto"),
        ({"loop": "clip"}, "loop none, not clip"),
        ({"limit": "900MiB"}, "limit none, not 900MiB"),
        ({"exact": True}, "exact False, not True"),
        ({"samples": 20}, "samples 10, not 20"),
        ({"seed": 3}, "seed 0, not 3"),
        ({"arguments": {"batch": 8}}, "arguments none, not {'batch': 8}"),
        ({"planners": {"order": ["traced"]}}, r"planners {.+}, not {'order': \['traced'\]}"),
    ],
)
def test_options_that_a_run_was_not_measured_with_are_refused_under_its_name(
    tmp_path: Path, change: dict[str, Any], message: str
):
    run(tmp_path, None, DEVICE, trials=2)
    with pytest.raises(ConfigError, match=f"contains a study for {message}; tune under another --name"):
        tune(make_config(tmp_path, **change), FakeRunner(), tmp_path / "run", lasting=False)


def recorded_config(tmp_path: Path) -> Config:
    return load_config(str(RunDir(tmp_path / "run").config))


def test_a_store_and_limits_given_with_the_name_of_a_run_are_recorded_and_those_of_resume_are_not(tmp_path: Path):
    def study(requested_time: str, **fields: Any) -> None:
        config, runner = make_config(tmp_path, **fields), FakeRunner(store="stores" in fields)
        tune(config, runner, tmp_path / "run", lasting=False, requested_time=requested_time)

    study("10m", trials=2)
    study("1h", trials=4, stores={"ssd": "disk"})
    asked = ({"ssd": "disk"}, 4, "1h")
    config = recorded_config(tmp_path)
    assert (config.stores, config.trials, config.time) == asked
    study("", trials=5, stores={"ssd": "disk"}, time="2m")
    config = recorded_config(tmp_path)
    assert (config.stores, config.trials, config.time) == asked
    message = "contains a study for stores {'ssd': 'disk'}, not {'ssd': 'other'}; tune under another --name"
    with pytest.raises(ConfigError, match=message):
        study("10m", trials=6, stores={"ssd": "other"})
    assert recorded_config(tmp_path) == config


@pytest.mark.parametrize("change", [{"stores": {"ssd": "/data"}}, {"limit": "900MiB"}])
def test_a_study_goes_on_under_another_class_of_equal_devices_with_its_own_limit_and_stores(
    tmp_path: Path, change: dict[str, Any]
):
    tune(make_config(tmp_path, on="a", trials=2, stores={"ssd": "/a"}), RunnerOn(), tmp_path / "run", lasting=False)
    config = make_config(tmp_path, on="b", trials=3, **{"stores": {"ssd": "/a"}, **change})
    assert len(tune(config, RunnerOn(), tmp_path / "run", lasting=False).trials) > 2


def test_a_run_records_the_time_that_was_asked_for_and_not_what_the_search_for_the_batch_size_left(tmp_path: Path):
    config = make_config(tmp_path, time="1h", trials=2)
    (tmp_path / "run").mkdir()
    search = BatchSearch("batch", config.model_dump(mode="json"), "batch", StepSize(8))
    write_batch_search(tmp_path / "run", search)
    tune(config.model_copy(update={"time": "431s"}), FakeRunner(), tmp_path / "run", lasting=False)
    assert recorded_config(tmp_path).time == "1h"


class RunnerBehindQueue(RunnerOn):
    """Runner of a device that others use for longer than the study's time."""

    def wait_for_device(self) -> None:
        time.sleep(1.2)

    def limit_waits(self, until: float) -> None:
        """Nothing is lost."""


def test_a_study_has_its_whole_time_from_the_devices_first_answer(tmp_path: Path):
    config = make_config(tmp_path, trials=2, time="1s")
    result = tune(config, RunnerBehindQueue(), tmp_path / "run", lasting=False)
    assert [trial.kind for trial in result.trials][:2] == [TrialKind.BASELINE, TrialKind.SMALLEST]
