"""Lock a device against other studies on its machine: two of them would disturb each other's times."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import DeviceRefusedError

LOCK_DIR = Path("/tmp/autotune-locks")
"""Directory of the locks: one for all users, whatever their TMPDIR is."""
POLL_SECONDS = 0.1
"""Time between two attempts to take a lock that another process holds."""
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags of every lock file: anybody may have put a link into the directory."""


def name_locks(kind: str) -> list[str]:
    """Return the names of the locks of this process's device: the GPU, or each CPU that the process may use.

    Processes on disjoint CPUs thus measure at the same time, and those that share one do not. Names are sorted, so that no
    two processes wait for each other.
    """
    if kind != "cuda":
        return [f"cpu-{number:04d}" for number in sorted(os.sched_getaffinity(0))]
    gpu = find_visible_gpu()
    return [f"gpu-{_read_uuid(int(gpu)) if gpu.isdigit() else gpu}"]


def find_visible_gpu() -> str:
    """Return the first GPU that this process sees, as CUDA_VISIBLE_DEVICES names it: by its index or its identity."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


@contextlib.contextmanager
def lock_device(kind: str, report: Callable[[str], None], directory: Path | None = None) -> Iterator[None]:
    """Hold the locks of this process's device for the time of a `with` block; wait for another process, and report that.

    Raises DeviceRefusedError where the directory or a lock cannot be used; the directory is `LOCK_DIR` by default.
    """
    directory = directory or LOCK_DIR
    _make_directory(directory)
    with contextlib.ExitStack() as stack:
        for name in name_locks(kind):
            _lock(directory / f"{name}.lock", stack, report)
        yield


def is_in_use(kind: str, directory: Path | None = None) -> bool:
    """Return whether another process measures on this process's device now."""
    for name in name_locks(kind):
        try:
            lock = os.open((directory or LOCK_DIR) / f"{name}.lock", _FLAGS)
        except OSError:
            continue  # nobody has measured there yet
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _make_directory(directory: Path) -> None:
    """Make the directory of the locks for all users; refuse a link, which would lead elsewhere."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        if directory.is_symlink() or not directory.is_dir():
            raise DeviceRefusedError(f"{directory}: a link or a file, not the directory of locks; remove it") from None
    except OSError as error:
        raise DeviceRefusedError(f"{directory}: {error.strerror}; make it with: mkdir -m 1777 {directory}") from None
    else:
        directory.chmod(0o1777)


def _open_lock(path: Path) -> int:
    """Open a lock for reading, which suffices to lock it: in a directory with the sticky bit it may be another user's."""
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, _FLAGS)
        try:
            lock = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # another process made it meanwhile
            return os.open(path, _FLAGS)
    except OSError as error:
        raise DeviceRefusedError(f"{path}: {error.strerror}; remove it") from None
    os.fchmod(lock, 0o644)  # whatever the umask of this process is
    return lock


def _lock(path: Path, stack: contextlib.ExitStack, report: Callable[[str], None]) -> None:
    lock = _open_lock(path)
    stack.callback(os.close, lock)
    is_reported = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_reported:
                report(f"waiting for {path.stem} of {os.uname().nodename}, on which another study measures")
                is_reported = True
            time.sleep(POLL_SECONDS)


def _read_uuid(index: int) -> str:
    """Return the identity of a GPU; its index where the driver's library does not answer."""
    from autotune.measure.device.this_device import open_nvml

    try:
        nvml = open_nvml()
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except Exception:  # noqa: BLE001 - containers make the library fail with many kinds of exceptions
        return str(index)
