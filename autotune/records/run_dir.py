"""Name the files of a run directory, replace a file in one step, and lock a directory against a second process."""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, LockedError

TRIALS_FILE = "trials.jsonl"
"""Name of the file of trials, which every run directory with a result contains."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of the files in one run directory.

    >>> str(RunDir(Path("runs/first")).trials)
    'runs/first/trials.jsonl'
    """

    path: Path

    @property
    def config(self) -> Path:
        """Config of the study, as YAML."""
        return self.path / "config.yaml"

    @property
    def trials(self) -> Path:
        """Trials in the order in which they ended: the source of truth, one JSON line each."""
        return self.path / TRIALS_FILE

    @property
    def graph(self) -> Path:
        """Captured graph."""
        return self.path / "graph.json"

    @property
    def costs(self) -> Path:
        """Measured costs of the graph's ops, and of the stores."""
        return self.path / "costs.json"

    @property
    def device(self) -> Path:
        """Device that measured the trials."""
        return self.path / "device.json"

    @property
    def plan(self) -> Path:
        """Plan file of the best trial."""
        return self.path / "plan.json"

    @property
    def study(self) -> Path:
        """Summary that a session writes when it ends: best trial, budget, signal."""
        return self.path / "study.json"

    @property
    def captures(self) -> Path:
        """Measurements by which kernels and memory format were chosen."""
        return self.path / "captures.json"

    @property
    def batch_search(self) -> Path:
        """Batch sizes that were measured, and the chosen one, where the objective chooses the batch size."""
        return self.path / "batch_sizes.json"

    @property
    def batch_plans(self) -> Path:
        """Directory of a plan file for each measured batch size."""
        return self.path / "batch_sizes"

    @property
    def confirmed(self) -> Path:
        """Table of the re-measured plans."""
        return self.path / "confirmed.json"

    @property
    def front(self) -> Path:
        """Directory of the verified front: its table and one plan file per point."""
        return self.path / "front"

    @property
    def front_table(self) -> Path:
        """Table of the front's plans, as JSON."""
        return self.front / "table.json"

    @property
    def front_csv(self) -> Path:
        """Table of the front's plans, as CSV."""
        return self.front / "table.csv"

    def front_plan(self, number: int) -> Path:
        """Return the plan file of the front's point that this trial measured first."""
        return self.front / f"plan-{number}.json"

    @property
    def priors(self) -> Path:
        """Observations that the sampler starts with: simulated settings, and trials of another run."""
        return self.path / "priors.json"

    @property
    def optuna(self) -> Path:
        """SQLite file of the Optuna study."""
        return self.path / "optuna.db"

    @property
    def report(self) -> Path:
        """Report as one HTML page."""
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        """Simulated steps as a Chrome trace, where `autotune trace` wrote it."""
        return self.path / "trace.json"

    @property
    def logs(self) -> Path:
        """Directory of the child processes' logs."""
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        """Lock file, which contains the id of the last process that worked here."""
        return self.path / "lock"

    @property
    def is_recorded(self) -> bool:
        """True if a study recorded anything in this directory."""
        return self.config.exists() or self.trials.exists()

    @property
    def records(self) -> tuple[Path, ...]:
        """Files that a finished study is read from."""
        return self.config, self.trials, self.graph, self.costs, self.device, self.plan, self.study


RESERVED_NAMES = frozenset({"devices", "fleet", "logs", "mlruns", "nightly", "plans"})
"""Names in a directory of runs that no run can have: they are those of other records."""


@dataclass(frozen=True, slots=True)
class RunsDir:
    """Paths of the files that all runs of one `runs` directory share."""

    path: Path

    @property
    def mlflow_store(self) -> Path:
        """SQLite file of MLflow's tracking data."""
        return self.path / "mlflow.db"

    @property
    def mlflow_lock(self) -> Path:
        """Lock file that a process holds while it creates or updates the MLflow store."""
        return self.path / "mlflow.lock"

    @property
    def op_profile(self) -> Path:
        """Cache of measured op costs, by device."""
        return self.path / "profile.json"


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError without one, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_file_place(path: Path | None) -> None:
    """Raise OSError where a file cannot be written at `path`, before work whose result belongs there; None is no file."""
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):  # a device such as /dev/stdout
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    parent = next(place for place in path.absolute().parents if place.exists())
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


def write_text(path: Path, text: str) -> None:
    """Replace the text of a file in one step: a reader finds the old text or the new text, never a part.

    A link keeps its place: the file that it names gets the text. Raises OSError where the file cannot be written; the old
    text is then still there.
    """
    # replacing a device such as /dev/null would take it from everybody; /dev/stdout may lead to an open file
    if path.exists() and (not path.is_file() or path.parts[:2] == ("/", "dev")):
        with named_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(text)
        return
    if path.is_symlink():
        path = path.resolve()
    # a process id is not enough: containers that share a directory have equal ones
    draft = path.with_name(f".{path.name[:40]}.{os.getpid()}-{os.urandom(4).hex()}.draft")
    try:
        with named_errors(path):
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the new name without its text
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_json(path: Path, document: Any) -> None:
    """Replace a file by a JSON document, in one step."""
    write_text(path, json.dumps(document) + "\n")


@contextmanager
def lock_file(path: Path, *, wait: bool) -> Iterator[Any]:
    """Lock a file against other processes for the time of a `with` block; the value is the open file.

    Waits for the other process, or raises BlockingIOError with the open file as its only argument where `wait` is false.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(file.read().strip()) from None
        yield file


@contextmanager
def lock_run_dir(run_dir: Path, remedy: str = "tune under another --name") -> Iterator[None]:
    """Create a run directory and lock it for the time of a `with` block.

    Raises LockedError where another process has the lock; the message names that process and the `remedy`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(lock_file(RunDir(run_dir).lock, wait=False))
        except BlockingIOError as error:
            host, _, process = str(error).rpartition(":")
            place = "" if host in ("", socket.gethostname()) else f" of {host}"
            raise LockedError(
                f"{run_dir}: process {process or 'unknown'}{place} works here; wait for it or {remedy}"
            ) from None
        file.truncate(0)
        file.write(f"{socket.gethostname()}:{os.getpid()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def find_active_process(run_dir: Path) -> int | None:
    """Return the id of the process of this machine that works in a run directory now, or None.

    The lock file is read, never locked, so that a reader cannot stop a study from starting.
    """
    import psutil

    files = RunDir(run_dir)
    try:
        host, _, process_id = files.lock.read_text(encoding="utf-8").rpartition(":")
        if host not in ("", socket.gethostname()):  # earlier versions wrote no host
            return None
        process, began = int(process_id), files.lock.stat().st_mtime
        # a nightly process continues with other studies, and the system reuses process ids
        ended = files.study.exists() and files.study.stat().st_mtime >= began
        alive = not ended and psutil.Process(process).create_time() <= began
    except (OSError, ValueError, psutil.Error):
        return None
    return process if alive else None


def with_name(run_dir: Path) -> Path:
    """Return the path of a run directory under its own name: absolute where it is a link, `.` or `..`.

    >>> str(with_name(Path("runs/first")))
    'runs/first'
    """
    return run_dir.resolve() if run_dir.name in ("", "..") or run_dir.is_symlink() else run_dir


def resume_command(run_dir: Path) -> str:
    """Return the command that continues a run, quoted for a shell.

    >>> resume_command(Path("runs/my run"))
    "autotune resume 'runs/my run'"
    """
    return f"autotune resume {shlex.quote(str(run_dir))}"


def log_command(run_dir: Path) -> str:
    """Return the command that logs a run to MLflow, quoted for a shell."""
    return f"autotune report {shlex.quote(str(run_dir))} --log"


def find_runs_dir(run_dir: Path) -> str:
    """Return the `runs` directory that contains a run now; its config may name an earlier place.

    Runs of a night lie deeper than others, so the nearest directory with an MLflow lock counts.
    """
    above = list(with_name(run_dir).parents)
    return str(next((place for place in above if RunsDir(place).mlflow_lock.exists()), above[0]))


def remove_empty_run(run_dir: Path) -> None:
    """Remove the directory of a run without a trial and without a measured batch size, unless another process works there."""
    with contextlib.suppress(LockedError, OSError), lock_run_dir(run_dir):
        if not RunDir(run_dir).trials.exists() and not RunDir(run_dir).batch_search.exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.parent.rmdir()  # fails where other runs lie there


def find_latest_run(runs: Path) -> Path:
    """Return the directory of the run that changed last; ConfigError where there is none."""
    run_dirs = [path.parent for path in runs.glob(f"*/{TRIALS_FILE}")]
    if not run_dirs:
        raise ConfigError(f"no run in {runs}/; make one with autotune tune, or name its directory")
    return max(run_dirs, key=lambda path: RunDir(path).trials.stat().st_mtime)
