"""Studies and nights on a fleet, from the command line: records, histories, lost devices and what continues."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.cli import main as cli
from autotune.fleet import ENGINES
from autotune.fleet.local import LocalChannel
from autotune.fleet.messages import OpenDevice
from autotune.nightly.history import EntryDirectory
from autotune.records.trial import load_trials
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import wait_for_death, without_times
from tests.nightly.test_command import Tracker
from tests.system.test_cli import keep_in_memory

ROOT = Path(__file__).parents[2]
FAR_END = f"[{sys.executable}, -m, autotune.testing.fake_far_end]"
STUDY = """
workload: resnet18
budget: 70%
trials: 5
planners: {order: [traced], update: [at_end], recompute: [keep, segments], reorder: [keep]}
moves: false
"""
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """(exit code, standard output, standard error) of a command in a directory with a study, a night and a fleet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("autotune.report.mlflow_log.Tracker", Tracker)
    monkeypatch.setattr("autotune.study.trial_store._storage", keep_in_memory)
    Path("study.yaml").write_text(STUDY)
    Path("fleet.yaml").write_text(
        f"classes:\n  fake: {{engine: command, command: {FAR_END}, name: Fake 9000, cores: 2}}\n"
        f"  other: {{engine: command, command: {FAR_END}}}\n"
        "  gone: {engine: command, command: [sh, -c, 'echo no node is up >&2; exit 7']}\n"
        f"  wrong: {{engine: command, command: {FAR_END}, memory: 80GiB}}\n"
    )

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_a_study_on_a_class_records_who_measured_and_resume_needs_no_option(call: Call):
    code, _, err = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--on", "fake", "--name", "first")
    assert code == 0, err
    trials = load_trials(Path("runs/first/trials.jsonl"))
    assert {trial.measurement.node for trial in trials if trial.plan and trial.was_run} == {os.uname().nodename}
    assert json.loads(Path("runs/fleet/fake.json").read_text())["silicon"] == "Fake 9000"
    code, _, err = call("resume", "runs/first", "--trials", "8")
    assert code == 0, err
    assert len(load_trials(Path("runs/first/trials.jsonl"))) > len(trials)
    # on this machine alone the captured graph would be another one: the class is kept
    assert "on: fake" in Path("runs/first/config.yaml").read_text().replace("'", "")


def test_no_device_is_75_and_says_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autotune.fleet.remote_runner.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("autotune.fleet.remote_runner.ATTEMPTS", 1)
    code, out, err = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--on", "gone", "--name", "lost")
    assert (code, out) == (75, "")
    assert "no device of class gone is left after 1 attempts" in err
    assert "ended with exit code 7: no node is up" in err
    assert err.rstrip().endswith("; start one, then run the command again")
    assert not Path("runs/lost").exists()
    recorded = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--on", "fake", "--name", "lost")
    assert recorded[0] == 0, recorded[2]
    code, out, err = call("resume", "runs/lost", "--on", "gone", "--trials", "8")
    assert (code, out) == (75, "")
    assert err.rstrip().endswith("; start one, then continue with autotune resume runs/lost")


def test_a_device_that_is_not_what_its_class_promises_is_2(call: Call):
    code, _, err = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--on", "wrong")
    assert code == 2
    assert "of class wrong has 16384.0 MiB of memory, the class promises 81920.0 MiB; take the node out" in err
    Path("runs/fleet").mkdir(parents=True, exist_ok=True)
    Path("runs/fleet/other.json").write_text(
        '{"kind": "cpu", "silicon": "Fake 8000", "memory_bytes": 17179869184, "cores": 2, "torch": "2.13.0"}'
    )
    code, _, err = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--on", "other")
    assert code == 2
    assert "of class other has silicon Fake 9000, the class's first device has Fake 8000, and " in err
    assert err.rstrip().endswith("; after an upgrade of all nodes delete runs/fleet/other.json")


def test_kernels_are_chosen_on_a_device_of_the_class(call: Call, monkeypatch: pytest.MonkeyPatch):
    opened: list[tuple[object, ...]] = []

    @contextlib.contextmanager
    def open_device(request: OpenDevice, report: Callable[[str], None]) -> Iterator[FakeRunner]:
        opened.append((request.device_class, request.config["kernels"], request.config["memory_format"]))
        yield FakeRunner(slowdown_of=lambda plan: 0.9 if plan.kernels and not plan.memory_format else 1.0)

    monkeypatch.setitem(ENGINES, "command", lambda reach, report: LocalChannel(open_device))
    tune = ("tune", "study.yaml", "--fleet", "fleet.yaml", "--kernels", "any")
    code, _, err = call(*tune, "--on", "fake", "--name", "first")
    assert code == 0, err
    combinations = [("", ""), ("inductor", ""), ("", "channels_last"), ("inductor", "channels_last")]
    assert opened[:4] == [("fake", *each) for each in combinations]
    assert {*opened[4:]} == {("fake", "inductor", "")}  # its other rebuild prices, then the study
    captures = json.loads(Path("runs/first/captures.json").read_text())
    assert [each["outcome"] for each in captures][:4] == ["ok"] * 4


def test_a_choice_of_kernels_without_a_device_is_75_and_names_no_run_to_resume(
    call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("autotune.fleet.remote_runner.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("autotune.fleet.remote_runner.ATTEMPTS", 1)
    code, _, err = call("tune", "study.yaml", "--fleet", "fleet.yaml", "--kernels", "any", "--on", "gone")
    assert code == 75
    assert err.rstrip().endswith("; start one, then run the command again")


@pytest.mark.slow
def test_a_night_keeps_a_champion_for_each_class(call: Call):
    entry = STUDY.replace("\n", "\n    ").strip()
    Path("night.yaml").write_text(f"time: 1h\nfleet: fleet.yaml\nentries:\n  - {entry}\n    on: [fake, other]\n")
    code, out, err = call("nightly", "night.yaml")
    assert code == 0, err
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["resnet18@fake", "new"], ["resnet18@other", "new"]]
    for name in ("fake", "other"):
        home = EntryDirectory(Path(f"runs/nightly/resnet18@{name}"))
        (night,) = home.history()
        assert night.conditions.environment["kernel"] == "fake"  # the device's machine, not this one
        assert home.champion.exists()
    code, _, err = call("nightly", "night.yaml", "--on", "gone", "--fleet", "fleet.yaml")
    assert code == 5, err


def test_doctor_inspects_one_device_of_each_class(call: Call):
    Path("doctor.yaml").write_text(
        f"classes:\n  here: {{engine: local}}\n  there: {{engine: command, command: {FAR_END}, stores: {{ssd: /nowhere}}}}\n"
        "  gone: {engine: command, command: [sh, -c, 'echo no node is up >&2; exit 7']}\n"
        "  large: {engine: local, memory: 90TiB}\n"
    )
    code, out, err = call("doctor", "--fleet", "doctor.yaml", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert {name for name, finding in findings.items() if finding["status"] == "bad"} == {"there", "gone", "large"}
    assert findings["there"]["detail"].endswith("store ssd: no directory /nowhere")
    assert "no node is up" in findings["gone"]["detail"]
    assert "of memory, the class promises " in findings["large"]["detail"]
    assert code == 2
    assert "there, gone, large: must be fixed before tuning" in err


def test_doctor_refuses_a_store_beside_a_fleet_whose_classes_name_their_own(call: Call):
    code, out, err = call("doctor", "--fleet", "fleet.yaml", "--store", "ssd=/nowhere")
    assert (code, out) == (2, "")
    assert "--store ssd=/nowhere: a fleet's classes name their own stores; write it under `stores` of the class" in err


def test_doctor_does_not_wait_for_ever(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autotune.cli.doctor.fleet.WAIT_SECONDS", 0.5)
    monkeypatch.setattr("autotune.fleet.command.CLOSE_SECONDS", 0.1)
    Path("doctor.yaml").write_text("classes:\n  mute: {engine: command, command: [sleep, '60']}\n")
    code, out, _ = call("doctor", "--fleet", "doctor.yaml", "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["status"], finding["detail"]) == (2, "bad", "no answer for 0.5 s")
    assert finding["fix"] == "run doctor when the device is idle"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_ended_leaves_no_far_end_and_is_resumed(call: Call, number: signal.Signals):
    Path("slow.yaml").write_text(
        f"classes:\n  fake: {{engine: command, command: {FAR_END}, environment: {{FAKE_SECONDS: '0.3'}}}}\n"
    )
    command = [
        sys.executable,
        "-m",
        "autotune",
        "tune",
        "study.yaml",
        "--fleet",
        "slow.yaml",
        "--on",
        "fake",
        "--name",
        "one",
    ]
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = Path("runs/one/trials.jsonl")
    until = time.monotonic() + 60
    while (not records.exists() or records.read_bytes().count(b"\n") < 2) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    children = [int(pid) for pid in Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()]
    study.send_signal(number)
    study.wait(30)
    assert children
    assert all(wait_for_death(pid, 2.0) for pid in children)
    before = records.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert call("resume", "runs/one")[0] == 0
    assert records.read_bytes().startswith(before)
    trials = [without_times(trial) for trial in load_trials(records)]
    assert [trial.number for trial in trials] == list(range(len(trials)))
