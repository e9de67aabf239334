"""Reach a device by a command whose standard streams are those of `autotune serve`: ssh, srun, kubectl run -i."""

import contextlib
import itertools
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import DeviceRefusedError
from autotune.fleet.channel import Channel, FarEndLostError, Reach
from autotune.fleet.framing import FrameReader, to_frame
from autotune.fleet.messages import CallProgress, FleetCall, FleetReply, decode_reply, encode_message, is_json

SILENCE_SECONDS = 60.0
"""Time without a sign of life after which a far end counts as lost; it sends one every few seconds."""
START_SECONDS = 24 * 3600.0
"""Maximum time until the first sign of life: a job system may let the command wait for a node. Its end is noticed at once."""
NOTE_SECONDS = 10.0
"""Time without a sign of life after which the wait for the first one is reported."""
CLOSE_SECONDS = 3.0
"""Time in which a command may end by itself after its input was closed; then it is killed."""
DETAIL_LINES = 3
"""Number of last lines of a command's output that a message quotes."""
_NUMBERS = itertools.count(1)


class CommandChannel:
    """Channel over the standard input and output of a process; its error output goes to a log."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = command, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C in a terminal is for the study, which ends its trial first
                )
            except OSError as error:
                raise DeviceRefusedError(
                    f"command {command[0]!r}: {error.strerror}; check `command` of the class"
                ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._frames: list[bytes] = []
        self._reader = FrameReader()
        self._is_alive = False
        """True after the first frame."""

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        self._send(to_frame(encode_message(call)))
        if not self._is_alive and not select.select([self._replies], [], [], NOTE_SECONDS)[0]:
            report(f"waiting for the command {self._command[0]!r} to reach a device; its errors are in {self._log}")
        while True:
            is_first, frame = not self._is_alive, self._receive()
            try:
                reply = decode_reply(frame)
            except DeviceRefusedError:
                if is_first or is_json(frame):
                    raise
                # its writer died in the middle of a reply, and the command's own output ended the frame
                raise FarEndLostError(self._explain(f"its reply is cut off: {frame[-80:]!r}")) from None
            if not isinstance(reply, CallProgress):
                return reply
            if reply.text:
                report(reply.text)

    def close(self) -> None:
        # the far end ends at the end of its input, wherever it is; killing the command alone might leave it behind
        with contextlib.suppress(OSError):
            self._requests.close()
        if self._wait(CLOSE_SECONDS) is None:
            self._signal(signal.SIGTERM)
            self._wait(1.0)
        self._signal(signal.SIGKILL)  # what the command started and left behind
        if self._wait(CLOSE_SECONDS) is not None:  # a command of another user, such as sudo, cannot be killed
            self._process.wait()
        self._replies.close()
        if self._log.exists() and self._log.stat().st_size == 0:
            self._log.unlink()

    def _send(self, data: bytes) -> None:
        view, limit = memoryview(data), SILENCE_SECONDS if self._is_alive else START_SECONDS
        with contextlib.suppress(BrokenPipeError):  # the missing reply gives the reason
            while view:
                # a large plan fills the pipe of a command that hangs, and a write without a limit would wait for ever
                if not select.select([], [self._requests], [], limit)[1]:
                    raise FarEndLostError(self._explain(f"it reads no request for {limit:g} s"))
                view = view[self._requests.write(view) or 0 :]

    def _receive(self) -> bytes:
        limit = SILENCE_SECONDS if self._is_alive else START_SECONDS
        deadline = time.monotonic() + limit
        while not self._frames:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise FarEndLostError(self._explain(f"no sign of life for {limit:g} s"))
            data = self._replies.read(1 << 20)
            if not data:
                raise FarEndLostError(self._explain(self._describe_end()))
            try:
                self._frames += self._reader.feed(data)
            except ValueError as error:
                raise FarEndLostError(self._explain(f"{error}")) from None
            if self._reader.is_inside:  # a large reply comes in parts
                deadline = time.monotonic() + limit
        self._is_alive = True
        return self._frames.pop(0)

    def _describe_end(self) -> str:
        if (code := self._wait(1.0)) is None:
            return "it closed its output"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _wait(self, seconds: float) -> int | None:
        """Return the exit code of the command once it ended, negative for a signal; None after so many seconds.

        The process stays a zombie, so that its process group remains its own until `close` has signalled it.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        while (ended := os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _explain(self, reason: str) -> str:
        """Return a reason with the command and the last lines that it wrote."""
        text = self._log.read_bytes() if self._log.exists() else b""
        lines = [
            line for line in (self._reader.noise + b"\n" + text).decode(errors="replace").splitlines() if line.strip()
        ]
        quoted = " | ".join(lines[-DETAIL_LINES:])
        return f"{shlex.join(self._command)[:200]}: {reason}{': ' if quoted else ''}{quoted}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def open_channel(reach: Reach, report: Callable[[str], None]) -> Channel:
    """Start the command of a class; DeviceRefusedError where it cannot be started."""
    del report
    log = reach.log_dir / f"{reach.device_class}-{os.getpid()}-{next(_NUMBERS)}.log"
    return CommandChannel(reach.command, log)
