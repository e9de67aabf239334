"""The runner over a channel, without a far end: what it asks of which device, and what it records of a class."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import DeviceLostError, DeviceRefusedError
from autotune.fleet import remote_runner
from autotune.fleet.channel import FarEndLostError
from autotune.fleet.messages import (
    BaselineCall,
    FleetCall,
    FleetReply,
    NodeFacts,
    OpenDevice,
    PrepareCall,
    code_identity,
)
from autotune.fleet.remote_runner import RemoteRunner
from autotune.records.device import Device
from autotune.testing.fake_runner import DEVICE, FakeRunner
from autotune.testing.runner_contract import make_config


@dataclasses.dataclass
class Far:
    """A far end in this process, lost at a kind of call."""

    device: Device = DEVICE
    lost_at: type | None = None
    baseline_fits: bool = True
    calls: list[type] = dataclasses.field(default_factory=list)

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        self.calls.append(type(call))
        if type(call) is self.lost_at:
            raise FarEndLostError("gone")
        match call:
            case OpenDevice():
                return NodeFacts("n7", 1, code_identity())
            case PrepareCall():
                prepared = FakeRunner(baseline_fits=self.baseline_fits).prepare()
                return dataclasses.replace(prepared, device=self.device)
        return FakeRunner().baseline()

    def close(self) -> None: ...


def make_runner(directory: Path, open_channel: Any = None) -> RemoteRunner:
    request = OpenDevice(code_identity(), "fake", make_config(directory).model_dump(mode="json"))
    return RemoteRunner(open_channel, request, directory / "fleet" / "fake.json", pause_seconds=0.0)


def test_of_two_studies_that_begin_at_once_on_unequal_devices_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, refusals = remote_runner.write_whole, []

    def write_slowly(*arguments: Any, **options: Any) -> None:
        time.sleep(0.2)
        write(*arguments, **options)

    def begin(device: Device) -> None:
        try:
            make_runner(tmp_path)._check_class("n7", device)
        except DeviceRefusedError as error:
            refusals.append(str(error))

    monkeypatch.setattr(remote_runner, "write_whole", write_slowly)
    devices = [DEVICE, dataclasses.replace(DEVICE, driver="Linux 7.0")]
    studies = [threading.Thread(target=begin, args=[device]) for device in devices]
    for study in studies:
        study.start()
    for study in studies:
        study.join()
    assert len(refusals) == 1
    assert refusals[0].endswith(f"; after an upgrade of all nodes delete {tmp_path / 'fleet' / 'fake.json'}")


def test_an_aborted_runner_opens_no_other_device_and_reports_no_loss(tmp_path: Path):
    opened, lines = [], list[str]()

    class Ended(Far):
        def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
            if type(call) is PrepareCall:
                runner.abort()
                raise FarEndLostError("gone")
            return super().ask(call, report)

    def open_channel(report: Any) -> Far:
        opened.append(1)
        return Ended()

    runner = dataclasses.replace(make_runner(tmp_path, open_channel), report=lines.append)
    for _ in range(2):
        with pytest.raises(DeviceRefusedError, match="the study needs no further device"):
            runner.prepare()
    assert len(opened) == 1
    assert runner.lost == 0
    assert lines == []


@pytest.mark.parametrize("lost_at", [PrepareCall, BaselineCall])
def test_no_device_in_the_place_of_a_lost_one_is_awaited_beyond_the_time(tmp_path: Path, lost_at: type):
    class Busy(Far):
        def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
            time.sleep(30)
            return super().ask(call, report)

    devices = iter([Far(lost_at=lost_at), Busy()])
    runner = make_runner(tmp_path, lambda report: next(devices))
    runner.wait_for_device()
    if lost_at is BaselineCall:
        runner.prepare()
    began = time.monotonic()
    runner.limit_waits(began + 0.3)
    with pytest.raises(DeviceLostError, match="no device of class fake was free in the time that was left"):
        runner.baseline()
    assert time.monotonic() - began < 10


def test_a_wait_outside_of_the_main_thread_ends_with_the_time_and_its_channel_is_closed_once(tmp_path: Path):
    closed, closes = threading.Event(), []

    class Busy(Far):
        def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
            closed.wait(10)
            raise FarEndLostError("closed")

        def close(self) -> None:
            closes.append(1)
            closed.set()

    devices = iter([Far(lost_at=BaselineCall), Busy()])
    runner = make_runner(tmp_path, lambda report: next(devices))
    runner.prepare()
    runner.limit_waits(time.monotonic() + 0.3)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DeviceLostError, match="was free in the time that was left"):
        pool.submit(runner.baseline).result(5)
    assert closes == [1], "a second close of a command's channel fails"


def test_a_device_in_the_place_of_a_lost_one_on_which_plain_pytorch_does_not_fit_is_refused(tmp_path: Path):
    devices = iter([Far(lost_at=BaselineCall), Far(baseline_fits=False)])
    runner = make_runner(tmp_path, lambda report: next(devices))
    runner.prepare()
    words = "plain PyTorch does not fit on n7 of class fake, and fits on the device before it"
    with pytest.raises(DeviceRefusedError, match=f"^{words}, "):
        runner.baseline()


def test_a_device_in_the_place_of_a_lost_one_is_checked_before_it_measures_the_baseline(tmp_path: Path):
    equal, unequal = Far(), Far(dataclasses.replace(DEVICE, silicon="Fake 8000"))
    for second, refused in ((equal, False), (unequal, True)):
        devices = iter([Far(lost_at=BaselineCall), second])
        runner = make_runner(tmp_path / str(refused), lambda report, devices=devices: next(devices))
        runner.prepare()
        if refused:
            with pytest.raises(DeviceRefusedError, match="has silicon Fake 8000, the class's first device"):
                runner.baseline()
        else:
            assert runner.baseline() == FakeRunner().baseline()
    assert equal.calls == [OpenDevice, PrepareCall, BaselineCall]
    assert unequal.calls == [OpenDevice, PrepareCall]
