"""The coordinator's end of one child process: start it, send requests, end it, and explain its death."""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

from autotune.measure.limits import LimitKind, limit_cgroup, oom_kills, reports_no_memory
from autotune.measure.messages import (
    ChildError,
    Expects,
    Failure,
    ReplyT,
    WorkProgress,
    decode,
    encode,
    ignore_progress,
)
from autotune.measure.meters.cgroup import OwnCgroup
from autotune.measure.spec import Spec
from autotune.records.measurement import Outcome

DETAIL_LINES = 3
"""Number of last lines of a dead child's log that a measurement quotes."""
DETAIL_BYTES = 2**16
"""Bytes at the end of a log that are searched for these lines: a model that prints may fill gigabytes."""

POLL_SECONDS = 1.0
"""Time after which a wait for a request or a reply looks whether the child still lives."""
EXIT_SECONDS = 10.0
"""Time for the exit of a child that closed its pipe."""

# the harness sets malloc's options itself; variables that decide speed are the user's, as in the training loop
_NOT_INHERITED = ("MALLOC_", "GLIBC_TUNABLES")
# joins the cgroup before Python starts, so that the interpreter is charged as well
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_NUMBERS = itertools.count(1)


class Child:
    """One process in a session of its own, and in a memory cgroup of its own where that is possible."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pipes: tuple[int, int],
        log: Path,
        log_begin: int,
        cgroup: OwnCgroup | None,
    ) -> None:
        self._process = process
        self._requests, self._replies = pipes
        os.set_blocking(self._requests, False)  # a child that hangs may never read
        self._unread = b""
        self._log, self._log_begin = log, log_begin
        self._cgroup_owner = cgroup
        self._cgroup = cgroup.cgroup if cgroup is not None else None
        self._kills = oom_kills(self._cgroup)
        self.limit = ""
        """Mechanism that enforces the memory limit; empty without a limit."""
        self.environment: Mapping[str, str] = {}
        """Variables set on top of this process's environment."""
        self.report: Callable[[WorkProgress], None] = ignore_progress
        """Receives the progress of a request."""

    @classmethod
    def start(cls, spec: Spec, log: Path, environment: Mapping[str, str] | None = None) -> Self:
        """Start a child; where a cgroup enforces the spec's limit, the child does not limit itself."""
        with contextlib.ExitStack() as resources, contextlib.ExitStack() as passed:
            cgroup = _create_cgroup(spec.limit_bytes) if spec.device_kind == "cpu" else None
            if cgroup is not None:
                resources.callback(cgroup.remove)
            child_requests, requests = os.pipe()
            passed.callback(os.close, child_requests)
            resources.callback(os.close, requests)
            replies, child_replies = os.pipe()
            passed.callback(os.close, child_replies)
            resources.callback(os.close, replies)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                log_begin = output.tell()  # a session before this one may have left a log of the same name
                process = subprocess.Popen(
                    _command(cgroup, child_requests, child_replies),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(child_requests, child_replies),
                    start_new_session=True,
                    env=_inherited_environment() | dict(environment or {}),
                )
            child = cls(process, (requests, replies), log, log_begin, cgroup)
            resources.pop_all()  # `end` closes them from here on
        child.environment = environment or {}
        if spec.limit_bytes is not None:
            emulated = LimitKind.FRACTION if spec.device_kind == "cuda" else LimitKind.RLIMIT
            child.limit = (LimitKind.CGROUP if cgroup is not None else emulated).value
        try:
            sent = replace(spec, limit_bytes=None) if cgroup is not None else spec
            child._send(encode(sent), time.monotonic() + spec.time_limit_seconds)
        except BaseException:
            child.end()
            raise
        return child

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Expects[ReplyT], seconds: float) -> ReplyT:
        """Send a request and return its reply; the next request must wait for the reply.

        Raises ChildError if the child raised an exception, died, or took longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        try:
            self._send(encode(request), deadline)
            while isinstance(reply := self._receive(deadline), WorkProgress):
                self.report(reply)
        except TimeoutError:
            self.end()
            raise ChildError(Outcome.TIMEOUT, self._with_log(f"no answer within {seconds:g} s")) from None
        except EOFError:
            raise self._explain_death() from None
        except BaseException:  # an interrupt between request and reply: a later reply would answer another request
            self.end()
            raise
        if not isinstance(reply, Failure):
            return cast("ReplyT", reply)
        error = ChildError(reply.outcome, reply.detail, reply.error)
        if reply.trace:  # the log, which has it too, may be removed before anyone reads it
            error.add_note(f"In the child process:\n{reply.trace}")
        if error.as_autotune_error() is None:
            error.detail = f"{reply.error}: {reply.detail}"
        raise error

    def end(self) -> None:
        """Kill the child and everything that it started, and remove its cgroup."""
        for pipe in (self._requests, self._replies):
            if pipe >= 0:
                os.close(pipe)
        self._requests = self._replies = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._cgroup_owner is not None:
            self._cgroup_owner.remove()
            self._cgroup_owner = None
        if self._log.exists() and self._log.stat().st_size == 0:
            self._log.unlink()

    def _send(self, data: bytes, deadline: float) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reply, or its absence, gives the reason
            while data and self.alive:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if select.select([], [self._requests], [], min(left, POLL_SECONDS))[1]:
                    data = data[os.write(self._requests, data) :]

    def _receive(self, deadline: float) -> Any:
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            # a process that the child forked may hold the pipe open when the child has died
            has_ended = not self.alive
            if not select.select([self._replies], [], [], 0 if has_ended else min(left, POLL_SECONDS))[0]:
                if has_ended:
                    raise EOFError
                continue
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return decode(line)

    def _explain_death(self) -> ChildError:
        """Return the error for a child that closed its pipe without a reply."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            reason = (
                f"closed its pipe, but did not exit within {EXIT_SECONDS:g} s: a thread that is no daemon may run on"
            )
            return ChildError(Outcome.CRASHED, self._with_log(reason))
        last_lines = self._last_lines()
        killed_for_memory = code == -signal.SIGKILL and oom_kills(self._cgroup) > self._kills
        self.end()
        if killed_for_memory:
            where = "its memory limit" if self.limit == LimitKind.CGROUP else "the machine's memory"
            return ChildError(Outcome.OUT_OF_MEMORY, f"killed by the kernel: over {where}")
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            reason += " from outside, as systemd-oomd or earlyoom do where memory is short"
        outcome = Outcome.OUT_OF_MEMORY if reports_no_memory(last_lines) else Outcome.CRASHED
        return ChildError(outcome, self._with_log(reason))

    def _with_log(self, reason: str) -> str:
        last_lines = self._last_lines()
        return f"{reason}: {last_lines}" if last_lines else reason

    def _last_lines(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - DETAIL_BYTES))
                lines = log.read(DETAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-DETAIL_LINES:])


def _inherited_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}


def _command(cgroup: OwnCgroup | None, requests: int, replies: int) -> list[str]:
    # -P: an autotune.py in the user's working directory must not replace this package
    command = [sys.executable, "-P", "-m", "autotune.measure.worker.main"]
    command += [str(number) for number in (os.getpid(), requests, replies)]
    return command if cgroup is None else ["/bin/sh", "-c", _JOIN, str(cgroup.cgroup.path), *command]


def _create_cgroup(limit_bytes: int | None) -> OwnCgroup | None:
    """Create a cgroup for one child; None where cgroups cannot be written, then the child limits itself."""
    try:
        created = OwnCgroup(f"{os.getpid()}-{next(_NUMBERS)}")
    except OSError:
        return None
    try:
        if limit_bytes is not None:
            limit_cgroup(created.cgroup, min(limit_bytes, created.cgroup.limit_bytes() or limit_bytes))
    except OSError:
        created.remove()
        return None
    return created
