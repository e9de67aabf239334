"""All experiments in sessions that resume: what is run, what waits, and what a session leaves for the next one."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import listing, run_all
from experiments.all_experiments import EXPERIMENTS, Experiment
from experiments.common.commands import UNFINISHED
from experiments.run_all import Machine, Session, Status
from tests.support.waiting import wait_for

FIRST, SECOND, THIRD = (Experiment(f"benchmarks/{name}", minutes=5, is_timed=name == "b") for name in "abc")


class FakeMachine:
    """Machine whose commands only note that they ran, each for some minutes."""

    def __init__(self, *, codes: dict[str, int] | None = None, busy: Sequence[str] = (), minutes: float = 5) -> None:
        self.codes, self.busy, self.minutes = codes or {}, list(busy), minutes
        self.seconds, self.ran = 0.0, list[str]()

    def execute(self, command: Sequence[str], seconds: float | None) -> int | None:
        self.ran.append(command[2].rpartition(".")[2])
        self.seconds += min(60 * self.minutes, float("inf") if seconds is None else seconds)
        return None if seconds is not None and 60 * self.minutes > seconds else self.codes.get(self.ran[-1], 0)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def session(
        self, folder: Path, *, commit: str = "c0ffee", waits: bool = False, minutes: float | None = None
    ) -> Session:
        machine = Machine(lambda: self.busy.pop(0) if self.busy else "", self.execute, lambda: self.seconds, self.sleep)
        deadline = None if minutes is None else self.seconds + 60 * minutes
        state = folder / "runs" / "state.json"
        return Session(commit, machine, state, folder, waits=waits, deadline=deadline, device="cpu-chip-2")


def write_file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_done_at_this_commit_is_not_run_again(tmp_path: Path):
    machine = FakeMachine()
    assert machine.session(tmp_path).run([FIRST]) == {FIRST.name: Status.DONE}
    assert set(machine.session(tmp_path).run([FIRST, SECOND]).values()) == {Status.DONE}
    assert machine.ran == ["a", "b"]


def test_at_another_commit_everything_runs_again(tmp_path: Path):
    machine = FakeMachine()
    machine.session(tmp_path).run([FIRST, SECOND])
    machine.session(tmp_path, commit="facade").run([FIRST, SECOND])
    assert machine.ran == ["a", "b", "a", "b"]
    stored = json.loads((tmp_path / "runs" / "state.json").read_text())
    assert {entry["commit"] for entry in stored.values()} == {"facade"}


def test_a_failed_experiment_does_not_end_the_session_and_runs_again_in_the_next(tmp_path: Path):
    machine = FakeMachine(codes={"a": 3})
    ends = machine.session(tmp_path).run([FIRST, SECOND])
    assert ends == {FIRST.name: Status.FAILED, SECOND.name: Status.DONE}
    assert run_all.summarize(ends, {}) == "done (1): benchmarks/b\nfailed (1): benchmarks/a"
    machine.codes = {}
    assert machine.session(tmp_path).run([FIRST, SECOND])[FIRST.name] is Status.DONE
    assert machine.ran == ["a", "b", "a"]


def test_nothing_is_timed_on_a_busy_machine_and_the_rest_runs(tmp_path: Path):
    machine = FakeMachine(busy=["another job"])
    assert machine.session(tmp_path).run([FIRST, SECOND, THIRD])[SECOND.name] is Status.BUSY
    assert machine.ran == ["a", "c"]


def test_with_quiet_a_busy_machine_is_waited_for(tmp_path: Path):
    machine = FakeMachine(busy=["another job", "another job"])
    assert machine.session(tmp_path, waits=True).run([SECOND]) == {SECOND.name: Status.DONE}
    assert machine.seconds == 2 * run_all.WAIT_SECONDS + 300


def test_a_session_that_waits_ends_at_its_deadline(tmp_path: Path):
    machine = FakeMachine(busy=["another job"] * 100)
    assert machine.session(tmp_path, waits=True, minutes=7).run([SECOND]) == {SECOND.name: Status.LATER}
    assert machine.seconds <= 420


def test_an_experiment_that_does_not_fit_into_the_minutes_is_left_for_the_next_session(tmp_path: Path):
    machine = FakeMachine()
    ends = machine.session(tmp_path, minutes=8).run([FIRST, SECOND])
    assert ends == {FIRST.name: Status.DONE, SECOND.name: Status.LATER}
    assert machine.session(tmp_path, minutes=8).run([FIRST, SECOND])[SECOND.name] is Status.DONE


def test_one_that_resumes_starts_anyway_and_goes_on_at_the_same_commit(tmp_path: Path):
    long = Experiment("benchmarks/a", minutes=60, resumes=True)
    result = tmp_path / "experiments" / "benchmarks" / "a" / "results" / "results.json"
    result.parent.mkdir(parents=True)
    result.write_text("of another commit")
    machine = FakeMachine(minutes=12)
    assert machine.session(tmp_path, minutes=8).run([long]) == {long.name: Status.INTERRUPTED}
    assert not result.exists()  # its command would have continued it
    result.write_text("a part of this commit")
    assert machine.session(tmp_path).run([long]) == {long.name: Status.DONE}
    assert result.read_text() == "a part of this commit"
    set_aside = tmp_path / "runs" / "set_aside"
    assert (set_aside / "unknown" / result.relative_to(tmp_path)).read_text() == "of another commit"
    machine.session(tmp_path, commit="facade").run([long])
    assert (set_aside / "c0ffee" / result.relative_to(tmp_path)).read_text() == "a part of this commit"
    for text in ("once", "twice"):
        result.write_text(text)
        (tmp_path / "runs" / "state.json").unlink()
        machine.session(tmp_path).run([long])
    kept = sorted(path.read_text() for path in set_aside.glob("unknown/**/results.json"))
    assert kept == ["of another commit", "once", "twice"]


def test_one_that_ends_unfinished_is_continued_in_the_next_session(tmp_path: Path):
    long = Experiment("benchmarks/a", resumes=True)
    machine = FakeMachine(codes={"a": UNFINISHED})
    assert machine.session(tmp_path).run([long]) == {long.name: Status.INTERRUPTED}
    part = write_file(tmp_path / "experiments/benchmarks/a/results/results.json")
    machine.codes = {}
    assert machine.session(tmp_path).run([long]) == {long.name: Status.DONE}
    assert part.exists()


@pytest.mark.parametrize("code", [1, UNFINISHED])
def test_what_needs_another_waits_until_that_is_done_at_this_commit(tmp_path: Path, code: int):
    reader = Experiment("benchmarks/c", needs=(FIRST.name,), is_timed=False)
    machine = FakeMachine()
    machine.session(tmp_path, commit="facade").run([FIRST])
    machine.codes = {"a": code}
    session = machine.session(tmp_path)
    ends = session.run([FIRST, reader])
    assert ends[reader.name] is Status.WAITING
    assert "benchmarks/c (benchmarks/a not done at c0ffee)" in run_all.summarize(ends, session.reasons)
    machine.codes = {}
    assert set(machine.session(tmp_path).run([FIRST, reader]).values()) == {Status.DONE}
    assert machine.ran == ["a", "a", "a", "c"]


def test_results_of_other_devices_stay(tmp_path: Path):
    long = Experiment("benchmarks/a", results="results/{device}/*.json", resumes=True)
    names = ("net.json", "net.plans.json")
    here, there = (
        [write_file(tmp_path / "experiments/benchmarks/a/results" / device / name) for name in names]
        for device in ("cpu-chip-2", "cpu-chip-4")
    )
    assert long.find_results(tmp_path) == [here[0], there[0]]
    FakeMachine().session(tmp_path).run([long])
    assert not any(path.exists() for path in here)
    assert all(path.exists() for path in there)


@pytest.mark.parametrize("busy", [0, 5])
def test_nothing_is_set_aside_for_a_session_that_is_nearly_over(tmp_path: Path, busy: int):
    long = Experiment("benchmarks/a", minutes=60, resumes=True)
    result = write_file(tmp_path / "experiments/benchmarks/a/results/results.json")
    machine = FakeMachine(busy=["another job"] * busy)
    session = machine.session(tmp_path, waits=True, minutes=4 + busy)
    assert session.run([long]) == {long.name: Status.LATER}
    assert result.exists()


def test_results_of_allocators_on_another_machine_are_set_aside_and_old_champions_with_the_nights(tmp_path: Path):
    table = {experiment.short_name: experiment for experiment in EXPERIMENTS}
    moved = [write_file(tmp_path / "experiments/benchmarks/allocators/results/results.json")]
    moved += [write_file(tmp_path / f"runs/{name}-benchmark/begun", "2") for name in ("nights", "transfer")]
    FakeMachine().session(tmp_path).run([table[name] for name in ("allocators", "nights", "transfer")])
    assert not any(path.exists() for path in moved)
    assert all((tmp_path / "runs/set_aside/unknown" / path.relative_to(tmp_path)).exists() for path in moved)


def test_gains_of_a_night_leave_its_studies_where_they_are(tmp_path: Path):
    table = {experiment.short_name: experiment for experiment in EXPERIMENTS}
    machine = FakeMachine()
    machine.session(tmp_path).run([table["landscape/record_all"]])
    study = write_file(tmp_path / "runs/landscapes/bert/run/study.json")
    recorded = write_file(tmp_path / "experiments/benchmarks/landscape/results/bert.json")
    machine.session(tmp_path).run([table[name] for name in ("landscape/gains", "landscape/replays")])
    assert study.exists()
    assert recorded.exists()


def test_a_command_that_outlasts_its_seconds_is_interrupted():
    python = [run_all.sys.executable, "-c"]
    assert run_all.execute([*python, "raise SystemExit(3)"], 60.0) == 3
    assert run_all.execute([*python, "import time; time.sleep(600)"], 0.5) is None


PATIENT = """
import signal, sys, time
from pathlib import Path
from typing import Any
def end(number, frame):
    time.sleep(1.0)  # longer than subprocess.run waits for a command after an interrupt
    Path(sys.argv[1], "ended").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, end)
Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""
LEADER = """
import sys
from experiments.common.commands import run_to_end
run_to_end([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""


def test_an_interrupt_reaches_the_command_below_an_experiment_which_has_time_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*arguments, **options)
        wait_for((tmp_path / "ready").exists)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    assert run_all.execute([run_all.sys.executable, "-c", LEADER, PATIENT, str(tmp_path)], 0.1) is None
    assert (tmp_path / "ended").exists()


def test_an_interrupt_ends_an_experiment_also_where_run_all_ignores_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_all, "GRACE_SECONDS", 20.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = run_all.time.monotonic()
    try:
        assert run_all.execute([run_all.sys.executable, "-c", "import time; time.sleep(600)"], 0.5) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert run_all.time.monotonic() - began < 15


def test_pages_and_results_do_not_change_the_commit_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_all, "ROOT", tmp_path)

    def commit(*names: str) -> str:
        for name in names:
            with write_file(tmp_path / name, "").open("a") as file:
                file.write(f"{name} {len(hashes)}")
        for arguments in (["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
            subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
        hashes.append(run_all.read_commit())
        return hashes[-1]

    hashes: list[str] = []
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    code = commit("experiments/benchmarks/a/__main__.py", "autotune/x.py", "configs/x.yaml")
    others = (
        "experiments/README.md",
        "experiments/benchmarks/a/README.md",
        "experiments/benchmarks/a/results/b/c.json",
    )
    assert [commit(name) for name in others] == [code] * 3
    (tmp_path / others[0]).write_text("not committed")
    assert run_all.read_commit() == code
    assert commit("experiments/benchmarks/a/__main__.py") != code


def test_the_list_says_what_results_record_and_what_they_do_not(tmp_path: Path):
    folder = tmp_path / "experiments" / "benchmarks" / "a" / "results"
    folder.mkdir(parents=True)
    facts = {
        "commit": "c0ffee",
        "date": "2026-11-24",
        "machine": {"silicon": "a chip"},
        "command": "x",
        "command_seconds": 240,
    }
    for name in ("one", "two"):
        (folder / f"{name}.json").write_text(json.dumps(facts))
    lines = listing.format_list([FIRST, SECOND], tmp_path).splitlines()
    assert lines[1].split()[1:] == ["no", "5", "min", "4", "min", "c0ffee", "2026-11-24", "a", "chip"]
    assert lines[2].count(listing.NOT_RECORDED) == 4


def test_the_table_names_every_benchmark_and_claim():
    listed = {"/".join(experiment.name.split("/")[:2]) for experiment in EXPERIMENTS}
    folder = run_all.ROOT / "experiments"
    assert listed == {
        f"{kind}/{path.parent.name}"
        for kind in ("benchmarks", "claims")
        for path in folder.glob(f"{kind}/*/__main__.py")
    }
    for experiment in EXPERIMENTS:
        module = folder / experiment.name
        assert (module / "__main__.py").exists() or module.with_suffix(".py").exists()


def test_what_an_experiment_needs_comes_before_it():
    names = [experiment.name for experiment in EXPERIMENTS]
    for position, experiment in enumerate(EXPERIMENTS):
        assert set(experiment.needs) <= set(names[:position])
    needing = {experiment.short_name for experiment in EXPERIMENTS if experiment.needs}
    assert needing == {"early_stop", "pareto", "tuned/gains", "landscape/gains", "landscape/replays"}


def test_the_list_runs_nothing_and_names_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_all.main(["--list", "--only", "frontier"]) == 0
    assert "benchmarks/frontier" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_all.main(["--only", "nothing"])
