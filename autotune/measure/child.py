"""The coordinator's end of one child process: start it, ask it, end it, and say why it died."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from autotune.measure.limits import CGROUP, FRACTION, RLIMIT, limit_cgroup, oom_kills, says_no_memory
from autotune.measure.messages import Failed, Spec
from autotune.measure.meters.cgroup import OwnCgroup
from autotune.records.json_codec import to_json
from autotune.records.measurement import Outcome

DETAIL_LINES = 3
"""Last lines of a dead child's error that go into a measurement."""

_NOT_INHERITED = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES")
# joins the cgroup before Python starts, so that the interpreter is charged as well
_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
_NUMBERS = itertools.count(1)


class Child:
    """One process in a session, and where possible a memory cgroup, of its own."""

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
        self._unread = b""
        self._log, self._log_begin = log, log_begin
        self._cgroup = cgroup
        self._own = cgroup.cgroup if cgroup is not None else None
        self._kills = oom_kills(self._own)
        self.limit = ""
        """What enforces the memory limit, if one was asked for."""
        self.environment: Mapping[str, str] = {}
        """What it has on top of this process's."""

    @classmethod
    def start(cls, spec: Spec, log: Path, environment: Mapping[str, str] | None = None) -> Self:
        """Start one; where a cgroup can enforce the spec's limit, it does, and the child need not."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}
        cgroup = _own_cgroup(spec.limit_bytes) if spec.device_kind == "cpu" else None
        theirs_requests, ours_requests = os.pipe()
        ours_replies, theirs_replies = os.pipe()
        # -P: a user's own autotune.py in the working directory is not ours
        command = [sys.executable, "-P", "-m", "autotune.measure.worker.main"]
        command += [str(number) for number in (os.getpid(), theirs_requests, theirs_replies)]
        if cgroup is not None:
            command = ["/bin/sh", "-c", _JOIN, str(cgroup.cgroup.path), *command]
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as output:
                log_begin = output.tell()  # a session before this one may have left a log of the same name
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs_requests, theirs_replies),
                    start_new_session=True,
                    env={**inherited, **(environment or {})},
                )
        finally:
            os.close(theirs_requests)
            os.close(theirs_replies)
        child = cls(process, (ours_requests, ours_replies), log, log_begin, cgroup)
        child.environment = environment or {}
        if spec.limit_bytes is not None:
            child.limit = CGROUP if cgroup is not None else FRACTION if spec.device_kind == "cuda" else RLIMIT
        child._send(to_json(replace(spec, limit_bytes=None) if cgroup is not None else spec))
        return child

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The child's reply; Failed if it raised, died or took longer. Only after a reply may it be asked again."""
        deadline = time.monotonic() + seconds
        try:
            self._send(request)
            reply = self._receive(deadline)
        except TimeoutError:
            self.end()
            raise Failed(Outcome.TIMEOUT, self._with_log(f"no answer within {seconds:g} s")) from None
        except EOFError:
            raise self._autopsy() from None
        except BaseException:  # an interrupt between request and reply: whatever comes now answers nobody
            self.end()
            raise
        if "ok" in reply:
            return dict(reply["ok"])
        failed = reply["failed"]
        failure = Failed(Outcome(failed["outcome"]), failed["detail"], failed["error"])
        if failure.ours() is None:
            failure.detail = f"{failure.error}: {failure.detail}"
        raise failure

    def end(self) -> None:
        """Kill it and everything that it started, and remove its cgroup."""
        for end in (self._requests, self._replies):
            if end >= 0:
                os.close(end)
        self._requests = self._replies = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._cgroup is not None:
            self._cgroup.remove()
            self._cgroup = None
        if self._log.exists() and self._log.stat().st_size == 0:
            self._log.unlink()

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reply, or its lack, tells why
            while data:
                data = data[os.write(self._requests, data) :]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _autopsy(self) -> Failed:
        """Why a child closed its pipe without an answer."""
        code = self._process.wait()
        said = self._last_lines()
        killed_for_memory = code == -signal.SIGKILL and oom_kills(self._own) > self._kills
        self.end()
        if killed_for_memory:
            where = "its memory limit" if self.limit == CGROUP else "the machine's memory"
            return Failed(Outcome.OUT_OF_MEMORY, f"killed by the kernel: over {where}")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        outcome = Outcome.OUT_OF_MEMORY if says_no_memory(said) else Outcome.CRASHED
        return Failed(outcome, self._with_log(how))

    def _with_log(self, reason: str) -> str:
        said = self._last_lines()
        return f"{reason}: {said}" if said else reason

    def _last_lines(self) -> str:
        try:
            lines = self._log.read_bytes()[self._log_begin :].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-DETAIL_LINES:])


def _own_cgroup(limit_bytes: int | None) -> OwnCgroup | None:
    """None where cgroups cannot be written; then the child limits itself."""
    try:
        own = OwnCgroup(f"{os.getpid()}-{next(_NUMBERS)}")
    except OSError:
        return None
    try:
        if limit_bytes is not None:
            limit_cgroup(own.cgroup, limit_bytes)
    except OSError:
        own.remove()
        return None
    return own
