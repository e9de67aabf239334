"""Lock a device against other studies on its machine: two of them would disturb each other's times."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK_DIR = Path("/tmp/autotune-locks")
"""Directory of the locks: one for all users, whatever their TMPDIR is."""
POLL_SECONDS = 0.1
"""Time between two attempts to take a lock that another process holds."""


def name_locks(kind: str) -> list[str]:
    """Return the names of the locks of this process's device: the GPU, or each CPU that the process may use.

    Processes on disjoint CPUs thus measure at the same time, and those that share one do not. Names are sorted, so that no
    two processes wait for each other.
    """
    if kind != "cuda":
        return [f"cpu-{number:04d}" for number in sorted(os.sched_getaffinity(0))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    return [f"gpu-{_read_uuid(int(chosen)) if chosen.isdigit() else chosen}"]


@contextlib.contextmanager
def lock_device(kind: str, report: Callable[[str], None], directory: Path = LOCK_DIR) -> Iterator[None]:
    """Hold the locks of this process's device for the time of a `with` block; wait for another process, and report that."""
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another user made it
        directory.chmod(0o1777)
    with contextlib.ExitStack() as stack:
        for name in name_locks(kind):
            _lock(directory / f"{name}.lock", stack, report)
        yield


def is_in_use(kind: str, directory: Path = LOCK_DIR) -> bool:
    """Return whether another process measures on this process's device now."""
    for name in name_locks(kind):
        try:
            lock = os.open(directory / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # nobody has measured there yet
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
    return False


def _lock(path: Path, stack: contextlib.ExitStack, report: Callable[[str], None]) -> None:
    # another user's file in a directory with the sticky bit opens for reading alone, which suffices for a lock
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
