"""Memory that the kernel charges to a process's own memory cgroup, v1 or v2."""

import contextlib
import os
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

PREFIX = "autotune-"
"""Prefix of the names of cgroups that contain one child process and nothing else."""

_ROOT = Path("/")
_LIMITS = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "cpuset.mems")
"""Files with the limits of a cgroup (version 2)."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """An existing memory cgroup."""

    path: Path
    version: int

    @classmethod
    def current(cls, root: Path = _ROOT) -> Self | None:
        """Return the cgroup of this process; None where the kernel shows none."""
        try:
            lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        for line in sorted(lines, reverse=True):  # v1's numbered hierarchies before v2's 0
            _, controllers, inside = line.split(":", 2)
            if "memory" in controllers.split(","):
                version, mount = 1, root / "sys/fs/cgroup/memory"
            elif not controllers:
                version, mount = 2, root / "sys/fs/cgroup"
            else:
                continue
            path = mount / inside.lstrip("/")
            for place in (path, mount):  # in a container the mount is the container's own cgroup
                if (place / "cgroup.procs").exists():
                    return cls(place, version)
        return None

    def usage_bytes(self) -> int:
        """Return the bytes that are charged now."""
        return self._number("memory.usage_in_bytes" if self.version == 1 else "memory.current")

    def limit_bytes(self) -> int | None:
        """Return the limit on the charge of all its processes together; None without a limit of its own."""
        path = self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")
        text = path.read_text(encoding="utf-8").strip() if path.exists() else "max"
        # v1 writes a number near 2^63 for no limit
        return None if text == "max" or int(text) >= 2**60 else int(text)

    def tightest_limit(self) -> tuple[int, int] | None:
        """Return (bytes left, limit) where a limit leaves the fewest bytes: its own or one around it; None without any.

        Page cache that the kernel drops when a process needs memory counts as left.
        """
        found = []
        for path in (self.path, *self.path.parents):
            if not (path / "cgroup.procs").exists():
                break
            cgroup = Cgroup(path, self.version)
            if (limit := cgroup.limit_bytes()) is not None:
                found.append((max(0, limit - max(0, cgroup.usage_bytes() - cgroup.reclaimable_bytes())), limit))
        return min(found, default=None)

    def file_bytes(self) -> int:
        """Return the page cache of files, without tmpfs."""
        counts = self._statistics()
        cache, shmem = ("total_cache", "total_shmem") if self.version == 1 else ("file", "shmem")
        return max(0, int(counts[cache]) - int(counts[shmem]))

    def reclaimable_bytes(self) -> int:
        """Return the page cache that no process used lately; 0 where the kernel does not tell."""
        try:
            return int(self._statistics().get("total_inactive_file" if self.version == 1 else "inactive_file", 0))
        except OSError:
            return 0

    def oom_kills(self) -> int:
        """Count the processes that the kernel killed here for memory so far."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        try:
            counts = dict(line.split() for line in (self.path / name).read_text(encoding="utf-8").splitlines())
        except OSError:
            return 0
        return int(counts.get("oom_kill", 0))

    def _statistics(self) -> dict[str, str]:
        return dict(line.split() for line in (self.path / "memory.stat").read_text(encoding="utf-8").splitlines())

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text(encoding="utf-8"))


class CgroupMeter:
    """Anonymous memory, tmpfs, kernel memory, and the page cache that grew since entry."""

    name = "cgroup"

    def __init__(self, cgroup: Cgroup | None = None, root: Path = _ROOT) -> None:
        self._cgroup = cgroup or Cgroup.current(root)
        self._file_at_entry: int | None = None
        self._peak: int | None = None
        self._uncertain: int | None = None
        self._peak_file: IO[str] | None = None

    def unavailable_reason(self) -> str:
        if self._cgroup is None:
            return "the kernel shows no memory cgroup"
        if not self._cgroup.path.name.startswith(PREFIX):
            return f"this process shares {self._cgroup.path} with others"
        path = self._cgroup.path / ("memory.max_usage_in_bytes" if self._cgroup.version == 1 else "memory.peak")
        # root has access to every file, also to one that the kernel lets nobody write
        if not os.access(path, os.W_OK) or not path.stat().st_mode & stat.S_IWUSR:
            return f"{path} cannot be reset (v2 needs Linux 6.12)"
        return ""

    def now_bytes(self) -> int:
        assert self._cgroup is not None
        return self._cgroup.usage_bytes() - self._old_cache()

    @property
    def peak_bytes(self) -> int:
        if self._peak is not None:
            return self._peak
        assert self._cgroup is not None
        if self._peak_file is None:
            highest = self._cgroup._number("memory.max_usage_in_bytes")
        else:
            self._peak_file.seek(0)
            highest = int(self._peak_file.read())
        return highest - self._old_cache()

    @property
    def unsure_bytes(self) -> int:
        """Bytes of page cache that shrank or grew since entry; the peak may or may not include them.

        If the machine lacks memory, the kernel drops pages of libraries from any process's cgroup.
        """
        if self._uncertain is not None:
            return self._uncertain
        assert self._cgroup is not None
        cached = self._cgroup.file_bytes()
        return 0 if self._file_at_entry is None else abs(cached - self._file_at_entry)

    def _old_cache(self) -> int:
        """Return the cache from before entry; under a limit the kernel may have dropped some of it since."""
        assert self._cgroup is not None
        cached = self._cgroup.file_bytes()
        return cached if self._file_at_entry is None else min(self._file_at_entry, cached)

    def __enter__(self) -> Self:
        assert self._cgroup is not None
        self._peak = self._uncertain = None
        self._file_at_entry = self._cgroup.file_bytes()
        if self._cgroup.version == 1:
            (self._cgroup.path / "memory.max_usage_in_bytes").write_text("0", encoding="utf-8")
        else:  # v2 resets for one open file alone
            self._peak_file = (self._cgroup.path / "memory.peak").open("r+")
            self._peak_file.write("reset")
            self._peak_file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peak, self._uncertain = self.peak_bytes, self.unsure_bytes
        self._file_at_entry = None
        if self._peak_file is not None:
            self._peak_file.close()
            self._peak_file = None


class OwnCgroup:
    """A new cgroup for one process, below this process's cgroup; on v2 beside it where below is not allowed.

    As a context manager it moves this process in; on exit it moves the process back and removes the cgroup. Raises
    OSError where the hierarchy is not writable.
    """

    def __init__(self, name: str = "", root: Path = _ROOT) -> None:
        home = Cgroup.current(root)
        if home is None:
            raise FileNotFoundError("the kernel shows no memory cgroup")
        self._home = home
        self.cgroup = _make(home, f"{PREFIX}{name or os.getpid()}")

    def __enter__(self) -> Cgroup:
        (self.cgroup.path / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        return self.cgroup

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self._home.path / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        self.remove()

    def remove(self) -> None:
        """Kill the processes that are left, and remove the cgroup; a killed process leaves some milliseconds later."""
        for _ in range(50):
            self._kill_processes()
            try:
                self.cgroup.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
            else:
                return

    def _kill_processes(self) -> None:
        """Kill what a session of its own, such as a compiler's, kept from the signal to its process group."""
        try:
            pids = (self.cgroup.path / "cgroup.procs").read_text(encoding="utf-8").split()
        except OSError:
            return
        for pid in map(int, pids):
            if pid > 0 and pid != os.getpid():  # 0 stands for a process of another namespace
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def remove_stale(root: Path = _ROOT) -> None:
    """Remove the empty cgroups of earlier children that have ended: a kill -9 leaves them behind."""
    home = Cgroup.current(root)
    for place in (home.path, home.path.parent) if home is not None else ():
        for path in place.glob(f"{PREFIX}*"):
            pid = path.name.removeprefix(PREFIX).split("-")[0]
            if pid.isdigit() and not (root / "proc" / pid).exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


def _make(home: Cgroup, name: str) -> Cgroup:
    if home.version == 1:
        path = home.path / name
        path.mkdir(exist_ok=True)
        return Cgroup(path, 1)
    problem: OSError = FileNotFoundError(f"{home.path}: the memory controller cannot be delegated")
    for place in (home.path, home.path.parent):
        try:
            control = place / "cgroup.subtree_control"
            if "memory" not in control.read_text(encoding="utf-8").split():
                control.write_text("+memory", encoding="utf-8")
            child = Cgroup(place / name, 2)
            child.path.mkdir(exist_ok=True)
            if place != home.path:
                _copy_limits(home.path, child.path)
            return child
        except OSError as error:
            problem = error
    raise problem


def _copy_limits(source: Path, target: Path) -> None:
    """Give a cgroup beside another one its limits of memory and CPUs, which do not hold there.

    Raises OSError where one cannot be set, without the new cgroup: its processes would run on another machine than the user's.
    """
    try:
        for name in _LIMITS:
            limit = (source / name).read_text(encoding="utf-8").strip() if (source / name).exists() else ""
            if limit and limit.split()[0] != "max":
                (target / name).write_text(limit, encoding="utf-8")
    except OSError:
        with contextlib.suppress(OSError):
            target.rmdir()
        raise
