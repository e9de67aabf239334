"""Who waits for a device: recorded as long as it waits, by a study as by a night."""

import dataclasses
from pathlib import Path

from autotune.fleet.waiting import WaitingFile, read_waiting, record_wait
from autotune.nightly.config import NightlyEntry
from autotune.nightly.parallel import run_in_parallel
from autotune.study.interrupts import Interrupts
from dashboards.fleet_devices import WAITING_HEAD, waiting_rows
from tests.fleet.test_remote_runner import Far, make_runner


def test_a_wait_is_on_record_until_it_ends(tmp_path: Path):
    with record_wait(tmp_path, "runs/one", "a100"):
        (wait,) = read_waiting(tmp_path)
        assert (wait.name, wait.device_class) == ("runs/one", "a100")
        assert waiting_rows([wait], wait.since + 130)[0][-1] == 2
        assert len(waiting_rows([wait], wait.since)[0]) == len(WAITING_HEAD)
    assert read_waiting(tmp_path) == []


def test_a_wait_keeps_its_begin_while_others_come_and_go(tmp_path: Path):
    file = WaitingFile(tmp_path)
    file.update([("a", "l4"), ("b", "l4")])
    first = {wait.name: wait for wait in read_waiting(tmp_path)}
    file.update([("b", "l4"), ("c", "")])
    second = {wait.name: wait for wait in read_waiting(tmp_path)}
    assert second.keys() == {"b", "c"}
    assert second["b"] == first["b"]
    file.update([])
    assert read_waiting(tmp_path) == []


def test_waits_of_ended_processes_are_deleted_and_those_of_other_machines_kept(tmp_path: Path):
    with record_wait(tmp_path, "runs/one", "a100"):
        (own,) = (tmp_path / "fleet" / "waiting").glob("*.json")
        host, process = own.stem.split("~")
        pid, begin, _ = process.split("-")
        killed = own.with_name(f"{host}~999999999-{begin}-1.json")
        reused = own.with_name(f"{host}~{pid}-{int(begin) - 60}-1.json")  # another process has the number now
        elsewhere = own.with_name(f"{host}x~{pid}-1-1.json")
        for path, name in ((killed, "killed"), (reused, "reused"), (elsewhere, "elsewhere")):
            path.write_text(f'[{{"name": "{name}", "device_class": "l4", "since": 1.0}}]')
        own.with_name(f"{host}~{pid}-{begin}-900.json").write_text('[{"name": ')  # damaged
        assert [wait.name for wait in read_waiting(tmp_path)] == ["elsewhere", "runs/one"]
        assert not killed.exists()
        assert not reused.exists()
        assert elsewhere.exists()


def test_a_study_waits_until_its_device_answers(tmp_path: Path):
    waits: list[list[str]] = []

    class Watching(Far):
        def ask(self, call, report):
            waits.append([wait.name for wait in read_waiting(tmp_path)])
            return super().ask(call, report)

    runner = dataclasses.replace(make_runner(tmp_path, lambda report: Watching()), wait_name="runs/one")
    runner.prepare()
    assert waits == [["runs/one"], []]


def test_entries_of_a_night_wait_while_all_devices_of_their_class_are_in_use():
    class Ended:
        def poll(self) -> int:
            return 0

        def send_signal(self, sig: int) -> None: ...

        def kill(self) -> None: ...

    entries = [NightlyEntry(workload="resnet18", name=name, on="a100") for name in "abc"]
    noted: list[list[str]] = []
    run_in_parallel(
        entries, {"a100": 1}, 1e12,
        start=lambda entry, entry_time: Ended(),
        finish=lambda entry, code: None,
        interrupts=Interrupts(),
        note_waiting=lambda waiting: noted.append([entry.name for entry in waiting]),
    )  # fmt: skip
    assert noted == [["b", "c"], ["c"], [], [], []]
