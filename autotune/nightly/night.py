"""A night: every entry in turn with its share of the time, results after each, and one answer at the end."""

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, ConfigError
from autotune.nightly.config import RESERVED, Entry, Nightly
from autotune.nightly.entry import EntryNight, Search
from autotune.nightly.history import Home, Night, Verdict
from autotune.nightly.pages import write_results
from autotune.nightly.results import Results
from autotune.records.run_dir import locked
from autotune.study.interrupts import Interrupts, Stopped
from autotune.study.runner import Runner

Open = Callable[[Entry, Path], contextlib.AbstractContextManager[Runner]]
"""`open(entry, log_dir)`: the runner of an entry, closed with the context."""


@dataclass(frozen=True, slots=True)
class Job:
    """One night's work."""

    options: Nightly
    config: Path
    """Of the options, for messages."""
    open_runner: Open
    search: Search
    tell: Callable[[Night], None]
    """Called with every entry's outcome, which is on disk by then."""


def run_night(job: Job, name: str) -> Results:
    """All entries that this night has not done yet; what a signal or the time left undone stands in the results.

    Raises LockedError; what is wrong with an entry is its verdict.
    """
    home = Path(job.options.directory)
    deadline = time.monotonic() + job.options.time_seconds
    with locked(home, "give another `directory`"), Interrupts() as interrupts:
        results = _written(job, name)
        for entry in job.options.entries:
            left = deadline - time.monotonic()
            if entry.key not in results.left or left <= 0:
                continue
            waiting = sum(one.share for one in job.options.entries if one.key in results.left)
            until = time.monotonic() + min(left * entry.share / waiting, entry.time_seconds)
            try:
                night = _one(job, entry, name, interrupts, until)
            except Stopped:
                return _written(job, name, interrupts.received)
            except SystemExit as stopped:  # a study that was stopped before its baseline
                return _written(job, name, int(stopped.code or 130) - 128)
            results = _written(job, name)
            job.tell(night)
        return results


def _one(job: Job, entry: Entry, name: str, interrupts: Interrupts, until: float) -> Night:
    home = Home(Path(job.options.directory) / entry.key)
    try:
        with job.open_runner(entry, home.directory / "logs") as runner:
            session = EntryNight(entry, job.options, home, name, runner, job.search, interrupts, until)
            night = session.run()
    except AutotuneError as error:  # a store, a device or a file that is not there: nothing of the entry could begin
        night = _fault(home, entry, name, f"{error}", error.exit_code)
    except Exception as error:  # noqa: BLE001 - a fault of ours in one entry must not cost the others their night
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        night = _fault(home, entry, name, f"a fault of autotune's own: {reason}", AutotuneError.exit_code)
    home.record(night)
    return night


def _fault(home: Home, entry: Entry, name: str, detail: str, exit_code: int) -> Night:
    """No verdict on the champion; what waits goes on waiting."""
    home.directory.mkdir(parents=True, exist_ok=True)
    pending = next((past.pending for past in reversed(home.history())), "")
    return Night(
        name, entry.key, Verdict.FAILED, detail, pending=pending, started=time.time(), exit_code=exit_code
    )  # fmt: skip


def _written(job: Job, name: str, interrupted: int = 0) -> Results:
    """What the entries' histories say of this night, on disk as pages."""
    keys = [entry.key for entry in job.options.entries]
    homes = {key: Home(Path(job.options.directory) / key) for key in keys}
    done = {key: night for key, home in homes.items() for night in home.history() if night.night == name}
    left = tuple(key for key in keys if key not in done)
    results = Results(name, str(job.config), tuple(done.values()), left, interrupted)
    write_results(Path(job.options.directory) / RESERVED / name, results)
    return results


def latest(options: Nightly) -> str:
    """The last night that was begun; ConfigError where there is none."""
    found = sorted(path.parent.name for path in (Path(options.directory) / RESERVED).glob("*/nightly.json"))
    if not found:
        raise ConfigError(f"no night in {options.directory}/{RESERVED}/; begin one without --resume")
    return found[-1]
