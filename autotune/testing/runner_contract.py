"""Run a runner of a fleet through the contract that every engine keeps, with a fake device at its far end.

Subclass `RunnerContract` in a test module and reach the fake far end by your engine; pytest collects its tests:

    class TestMyEngine(RunnerContract):
        def open_channel(self, directory, report):
            return MyChannel(opener=autotune.testing.fake_far_end.OPENER)
"""

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import DeviceLostError, DeviceRefusedError, PlanError
from autotune.fleet import messages
from autotune.fleet.channel import Channel
from autotune.fleet.messages import DevicePromise, OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.ir.plan import Plan
from autotune.records.config import Config, load_config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, load_trials
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.runner import Runner
from autotune.study.session import tune
from autotune.testing.fake_runner import DEVICE, FakeRunner

PLANNERS = {"recompute": ["keep", "segments"], "reorder": ["keep"], "order": ["traced", "list_by_bytes"]}
"""Planners that answer in milliseconds."""
SILENT_SECONDS = 8.0
"""Time that a far end without progress has to come up and to meet the lock of another session."""


def make_config(directory: Path, **fields: Any) -> Config:
    """Return the config of a short study in a directory."""
    overrides = {"trials": 5, "plans": str(directory / "plans"), "planners": PLANNERS, "runs": str(directory), **fields}
    return load_config("resnet18", overrides=overrides)


def run_study(directory: Path, runner: Runner, **fields: Any) -> list[Trial]:
    """Run a short study and return its trials as recorded."""
    tune(make_config(directory, **fields), runner, directory / "run", lasting=False)
    return load_trials(directory / "run" / "trials.jsonl")


def without_times(trial: Trial) -> Trial:
    """Return a trial without its start and the names of its hosts, which differ between two equal studies."""
    measurement = trial.measurement
    if measurement is not None:
        measurement = dataclasses.replace(measurement, node="", lost_nodes=())
    return dataclasses.replace(trial, started=0.0, measurement=measurement)


def wait_for_death(pid: int, seconds: float) -> bool:
    """Return whether a process has ended within so many seconds; a zombie has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class RunnerContract:
    """Tests of an engine; a subclass overrides `open_channel`."""

    is_in_this_process = False
    """True if the far end is this process, which therefore cannot be lost."""
    tells_of_waits = True
    """True if the far end reports that another session has the device."""

    def open_channel(self, directory: Path, report: Callable[[str], None]) -> Channel:
        """Open a channel whose far end opens `autotune.testing.fake_far_end.open_fake_device`."""
        raise NotImplementedError

    def make_runner(self, directory: Path, **options: Any) -> RemoteRunner:
        """Return a runner over the engine; options are `seconds` of a measurement, `locks`, `workload` and `promise`."""
        environment = {"FAKE_SECONDS": str(options.get("seconds", 0.0))}
        if "locks" in options:
            environment["FAKE_LOCKS"] = str(options["locks"])
        config = make_config(directory).model_dump(mode="json") | {"workload": options.get("workload", "resnet18")}
        promise = options.get("promise", DevicePromise(name=DEVICE.silicon))
        request = OpenDevice(code_identity(), "fake", config, promise, environment=environment)
        return RemoteRunner(lambda report: self.open_channel(directory, report), request, pause_seconds=0.05)

    def test_a_study_has_the_trials_of_a_study_on_this_machine(self, tmp_path: Path) -> None:
        local = run_study(tmp_path / "here", FakeRunner())
        remote = run_study(tmp_path / "there", self.make_runner(tmp_path))
        assert [without_times(trial) for trial in remote] == [without_times(trial) for trial in local]
        assert {trial.measurement.node for trial in remote if trial.measurement and trial.plan and trial.was_run} == {
            os.uname().nodename
        }

    def test_prints_of_user_code_disturb_no_message(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="prints")
        plan = Plan.traced(runner.prepare().graph)
        results = [runner.measure(plan, budget_bytes=10**9) for _ in range(3)]
        runner.close()
        assert [result.outcome for result in results] == [Outcome.OK] * 3

    def test_a_request_without_answer_has_no_effect_on_the_next(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, seconds=2.0)
        plan = Plan.traced(runner.prepare().graph)
        with pytest.raises(KeyboardInterrupt):
            _interrupt(0.05, lambda: runner.measure(plan, budget_bytes=1))
        runner.request = dataclasses.replace(runner.request, environment={"FAKE_SECONDS": "0"})
        first, second = FakeRunner(), runner.measure(plan, budget_bytes=10**9)
        runner.close()
        assert dataclasses.replace(second, node="") == first.measure(plan, budget_bytes=10**9)

    def test_a_signal_of_a_study_ends_a_measurement_with_all_its_processes(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="has a child", seconds=30.0)
        plan = Plan.traced(runner.prepare().graph)
        assert runner.facts is not None
        far_end = runner.facts.pid
        processes = [] if self.is_in_this_process else [far_end, *_find_children(far_end)]
        sent = time.monotonic() + 0.3
        with Interrupts() as interrupts, pytest.raises(Stopped), interrupts.breakable():
            _interrupt(0.3, lambda: runner.measure(plan, budget_bytes=10**9), signal.SIGTERM)
        assert time.monotonic() < sent + 2.0
        assert all(wait_for_death(pid, sent + 2.0 - time.monotonic()) for pid in processes)

    def test_an_error_keeps_its_class_and_names_the_host(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="raises PlanError")
        plan = Plan.traced(runner.prepare().graph)
        with pytest.raises(PlanError, match=f"^{os.uname().nodename}: "):
            runner.measure(plan, budget_bytes=1)
        runner.close()

    def test_conditions_are_those_of_the_far_end(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path)
        assert runner.conditions() == FakeRunner().conditions()
        runner.close()

    def test_close_and_renew_may_come_at_any_time_and_twice(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path)
        runner.close()
        runner.renew()
        runner.prepare()
        runner.renew()
        runner.renew()
        runner.close()
        runner.close()
        assert runner.baseline().outcome is Outcome.OK
        runner.close()

    def test_a_far_end_of_another_version_is_refused_by_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runner = self.make_runner(tmp_path)
        runner.request = dataclasses.replace(runner.request, code="0.0.1 (sources 00000000)")
        with pytest.raises(
            DeviceRefusedError, match=r"the study runs 0\.0\.1 \(sources 00000000\); install the same version"
        ):
            runner.prepare()
        # a request that this version cannot even read
        encode = messages.encode_message

        def other(message: Any) -> bytes:
            document = json.loads(encode(message))
            return json.dumps(document | {"fields": {"code": "9.9", "whatever": 1}}).encode()

        monkeypatch.setattr("autotune.fleet.command.encode_message", other)
        monkeypatch.setattr("autotune.fleet.local.encode_message", other)
        monkeypatch.setattr("autotune.fleet.ray.encode_message", other)
        with pytest.raises(DeviceRefusedError, match=r"the study runs 9\.9; install the same version on both"):
            runner.prepare()

    def test_a_device_that_breaks_its_promise_is_refused_by_name(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, promise=DevicePromise(name="A100"))
        with pytest.raises(DeviceRefusedError, match="of class fake is 'Fake 9000', the class promises 'A100'"):
            runner.prepare()
        runner.close()

    def test_two_sessions_on_one_device_run_one_after_the_other(self, tmp_path: Path) -> None:
        first, second = (self.make_runner(tmp_path, locks=tmp_path / "locks") for _ in range(2))
        first.prepare()
        events: list[str] = []

        def close_first() -> None:
            events.append("first closes")
            first.close()

        def start_closing(line: str) -> None:
            if "on which another study measures" in line:
                events.append("second waits")
                closing.start()

        # a far end that tells nothing has some seconds, in which it would get the device without a lock
        closing = threading.Timer(0.0 if self.tells_of_waits else SILENT_SECONDS, close_first)
        second.listen(start_closing)
        if not self.tells_of_waits:
            closing.start()
        second.prepare()
        events.append("second has the device")
        second.close()
        assert events[-2:] == ["first closes", "second has the device"]
        assert ("second waits" in events) == self.tells_of_waits
        closing.join()

    def test_a_far_end_killed_in_a_trial_costs_that_trial_alone(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, seconds=0.1)
        self._skip_in_one_process()
        killed: list[int] = []

        def measure_and_kill(plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
            if len(killed) < 1 and runner.facts is not None:
                killed.append(runner.facts.pid)
                threading.Timer(0.05, os.kill, (runner.facts.pid, signal.SIGKILL)).start()
            return runner.measure(plan, budget_bytes=budget_bytes, beat=beat)

        trials = run_study(tmp_path, _Measuring(runner, measure_and_kill))
        assert runner.lost == 1
        assert [trial.number for trial in trials] == list(range(len(trials)))
        lost = [trial for trial in trials if trial.measurement and trial.measurement.lost_nodes]
        assert [trial.measurement.outcome for trial in lost if trial.measurement] == [Outcome.OK]
        assert len(trials) >= 5

    def test_a_plan_that_takes_two_devices_with_it_has_crashed(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="kills")
        self._skip_in_one_process()
        plan = Plan.traced(runner.prepare().graph)
        result = runner.measure(plan, budget_bytes=1)
        runner.close()
        host = os.uname().nodename
        assert (result.outcome, result.lost_nodes) == (Outcome.CRASHED, (host, host))
        assert result.detail == f"2 devices were lost while it ran: {host}, {host}"

    def test_without_a_device_the_study_ends_and_says_that_none_is_left(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="never opens")
        self._skip_in_one_process()
        with pytest.raises(DeviceLostError, match=r"no device of class fake is left after 4 attempts .*; start one$"):
            runner.prepare()

    def test_close_leaves_no_process(self, tmp_path: Path) -> None:
        runner = self.make_runner(tmp_path, workload="has a child")
        self._skip_in_one_process()
        runner.prepare()
        assert runner.facts is not None
        children = _find_children(runner.facts.pid)
        assert children
        runner.close()
        assert all(wait_for_death(pid, 2.0) for pid in children)

    def _skip_in_one_process(self) -> None:
        if self.is_in_this_process:
            pytest.skip("the far end is this process")


@dataclasses.dataclass(frozen=True, slots=True)
class _Measuring:
    """Runner with another `measure`."""

    runner: RemoteRunner
    measure: Callable[..., Measurement]

    def prepare(self) -> Any:
        return self.runner.prepare()

    def baseline(self) -> Measurement:
        return self.runner.baseline()

    def renew(self) -> None:
        self.runner.renew()

    def close(self) -> None:
        self.runner.close()


def _find_children(pid: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]


def _parent(process: Path) -> int:
    with suppress(OSError, IndexError):
        return int((process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return -1


def _interrupt(seconds: float, work: Callable[[], object], number: signal.Signals = signal.SIGINT) -> None:
    """Run work in the main thread, and send it a signal after so many seconds."""
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
    work()
