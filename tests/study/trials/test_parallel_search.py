"""The search on several devices at once, with fake devices: what runs where, what is recorded, and what a lost one costs."""

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from autotune.errors import DeviceLostError, DeviceRefusedError, WorkerError
from autotune.ir.plan import Plan
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind, load_trials
from autotune.study.interrupts import Interrupts
from autotune.study.session import tune
from autotune.study.trials import parallel_search
from autotune.study.trials.device_pool import DevicePool, DeviceReady, MeasureTask
from autotune.study.trials.next_trial import Proposal
from autotune.study.trials.parallel_search import ParallelSearch, PendingTrial
from autotune.study.verdicts.ranking import Rules
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.graphs import training_chain
from autotune.testing.runner_contract import make_config, without_times
from tests.support.waiting import wait_for

SEARCHED = (TrialKind.SEARCH, TrialKind.MOVE, TrialKind.REPEAT)


@dataclasses.dataclass
class Device(FakeRunner):
    """Fake device whose measurements in the search take some time, and which can be lost."""

    graph: Any = dataclasses.field(default_factory=lambda: training_chain(28, nbytes=100_000, param_bytes=5_000))
    name: str = "n1"
    seconds: float = 0.02
    """Time of a measurement outside of the main thread, which is one of the search on several devices."""
    lost_at: Callable[[int], bool] = lambda count: False
    """True if the device is lost in the measurement of this number, counted from 1."""
    prepared: int = 0
    threads: list[str] = dataclasses.field(default_factory=list)
    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Begin and end of each measurement."""

    def prepare(self) -> Any:
        self.prepared += 1
        return super().prepare()

    def measure(self, plan: Any, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        began = time.monotonic()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.seconds)
        result = dataclasses.replace(super().measure(plan, budget_bytes=budget_bytes, beat=beat), node=self.name)
        self.threads.append(threading.current_thread().name)
        self.spans.append((began, time.monotonic()))
        if self.lost_at(len(self.spans)):
            raise DeviceLostError(f"lost {self.name}", self.name)
        return result


def run(directory: Path, devices: list[Device], *, lasting: bool = False, **fields: Any) -> list[Trial]:
    config = make_config(directory, **{"trials": 16, **fields})
    tune(config, devices[0], directory / "run", devices=devices, lasting=lasting)
    return load_trials(directory / "run" / "trials.jsonl")


def written(directory: Path) -> list[str]:
    return (directory / "run" / "trials.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_study_with_one_device_is_the_same_to_the_bit(tmp_path: Path):
    config = make_config(tmp_path / "plain", trials=14)
    tune(config, FakeRunner(graph=Device().graph), tmp_path / "plain" / "run", lasting=False)
    plain = load_trials(tmp_path / "plain" / "run" / "trials.jsonl")
    here = run(tmp_path / "one", [Device(name="", seconds=0.0)], trials=14)
    assert [without_times(trial) for trial in here] == [without_times(trial) for trial in plain]


def test_the_search_runs_on_all_devices_at_once_and_the_confirmation_on_the_first(tmp_path: Path):
    devices = [Device(name="n1", seconds=0.4), Device(name="n2", seconds=0.4)]
    trials = run(tmp_path, devices)
    searched = [trial for trial in trials if trial.kind in SEARCHED and trial.was_run]
    assert {trial.measurement.node for trial in searched if trial.measurement} == {"n1", "n2"}
    others = [trial for trial in trials if trial.kind not in SEARCHED and trial.plan is not None and trial.was_run]
    assert TrialKind.CONFIRM in {trial.kind for trial in others}
    assert {trial.measurement.node for trial in others if trial.measurement} == {"n1"}
    assert any(
        first[0] < second[1] and second[0] < first[1] for first in devices[0].spans for second in devices[1].spans
    )
    assert devices[1].aborted
    assert not devices[0].aborted
    assert len([trial for trial in trials if trial.kind != TrialKind.CONFIRM]) == 16
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(written(tmp_path)) == len(trials)


def test_trials_are_recorded_in_the_order_in_which_they_end(tmp_path: Path):
    run(tmp_path, [Device(name="slow", seconds=0.6), Device(name="fast", seconds=0.01)])
    numbers = [json.loads(line)["number"] for line in written(tmp_path)]
    assert sorted(numbers) == list(range(len(numbers)))
    assert numbers != sorted(numbers)


def test_a_plan_that_is_measured_now_is_not_measured_on_another_device(tmp_path: Path):
    devices = [Device(name=f"n{number}", seconds=0.3) for number in range(3)]
    trials = run(tmp_path, devices, sampler="random")  # the one that pays no regard to running trials
    in_search = [plan for device in devices for plan in device.measured]
    confirmed = sum(trial.kind == TrialKind.CONFIRM for trial in trials)
    assert len(in_search) - confirmed == len(set(in_search))
    assert [trial.number for trial in trials] == list(range(len(trials)))


def test_pending_suggestions_are_not_suggested_again(tmp_path: Path):
    devices = [Device(name=f"n{number}", seconds=0.3) for number in range(3)]
    trials = run(tmp_path, devices, lasting=True, trials=14, moves=False)
    stored = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'run' / 'optuna.db'}").trials
    assert [trial.number for trial in stored] == [trial.number for trial in trials]
    running: list[optuna.trial.FrozenTrial] = []
    for trial in stored:
        assert trial.datetime_start is not None
        running = [old for old in running if old.datetime_complete and old.datetime_complete > trial.datetime_start]
        if trial.user_attrs["kind"] == TrialKind.SEARCH:
            assert trial.params not in [old.params for old in running]
            running.append(trial)


def test_a_lost_device_costs_one_trial_and_is_prepared_again(tmp_path: Path):
    lost = Device(name="n2", lost_at=lambda count: count == 2)
    first = Device(name="n1", seconds=0.6)
    trials = run(tmp_path, [first, lost])
    again = [trial for trial in trials if trial.measurement and trial.measurement.lost_nodes]
    assert [trial.measurement.lost_nodes for trial in again if trial.measurement] == [("n2",)]
    assert again[0].was_run
    assert lost.prepared == 2
    assert [trial.number for trial in trials] == list(range(len(trials)))
    measured = [
        trial for trial in trials if trial.plan is not None and trial.was_run and trial.kind != TrialKind.REPEAT
    ]
    assert len(first.measured) + len(lost.measured) == len(measured) + 1


def test_a_plan_under_which_two_devices_are_lost_has_crashed(tmp_path: Path):
    victims: list[str] = []
    devices = [Device(name="n1", seconds=0.4), *(Device(name=f"n{number}", seconds=0.02) for number in (2, 3))]

    def lose(device: FakeRunner) -> None:
        victims[:] = victims or [device.measured[-1]]

    def is_victim(device: Device, count: int) -> bool:
        del count
        return device.measured[-1] == victims[0]

    for device in devices[1:]:
        device.before_measure = lose
        device.lost_at = partial(is_victim, device)
    trials = run(tmp_path, devices)
    lost = [trial.measurement for trial in trials if trial.measurement and trial.measurement.lost_nodes]
    assert [result.outcome for result in lost] == [Outcome.CRASHED]
    assert lost[0].detail.startswith("2 devices were lost while it ran: n")


def test_a_device_that_captures_another_graph_is_not_used(tmp_path: Path):
    other = Device(name="n2", graph=training_chain(30, nbytes=100_000, param_bytes=5_000))
    lines: list[str] = []
    config = make_config(tmp_path, trials=12)
    first = Device(name="n1")
    tune(
        config, first, tmp_path / "run", devices=[first, other], lasting=False,
        progress=lambda event: lines.append(getattr(event, "message", "")),
    )  # fmt: skip
    assert not other.measured
    told = [line for line in lines if line]
    assert told[0] == "the search prepares 1 further device"
    assert told[1].startswith("a further device is not used: it captures graph ")


def gone_after(count: int) -> Callable[[FakeRunner], None]:
    """Return a hook after which no device of the class is left, from the measurement of this number on."""

    def check(device: FakeRunner) -> None:
        if len(device.measured) >= count and threading.current_thread() is not threading.main_thread():
            raise DeviceLostError("no device of class fake is left after 4 attempts (gone); start one")

    return check


def test_the_search_goes_on_with_other_devices_when_the_first_is_gone(tmp_path: Path):
    first, second = Device(name="n1", seconds=0.1, before_measure=gone_after(6)), Device(name="n2", seconds=0.1)
    lines: list[str] = []
    tune(
        make_config(tmp_path, trials=24), first, tmp_path / "run", devices=[first, second], lasting=False,
        progress=lambda event: lines.append(getattr(event, "message", "")),
    )  # fmt: skip
    trials = load_trials(tmp_path / "run" / "trials.jsonl")
    (lost,) = (int(line.split()[-6]) for line in lines if line.endswith("waits for a further device"))
    later = [trial for trial in trials if trial.number >= lost and trial.kind in SEARCHED and trial.was_run]
    assert later[0].number == lost
    assert {trial.measurement.node for trial in later if trial.measurement} == {"n2"}
    assert sum(trial.kind != TrialKind.CONFIRM for trial in trials) == 24
    assert not first.aborted, "plans are re-measured on it, or on its replacement"


def test_without_any_device_the_study_ends_and_its_trial_comes_again(tmp_path: Path):
    devices = [Device(name=f"n{number}", seconds=0.05, before_measure=gone_after(6)) for number in (1, 2)]
    devices[1].prepare = lambda: (_ for _ in ()).throw(DeviceLostError("none is free"))  # type: ignore[method-assign]
    with pytest.raises(DeviceLostError, match="no device of class fake is left"):
        run(tmp_path, devices, trials=18)
    before = load_trials(tmp_path / "run" / "trials.jsonl")
    after = run(tmp_path, [Device(name="n1"), Device(name="n2")], trials=18)
    assert after[: len(before)] == before
    assert sum(trial.kind != TrialKind.CONFIRM for trial in after) >= 17


def test_a_device_that_is_never_ready_does_not_hold_the_study(tmp_path: Path):
    released = threading.Event()

    class Waiting(Device):
        def prepare(self) -> Any:
            released.wait(30)
            raise DeviceLostError("none is free")

        def abort(self) -> None:
            released.set()

    began = time.monotonic()
    trials = run(tmp_path, [Device(name="n1"), Waiting(name="n2")])
    assert len(trials) >= 16
    assert time.monotonic() - began < 25


def test_an_idle_further_device_is_closed_when_the_time_is_over_although_no_trial_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel_search, "LOOK_SECONDS", 0.01)
    second = Device(name="n2")
    first = Device(name="n1", before_measure=lambda device: wait_for(lambda: second.aborted, 20))
    digest, plan = first.prepare().graph.digest, Plan.traced(first.graph)
    pool = DevicePool([first, second], digest, lambda seconds: False)
    assert isinstance(pool.wait(), DeviceReady)
    assert pool.wait(0.01) is None
    running = PendingTrial(Trial(0, TrialKind.SEARCH, "net", digest), None, Proposal(TrialKind.SEARCH, {}), 0.0)
    pool.start(MeasureTask(0, plan, 10**9, None))
    recorded: list[Trial] = []
    until = time.monotonic() + 0.2
    ParallelSearch(
        SimpleNamespace(rules=Rules(10**9, 0, None, 0.0)), pool, Interrupts(), lambda event: None,
        has_enough=lambda pending: True, is_used_up=lambda pending: time.monotonic() > until,
        propose=lambda trials: None, record=lambda trial, proposal, began: recorded.append(trial), running={0: running},
    ).run()  # fmt: skip
    assert [trial.was_run for trial in recorded] == [True]
    assert first.spans[0][1] >= until


def test_a_second_search_of_a_study_uses_the_further_devices_again():
    class Ending(Device):
        ended = False

        def abort(self) -> None:
            self.ended = True

        def reset(self) -> None:
            self.ended = False

        def prepare(self) -> Any:
            if self.ended:
                raise DeviceLostError("ended")
            return super().prepare()

    devices = [Device(name="n1"), Ending(name="n2")]
    digest = devices[0].prepare().graph.digest
    for _ in range(2):
        pool = DevicePool(devices, digest, lambda seconds: False)
        assert isinstance(pool.wait(), DeviceReady)
        pool.close()


def while_searching(other: FakeRunner) -> Callable[[FakeRunner], None]:
    """Return a hook that keeps a device in its first trial of the search until another one has begun its second trial."""

    def wait(device: FakeRunner) -> None:
        if threading.current_thread() is not threading.main_thread():
            wait_for(lambda: len(other.measured) >= 2)

    return wait


@pytest.mark.parametrize("error", [DeviceRefusedError, WorkerError])
def test_a_further_device_that_cannot_measure_is_not_used_again_and_its_trial_runs_elsewhere(
    tmp_path: Path, error: type[Exception]
):
    def fail(device: FakeRunner) -> None:
        if len(device.measured) == 2:
            raise error("n2: its class promises 16 cores")

    second = Device(name="n2", before_measure=fail)
    first = Device(name="n1", before_measure=while_searching(second))
    lines: list[str] = []
    tune(
        make_config(tmp_path, trials=16), first, tmp_path / "run", devices=[first, second], lasting=False,
        progress=lambda event: lines.append(getattr(event, "message", "")),
    )  # fmt: skip
    trials = load_trials(tmp_path / "run" / "trials.jsonl")
    assert "a further device is not used: n2: its class promises 16 cores" in lines
    assert (len(second.measured), second.prepared) == (2, 1)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert not [trial for trial in trials if trial.measurement and "n2: " in trial.measurement.detail]


def test_one_interrupt_lets_the_running_trials_end_and_resume_goes_on(tmp_path: Path):
    def interrupt(device: FakeRunner) -> None:
        if len(device.measured) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    second = Device(name="n2", before_measure=interrupt)
    first = Device(name="n1", before_measure=while_searching(second))
    before = run(tmp_path, [first, second], trials=18)
    assert len(second.measured) >= 2
    assert len(before) < 18
    assert len(first.measured) + len(second.measured) == sum(
        trial.plan is not None and trial.was_run and trial.kind != TrialKind.REPEAT for trial in before
    )
    after = run(tmp_path, [Device(name="n1"), Device(name="n2")], trials=18)
    assert after[: len(before)] == before
    assert len({trial.number for trial in after}) == len(written(tmp_path)) == len(after)


def test_an_urgent_signal_drops_the_running_trials_alone(tmp_path: Path):
    def terminate(device: FakeRunner) -> None:
        if len(device.measured) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    second = Device(name="n2", before_measure=terminate)
    devices = [Device(name="n1", before_measure=while_searching(second)), second]
    before = run(tmp_path, devices, lasting=True, trials=18)
    assert len(before) < 18
    assert devices[0].aborted or devices[1].aborted
    after = run(tmp_path, [Device(name="n1"), Device(name="n2")], lasting=True, trials=18)
    assert {trial.number for trial in before} <= {trial.number for trial in after}
    numbers = [trial.number for trial in after]
    assert len(set(numbers)) == len(numbers)
    # suggestions that were dropped come again under a new number
    assert max(numbers) + 1 - len(numbers) <= len(devices)
