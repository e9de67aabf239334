"""All experiments in sessions that resume: what is run, what waits, and what a session leaves for the next one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import listing, run_all
from experiments.all_experiments import EXPERIMENTS, Experiment
from experiments.run_all import Machine, Session, Status

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
        return Session(commit, machine, folder / "runs" / "state.json", folder, waits=waits, deadline=deadline)


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
    assert run_all.summarize(ends) == "done (1): benchmarks/b\nfailed (1): benchmarks/a"
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
    assert (tmp_path / "runs" / "set_aside" / result.relative_to(tmp_path)).read_text() == "of another commit"


def test_a_command_that_outlasts_its_seconds_is_interrupted():
    python = [run_all.sys.executable, "-c"]
    assert run_all.execute([*python, "raise SystemExit(3)"], 60.0) == 3
    assert run_all.execute([*python, "import time; time.sleep(600)"], 0.5) is None


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


def test_the_list_runs_nothing_and_names_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_all.main(["--list", "--only", "frontier"]) == 0
    assert "benchmarks/frontier" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_all.main(["--only", "nothing"])
