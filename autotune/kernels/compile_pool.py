"""Compile regions in processes of their own, one for each CPU, whose memory and files do not stay.

What inductor writes lies in a scratch directory that later compilations reuse for its precompiled header. If a process
was killed while it compiled, the next pool deletes that directory, because a file in it may be incomplete.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from autotune import errors
from autotune.errors import CaptureError
from autotune.kernels.compile_worker import encode_request, lock_where_possible
from autotune.kernels.kernel_cache import compiler_directory, kernel_directory, writing

if TYPE_CHECKING:
    from autotune.kernels.compiled_region import CompiledRegion

_log = logging.getLogger(__name__)

Listen = Callable[[int, int], None]
"""Receiver of the number of compiled regions and of all to compile."""

MAX_PROCESSES = 8
"""Maximum number of compiling processes."""
PROCESS_BYTES = 700 * 2**20
"""Memory for one compiling process and its compiler, which take about 600 MiB."""
_OF_INDUCTOR = ("TORCHINDUCTOR_", "TORCH_COMPILE_")
"""Beginnings of variables that change what inductor generates, and that no entry's key contains."""


def compile_in_pool(regions: Sequence["CompiledRegion"], listen: Listen | None = None) -> None:
    """Compile regions and write their entries.

    Raises:
        CaptureError: Inductor cannot compile a region, or a compiling process was killed.
        ConfigError: No C++ compiler works, or the directory of compiled kernels cannot be used.
    """
    if not regions:
        return
    with _lock_compilation():
        missing = [region for region in regions if not region.is_cached]  # another process may have compiled some
        if missing:
            _compile(missing, listen)


def _compile(regions: Sequence["CompiledRegion"], listen: Listen | None) -> None:
    waiting = deque(regions)
    running: dict[Connection, tuple[_Worker, CompiledRegion]] = {}
    count = min(len(regions), len(os.sched_getaffinity(0)), MAX_PROCESSES, max(1, free_memory() // PROCESS_BYTES))
    if listen is None:  # a training loop, which would stand still without a word
        _log.warning("autotune: compiling %d regions, once for this machine: 1 to 6 s each", len(regions))
    with _workers(count) as idle:
        while waiting or running:
            while waiting and idle:
                worker, region = idle.pop(), waiting.popleft()
                worker.begin(region)
                running[worker.replies] = worker, region
            done = len(regions) - len(waiting) - len(running)
            _log.info("compiled %d of %d regions", done, len(regions))
            if listen is not None:
                listen(done, len(regions))
            for replies in wait(list(running)):
                assert isinstance(replies, Connection)
                worker, region = running.pop(replies)
                worker.finish(region)
                idle.append(worker)


def free_memory(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that further processes may take: of the machine, and within the limits of this process's cgroups."""
    available = _read_words(Path("/proc/meminfo")).get("MemAvailable:")
    free = MAX_PROCESSES * PROCESS_BYTES if available is None else 2**10 * int(available)
    name = next((line.removeprefix("0::/") for line in _read(membership).splitlines() if line.startswith("0::/")), "")
    for folder in (cgroups / name, *(cgroups / name).parents):
        if not folder.is_relative_to(cgroups):
            break
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdigit() and used:  # else there is no limit
            counts = _read_words(folder / "memory.stat")
            cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
            free = min(free, int(limit) - int(used) + cached)
    return max(0, free)


def _read_words(path: Path) -> dict[str, str]:
    """Return the second word of each line of a file by the first one."""
    return {words[0]: words[1] for line in _read(path).splitlines() if len(words := line.split()) > 1}


def _read(path: Path) -> str:
    """Return a file's text; empty where it does not exist, as on a system without cgroups of version 2."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@contextlib.contextmanager
def _lock_compilation() -> Iterator[None]:
    """Let one process of this machine compile at a time: several ranks or measuring processes need the same regions."""
    path = kernel_directory() / "compile.lock"
    with contextlib.ExitStack() as stack:
        with writing(path):
            lock = stack.enter_context(path.open("a+"))
        try:
            lock_where_possible(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("autotune: waiting for another process of this machine, which compiles regions")
            lock_where_possible(lock, fcntl.LOCK_EX)
        yield


class _Worker:
    """One compiling process, in a session of its own: a terminal's Ctrl-C must not break a compiler."""

    def __init__(self, scratch: Path, log: IO[bytes]) -> None:
        child_requests, requests = os.pipe()
        replies, child_replies = os.pipe()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_OF_INDUCTOR)}
        try:
            self._process = subprocess.Popen(
                # -P: a module of the user's working directory must not replace one of these
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "autotune.kernels.compile_worker",
                    str(child_requests),
                    str(child_replies),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_requests, child_replies),
                start_new_session=True,
                # inductor's precompiled header lies in the directory for temporary files
                env=environment | {"TORCHINDUCTOR_CACHE_DIR": str(scratch), "TMPDIR": str(scratch)},
            )
        finally:
            os.close(child_requests)
            os.close(child_replies)
        self._requests, self.replies = Connection(requests, readable=False), Connection(replies, writable=False)
        self._log = log

    def begin(self, region: "CompiledRegion") -> None:
        """Send a region; `replies` is readable once it is compiled."""
        with contextlib.suppress(BrokenPipeError):  # the missing reply gives the reason
            self._requests.send_bytes(encode_request(region, torch.get_num_threads(), torch.get_default_dtype()))

    def finish(self, region: "CompiledRegion") -> None:
        """Read the reply; raise the error of the compiling process."""
        try:
            name, message = json.loads(self.replies.recv_bytes())
        except EOFError:
            raise CaptureError(f"the process that compiled {region.__name__} ended: {self._explain()}") from None
        if name:
            raise getattr(errors, name, CaptureError)(message)

    def end(self) -> None:
        """End the process and its compiler."""
        self._requests.close()
        self.replies.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _explain(self) -> str:
        code = self._process.wait()
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{reason}: {lines[-1]}" if lines else reason


@contextlib.contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    """Start compiling processes, and end them after the block."""
    scratch = compiler_directory()
    with writing(scratch):
        _remove_incomplete(scratch.parent)
        scratch.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(count):
            worker = _Worker(scratch, stack.enter_context(tempfile.TemporaryFile()))
            stack.callback(worker.end)
            workers.append(worker)
        yield workers


def _remove_incomplete(scratch: Path) -> None:
    """Delete what processes left that died while they compiled, unless others use the scratch directory."""
    entries = scratch.parent / "entries"
    if not any(scratch.glob("unfinished-*")) and not any(entries.glob("unfinished-*")):
        return
    with scratch.with_suffix(".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or a file system without locks
            return
        if any(scratch.glob("unfinished-*")):  # a file of the compiler may be incomplete
            aside = scratch.with_name(f"{scratch.name}-{os.getpid()}")
            scratch.rename(aside)  # at once: nobody may use what a removal that fails would leave
            shutil.rmtree(aside, ignore_errors=True)
        for unfinished in entries.glob("unfinished-*"):
            shutil.rmtree(unfinished)
