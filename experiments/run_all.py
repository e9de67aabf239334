"""Run every benchmark and claim on this machine at one commit, in sessions that resume.

`python -m experiments.run_all --quiet [--minutes M] [--only NAME...]`, and `--list` to see what is recorded.

An experiment that is done at the commit of the code is not run again. One that times is not started while other programs
use the machine: it is refused, or waits with `--quiet`. One that needs the results of another is not started before that
one is done. A failed one is reported at the end, and the others run.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path

from autotune.measure.device.this_device import this_device
from autotune.measure.machine_counters import machine_load, read_counters
from autotune.records.json_codec import from_json
from autotune.records.machine_load import explain_disturbance
from autotune.records.run_dir import write_text
from experiments.all_experiments import EXPERIMENTS, Experiment
from experiments.common.commands import UNFINISHED
from experiments.common.facts import ROOT
from experiments.common.repository import CODE, find_changes, run_git
from experiments.listing import format_list

STATE = ROOT / "runs" / "run_all.json"
"""File with the latest status and commit of each experiment."""
LOOK_SECONDS = 10.0
"""Duration in seconds over which the load of the machine is measured."""
WAIT_SECONDS = 60.0
"""Pause in seconds between two looks at a busy machine."""
GRACE_SECONDS = 120.0
"""Time in seconds that an experiment has to end after an interrupt."""
LEAST_SECONDS = 300.0
"""Least time in seconds for which an experiment that resumes is started: less would measure hardly anything."""


class Status(StrEnum):
    """Status of one experiment at the end of a session."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    BUSY = "not started: machine busy"
    LATER = "not started: no time left"
    WAITING = "not started: needs others"


@dataclass(frozen=True, slots=True)
class Finished:
    """Last end of an experiment: how, at which commit, when, and after how many seconds of all its sessions."""

    status: Status
    commit: str
    date: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Clock, load and processes of the machine, which a test replaces."""

    find_busy_reason: Callable[[], str]
    """Function that returns the reason why nothing can be timed now; empty on an idle machine."""
    execute: Callable[[Sequence[str], float | None], int | None]
    """`execute(command, seconds)`: return the exit status; None if the command was interrupted after `seconds`.

    None for `seconds` sets no limit."""
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class Session:
    """One call of the command: experiments in the order of the table, their state, and the time that is left."""

    commit: str
    machine: Machine
    state_path: Path
    root: Path = ROOT
    """Checkout whose results are written."""
    waits: bool = False
    """True if a busy machine is waited for."""
    deadline: float | None = None
    """End of the session on the machine's clock; None without a limit."""
    device: str = field(default_factory=lambda: this_device("cpu").key)
    """Key of the device, which names the folders of its results."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Reason why an experiment was not started, where its status does not state it."""
    state: dict[str, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state_path.exists():
            stored = json.loads(self.state_path.read_text(encoding="utf-8"))
            self.state = {name: from_json(Finished, entry, where=name) for name, entry in stored.items()}

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - self.machine.now()

    def run(self, experiments: Sequence[Experiment]) -> dict[str, Status]:
        """Run the experiments that are not done at this commit, and return how each ended."""
        ends = {}
        for experiment in experiments:
            if self.is_done(experiment.name):
                ends[experiment.name] = Status.DONE
                continue
            ends[experiment.name] = self.run_one(experiment)
            print(f"{experiment.name}: {ends[experiment.name]}", file=sys.stderr, flush=True)
        return ends

    def is_done(self, name: str) -> bool:
        """Return True if an experiment is done at this commit."""
        end = self.state.get(name)
        return end is not None and end.commit == self.commit and end.status is Status.DONE

    def run_one(self, experiment: Experiment) -> Status:
        """Run or continue one experiment, and keep its end in the state."""
        if missing := [name for name in experiment.needs if not self.is_done(name)]:
            self.reasons[experiment.name] = f"{' and '.join(missing)} not done at {self.commit}"
            return Status.WAITING
        if not self.has_time_for(experiment):
            return Status.LATER
        if experiment.is_timed and (status := self.await_idle_machine()):
            return status
        if not self.has_time_for(experiment):  # waiting may take most of the session
            return Status.LATER
        stored = self.state.get(experiment.name)
        continues = stored is not None and stored.commit == self.commit
        if experiment.resumes and not continues:
            self.set_aside(experiment, stored.commit if stored is not None else "unknown")
        print(f"{experiment.name}: {' '.join(experiment.command)}", file=sys.stderr, flush=True)
        began = self.machine.now()
        self.keep(experiment, Status.INTERRUPTED, stored.seconds if continues and stored else 0.0)
        code = self.machine.execute([sys.executable, *experiment.command], self.seconds_left)
        status = Status.INTERRUPTED if code in (None, UNFINISHED) else Status.FAILED if code else Status.DONE
        self.keep(experiment, status, self.machine.now() - began + self.state[experiment.name].seconds)
        return status

    def has_time_for(self, experiment: Experiment) -> bool:
        """Return True if the expected duration fits before the deadline; `LEAST_SECONDS` suffice for one that resumes."""
        expected = 60 * experiment.minutes
        least = min(expected, LEAST_SECONDS) if experiment.resumes else expected
        return self.seconds_left is None or least <= self.seconds_left

    def await_idle_machine(self) -> Status | None:
        """Return None once the machine is idle, else `BUSY` or `LATER`. With `waits`, check every `WAIT_SECONDS`."""
        while reason := self.machine.find_busy_reason():
            print(f"busy: {reason}", file=sys.stderr, flush=True)
            if not self.waits:
                return Status.BUSY
            left = self.seconds_left
            if left is not None and left <= WAIT_SECONDS:
                return Status.LATER
            self.machine.sleep(WAIT_SECONDS)
        return None

    def set_aside(self, experiment: Experiment, commit: str) -> None:
        """Move results of another commit to a new folder `set_aside/COMMIT/` beside the state file.

        The command would continue them otherwise. Results are of this device where their path names one, else of any.
        """
        folder = self.state_path.parent / "set_aside" / commit
        for path in experiment.find_stored(self.root, self.device):
            target = folder / path.relative_to(self.root)
            tries = itertools.count(2)
            while target.exists():
                target = folder / str(next(tries)) / path.relative_to(self.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)

    def keep(self, experiment: Experiment, status: Status, seconds: float) -> None:
        """Store the end of an experiment."""
        self.state[experiment.name] = Finished(status, self.commit, date.today().isoformat(), round(seconds, 1))
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            self.state_path, json.dumps({name: asdict(end) for name, end in self.state.items()}, indent=1) + "\n"
        )


def find_busy_reason() -> str:
    """Return the reason why a measurement would be disturbed now; empty on an idle machine."""
    before = read_counters(())
    time.sleep(LOOK_SECONDS)
    load = machine_load(before, read_counters(()))
    return "its load cannot be read" if load is None else explain_disturbance(load)


def execute(command: Sequence[str], seconds: float | None) -> int | None:
    """Run a command in the root of the checkout; at the end of its time interrupt it with its children and return None."""
    # in a session of its own, so that Ctrl-C reaches it once, from here, and the end takes its children along
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=_accept_interrupts,  # noqa: PLW1509 - this process has no threads
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _accept_interrupts() -> None:
    """Let SIGINT end a process; one that a script starts in the background inherits that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_commit() -> str:
    """Return the short hash of the last commit of `CODE`.

    Raises SystemExit if git fails or `CODE` has uncommitted changes.
    """
    if changed := find_changes(ROOT):
        raise SystemExit(f"uncommitted changes of {len(changed)} files; commit them, so that results have a commit")
    return run_git(ROOT, "log", "-1", "--format=%h", "--", *CODE)


def summarize(ends: Mapping[str, Status], reasons: Mapping[str, str]) -> str:
    """Return the names of the experiments by their end, each with the reason if there is one."""
    texts = {name: f"{name} ({reasons[name]})" if name in reasons else name for name in ends}
    groups = {status: [texts[name] for name, end in ends.items() if end is status] for status in Status}
    return "\n".join(f"{status} ({len(names)}): {', '.join(names)}" for status, names in groups.items() if names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if everything asked for is done at this commit, else 1."""
    names = [experiment.short_name for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quiet", action="store_true", help="wait while the machine is busy, instead of refusing to time"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="end this session after M minutes; the next one continues"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="names of experiments; all by default")
    parser.add_argument(
        "--list",
        action="store_true",
        help="run nothing; print durations, and commit, date and machine of the latest results",
    )
    options = parser.parse_args(arguments)
    experiments = [experiment for experiment in EXPERIMENTS if experiment.short_name in (options.only or names)]
    if options.list:
        print(format_list(experiments))
        return 0
    machine = Machine(find_busy_reason, execute)
    deadline = None if options.minutes is None else machine.now() + 60 * options.minutes
    session = Session(read_commit(), machine, STATE, waits=options.quiet, deadline=deadline)
    try:
        ends = session.run(experiments)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    print(summarize(ends, session.reasons))
    return 0 if all(end is Status.DONE for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
