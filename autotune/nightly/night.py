"""Run a night: every entry in turn with its share of the time, with result files after each."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.errors import AutotuneError, ConfigError, LockedError, nearest
from autotune.fleet.far_end.device_server import DeviceRunner
from autotune.fleet.waiting import WaitingFile
from autotune.nightly.config import RESERVED, NightlyConfig, NightlyEntry
from autotune.nightly.entry import EntrySession, Search
from autotune.nightly.failures import describe_failure, is_inconclusive
from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict
from autotune.nightly.parallel import EntryProcess, EntryTime, run_in_parallel
from autotune.nightly.result_files import write_results
from autotune.nightly.results import NightResults
from autotune.records.run_dir import RunDir, lock_run_dir
from autotune.study.interrupts import Expired, Interrupts, Stopped

OpenRunner = Callable[[NightlyEntry, Path], contextlib.AbstractContextManager[DeviceRunner]]
"""`open_runner(entry, log_dir)`: context manager of an entry's runner."""


@dataclass(frozen=True, slots=True)
class NightJob:
    """Config and collaborators of one night."""

    options: NightlyConfig
    config: Path
    """Path of the config, for messages."""
    open_runner: OpenRunner
    search: Search
    on_result: Callable[[NightRecord], None]
    """Callback for every entry's result, called after the result is on disk."""
    devices: Mapping[str | None, int] = field(default_factory=dict)
    """Number of devices of each class of a fleet; None is this machine."""
    start_entry: Callable[[NightlyEntry, EntryTime], EntryProcess] | None = None
    """Starts an entry in a process of its own; None to run all entries in this one, one after the other."""
    arguments: tuple[str, ...] = ()
    """Options of the command that choose devices and entries, for messages."""
    only: str | None = None
    """Key of the one entry to run; None for every entry. The results are those of every entry in any case."""

    def entries_to_run(self, results: NightResults) -> list[NightlyEntry]:
        """Return the entries without a result that this job runs, in the order of the config."""
        keys = set(results.left) if self.only is None else {self.only}.intersection(results.left)
        return [entry for entry in self.options.entries if entry.key in keys]


def run_night(job: NightJob, name: str) -> NightResults:
    """Run the entries that the night `name` has not done yet, and return the results of all.

    Errors of an entry become its verdict. Entries without time left and entries after a signal are listed as `left`.
    Raises LockedError if another process works in the directory.
    """
    home = Path(job.options.directory)
    deadline = time.monotonic() + job.options.time_seconds
    with lock_run_dir(home, "give another `directory`"), Interrupts() as interrupts:
        results = _write_results(job, name)
        if job.start_entry is not None:
            return _run_in_processes(job, name, interrupts, deadline, results)
        for entry in job.entries_to_run(results):
            left = deadline - time.monotonic()
            if left <= 0:
                continue
            shares = sum(other.share for other in job.entries_to_run(results))
            until = time.monotonic() + min(left * entry.share / shares, entry.time_seconds)
            try:
                night = _run_entry(job, entry, name, interrupts, until, latest=deadline)
            except Expired:  # the entry stays `left`
                continue
            except Stopped:
                return _write_results(job, name, interrupts.received)
            except SystemExit as stopped:  # a study stopped before its baseline
                return _write_results(job, name, int(stopped.code or 130) - 128)
            results = _write_results(job, name)
            job.on_result(night)
        return results


def run_entry(job: NightJob, key: str, name: str, entry_time: EntryTime) -> NightRecord | None:
    """Run one entry of the night `name`, as a process of a night does; None if a signal ended it before its result.

    Raises ConfigError for an unknown entry, and LockedError where another process runs it.
    """
    entries = {entry.key: entry for entry in job.options.entries}
    if key not in entries:
        raise ConfigError(f"--only {key}: {job.config} has no such entry{nearest(key, entries)}")
    home = Path(job.options.directory) / key
    now = time.monotonic()
    with lock_run_dir(home, "wait for its night"), Interrupts() as interrupts:
        try:
            night = _run_entry(
                job, entries[key], name, interrupts, now + entry_time.seconds, latest=now + entry_time.latest_seconds
            )
        except (Stopped, SystemExit):
            return None
    job.on_result(night)
    return night


def _run_in_processes(
    job: NightJob, name: str, interrupts: Interrupts, deadline: float, results: NightResults
) -> NightResults:
    """Run every entry that is left in a process of its own; what ended without a result is listed as `left`."""
    assert job.start_entry is not None

    def finish(entry: NightlyEntry, code: int) -> None:
        night = find_result(job.options, entry.key, name)
        # it was killed or could not start; 0 is a signal or the end of the night, 75 another night that works there
        if night is None and not interrupts.received and code not in (0, LockedError.exit_code):
            home = EntryDirectory(Path(job.options.directory) / entry.key)
            log = find_entry_log(job.options, entry.key, name)
            night = _failed_night(home, entry, name, f"its process ended with exit code {code}; see {log}", 1)
            if code < 0 and home.champion.exists():  # killed from outside, which is no evidence against the champion
                night = replace(night, verdict=NightVerdict.INCONCLUSIVE, exit_code=0)
            home.record(night)
        _write_results(job, name)
        if night is not None:
            job.on_result(night)

    entries = job.entries_to_run(results)
    files = {runs: WaitingFile(Path(runs)) for runs in {entry.runs for entry in entries}}

    def note_waiting(waiting: Sequence[NightlyEntry]) -> None:
        for runs, file in files.items():
            file.update((entry.key, entry.on or "") for entry in waiting if entry.runs == runs)

    run_in_parallel(
        entries, job.devices, deadline,
        start=job.start_entry, finish=finish, interrupts=interrupts, note_waiting=note_waiting,
    )  # fmt: skip
    return _write_results(job, name, interrupts.received)


def find_entry_log(options: NightlyConfig, key: str, night: str) -> Path:
    """Return the log of the process that runs an entry in a night."""
    return RunDir(Path(options.directory) / key).logs / f"{night}.log"


def latest_night(options: NightlyConfig) -> str:
    """Return the name of the latest night; ConfigError if there is none."""
    names = sorted(path.parent.name for path in (Path(options.directory) / RESERVED).glob("*/nightly.json"))
    if not names:
        raise ConfigError(f"no night in {options.directory}/{RESERVED}/; begin one without --resume")
    return names[-1]


def is_complete(options: NightlyConfig, name: str) -> bool:
    """Return True if every entry has a result of the night `name`."""
    return all(find_result(options, entry.key, name) is not None for entry in options.entries)


def find_result(options: NightlyConfig, key: str, name: str) -> NightRecord | None:
    """Return an entry's result of the night `name`; None before it has one.

    An entry whose history cannot be read has failed, so that the others have their night.
    """
    try:
        history = EntryDirectory(Path(options.directory) / key).history()
    except ConfigError as error:
        return NightRecord(name, key, NightVerdict.FAILED, f"{error}", started=time.time(), exit_code=error.exit_code)
    return next((night for night in history if night.night == name), None)


def _run_entry(
    job: NightJob, entry: NightlyEntry, name: str, interrupts: Interrupts, until: float, *, latest: float
) -> NightRecord:
    home = EntryDirectory(Path(job.options.directory) / entry.key)
    try:
        with job.open_runner(entry, RunDir(home.directory).logs) as runner:
            session = EntrySession(entry, job.options, home, name, runner, job.search, interrupts, until, latest)
            night = session.run()
    except AutotuneError as error:  # the entry could not start: a store, a device or a file is missing
        night = _failed_night(home, entry, name, f"{error}", error.exit_code)
        if is_inconclusive(error) and home.champion.exists():
            night = replace(night, verdict=NightVerdict.INCONCLUSIVE, exit_code=0)
    except Exception as error:  # noqa: BLE001 - a bug in one entry must not end the night of the others
        night = _failed_night(home, entry, name, describe_failure(error), AutotuneError.exit_code)
    home.record(night)
    return night


def _failed_night(home: EntryDirectory, entry: NightlyEntry, name: str, detail: str, exit_code: int) -> NightRecord:
    """Return a failed night without a verdict on the champion; a pending challenger stays pending."""
    home.directory.mkdir(parents=True, exist_ok=True)
    home.reconcile()  # the last night may have ended before it moved a promoted plan
    pending = next((past.pending for past in reversed(home.history())), "")
    return NightRecord(
        name, entry.key, NightVerdict.FAILED, detail, pending=pending, started=time.time(), exit_code=exit_code
    )  # fmt: skip


def _write_results(job: NightJob, name: str, interrupted: int = 0) -> NightResults:
    """Collect this night's results from the entries' histories, and write the result files."""
    keys = [entry.key for entry in job.options.entries]
    results = {key: find_result(job.options, key, name) for key in keys}
    done = {key: night for key, night in results.items() if night is not None}
    left = tuple(key for key in keys if key not in done)
    night = NightResults(name, str(job.config), tuple(done.values()), left, job.arguments, interrupted)
    write_results(Path(job.options.directory) / RESERVED / name, night)
    return night
