"""One study on several devices of a class: far ends that are used at once, killed, and gone after a signal."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli import main as cli
from autotune.cli.commands.nightly import _share_devices
from autotune.fleet import ENGINES
from autotune.fleet.channel import Channel, Reach
from autotune.fleet.messages import DevicePromise, MeasureCall, OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.nightly.config import load_nightly_config
from autotune.records.measurement import Outcome
from autotune.records.trial import TrialKind, load_trials
from autotune.study.session import tune
from autotune.testing.fake_runner import DEVICE
from autotune.testing.runner_contract import make_config, wait_for_death
from tests.nightly.test_command import Tracker
from tests.support.waiting import wait_for

FAR_END = (sys.executable, "-m", "autotune.testing.fake_far_end")


def make_device(directory: Path, seconds: float, *, replaces_lost_device: bool) -> RemoteRunner:
    config = make_config(directory).model_dump(mode="json")
    request = OpenDevice(
        code_identity(), "fake", config, DevicePromise(name=DEVICE.silicon), {"FAKE_SECONDS": str(seconds)}
    )

    def open_channel(report: Callable[[str], None]) -> Channel:
        return ENGINES["command"](Reach("fake", directory, command=FAR_END), report)

    return RemoteRunner(open_channel, request, pause_seconds=0.05, replaces_lost_device=replaces_lost_device)


def make_pair(directory: Path, seconds: float) -> list[RemoteRunner]:
    return [make_device(directory, seconds, replaces_lost_device=not number) for number in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_far_end_killed_in_a_trial_of_the_parallel_search_costs_that_trial_alone(tmp_path: Path, victim: int):
    devices = make_pair(tmp_path, 0.3)
    runner, killed = devices[victim], list[int]()
    measure = runner.measure

    def measure_and_kill(*arguments: Any, **options: Any) -> Any:
        if not killed and runner.facts is not None and threading.current_thread() is not threading.main_thread():
            killed.append(runner.facts.pid)
            threading.Timer(0.1, os.kill, (runner.facts.pid, signal.SIGKILL)).start()
        return measure(*arguments, **options)

    wrapped = SimpleNamespace(
        measure=measure_and_kill, prepare=runner.prepare, baseline=runner.baseline, renew=runner.renew,
        close=runner.close, abort=runner.abort, reset=runner.reset,
    )  # fmt: skip
    parallel: list[Any] = [wrapped if runner is device else device for device in devices]
    tune(make_config(tmp_path, trials=14), devices[0], tmp_path / "run", devices=parallel)
    trials = load_trials(tmp_path / "run" / "trials.jsonl")
    assert (len(killed), runner.lost) == (1, 1)
    lost = [trial for trial in trials if trial.measurement and trial.measurement.lost_nodes]
    assert [trial.measurement.lost_nodes for trial in lost if trial.measurement] == [(os.uname().nodename,)]
    assert all(trial.was_run for trial in lost)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert all(device.facts is None for device in devices)


@pytest.mark.slow
def test_a_signal_ends_all_far_ends_and_the_study_is_resumed(tmp_path: Path):
    devices = make_pair(tmp_path, 0.5)
    pids: list[int] = []
    sent: list[float] = []

    def watch() -> None:
        wait_for(lambda: all(device.facts is not None for device in devices))
        time.sleep(0.3)
        pids.extend(device.facts.pid for device in devices if device.facts is not None)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    result = tune(make_config(tmp_path, trials=30), devices[0], tmp_path / "run", devices=devices)
    assert result.interrupted == signal.SIGTERM
    assert len(pids) == 2
    assert all(wait_for_death(pid, sent[0] + 3.0 - time.monotonic()) for pid in pids)
    devices = make_pair(tmp_path, 0.0)
    again = tune(make_config(tmp_path, trials=14), devices[0], tmp_path / "run", devices=devices)
    assert again.trials[: len(result.trials)] == tuple(sorted(result.trials, key=lambda trial: trial.number))


@pytest.mark.slow
def test_tune_uses_as_many_devices_as_are_asked_for_and_the_class_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    opened: list[Channel] = []
    measuring: list[int] = []
    most: list[int] = []
    open_command = ENGINES["command"]

    def open_channel(reach: Reach, report: Callable[[str], None]) -> Channel:
        channel = open_command(reach, report)
        ask = channel.ask

        def count(call: Any, report: Callable[[str], None]) -> Any:
            if isinstance(call, MeasureCall):
                measuring.append(1)
                most.append(len(measuring))
            try:
                return ask(call, report)
            finally:
                if isinstance(call, MeasureCall):
                    measuring.pop()

        monkeypatch.setattr(channel, "ask", count)
        opened.append(channel)
        return channel

    monkeypatch.setitem(ENGINES, "command", open_channel)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", Tracker)
    Path("study.yaml").write_text(
        "workload: resnet18\nbudget: 70%\ntrials: 12\n"
        "planners: {order: [traced], update: [at_end], recompute: [keep, segments], reorder: [keep]}\n"
    )
    Path("fleet.yaml").write_text(
        f"classes: {{pair: {{engine: command, command: [{', '.join(FAR_END)}], devices: 2, "
        "environment: {FAKE_SECONDS: '0.4'}}}\n"
    )

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(("tune", "study.yaml", *arguments))
        return int(ended.value.code or 0), capfd.readouterr().err

    code, err = call("--parallel", "2")
    assert code == 2
    assert "parallel 2: this machine is one device; add --fleet FILE --on CLASS" in err
    code, err = call("--fleet", "fleet.yaml", "--on", "pair", "--parallel", "3", "--name", "both")
    assert code == 0, err
    assert (len(opened), max(most)) == (2, 2)
    trials = load_trials(Path("runs/both/trials.jsonl"))
    assert {TrialKind.CONFIRM, TrialKind.SMALLEST} <= {trial.kind for trial in trials}
    assert all(trial.measurement and trial.measurement.outcome is not Outcome.CRASHED for trial in trials)


def test_an_entry_of_a_night_takes_no_device_of_another_one(tmp_path: Path):
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("classes: {pool: {devices: 5}, one: {devices: 1}}\n")
    night = tmp_path / "night.yaml"
    entries = "\n".join(
        f"  - {{workload: resnet18, name: e{number}, on: {name}, parallel: 4}}"
        for number, name in enumerate(["pool", "pool", "one"])
    )
    night.write_text(f"fleet: {fleet}\nentries:\n{entries}\n")
    assert [entry.parallel for entry in _share_devices(load_nightly_config(night).entries)] == [2, 2, 1]
