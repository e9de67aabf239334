"""Serve this machine's device on standard input and output, for a study at the other end of a command's pipe.

Standard output belongs to the frames: whatever user code prints goes to standard error. The process ends with all its
children when its input ends, at SIGTERM, SIGHUP or SIGINT, and at the latest `END_SECONDS` after that.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from types import FrameType

from autotune.errors import ConfigError
from autotune.fleet.far_end.device_server import DeviceServer, OpenDeviceRunner
from autotune.fleet.framing import FrameReader, to_frame
from autotune.fleet.messages import CallProgress, encode_message

BEAT_SECONDS = 5.0
"""Time between two signs of life."""
END_SECONDS = 1.5
"""Maximum time to end the children after a signal; the kernel kills those that are left with this process."""


class _Ended(BaseException):
    """The study has gone, or a signal arrived. Not an Exception, so that no handler catches it by accident."""


class FrameStream:
    """The frames on standard input and output, which no other code of this process can reach."""

    def __init__(self) -> None:
        self._input, self._output = os.dup(0), os.dup(1)  # neither is inherited by children
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a file descriptor is wanted
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read_to_end(self) -> None:
        """Put every request into `requests`, until the input ends."""
        reader = FrameReader()
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._input, 1 << 20):
                for frame in reader.feed(data):
                    self.requests.put(frame)

    def write(self, text: bytes) -> None:
        """Write a frame; OSError where nobody reads any more."""
        view = memoryview(to_frame(text))
        with self._lock:
            while view:
                view = view[os.write(self._output, view) :]

    def report(self, text: str) -> None:
        """Write a line of progress; the end of the input says that nobody reads it."""
        with contextlib.suppress(OSError):
            self.write(encode_message(CallProgress(text)))


def serve(open_runner: OpenDeviceRunner) -> int:
    """Answer requests until the input ends; return the exit code of the process.

    Raises ConfigError at a terminal, where no study is at the other end.
    """
    if os.isatty(0):
        raise ConfigError(
            "autotune serve answers a study, not a terminal; write this command into a class of fleet.yaml "
            "and run autotune tune --fleet fleet.yaml --on CLASS"
        )
    stream = FrameStream()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    server = DeviceServer(open_runner)
    try:
        threading.Thread(target=_read_then_end, args=(stream,), daemon=True).start()
        threading.Thread(target=_beat, args=(stream,), daemon=True).start()
        while True:
            stream.write(server.answer(stream.requests.get(), stream.report))
    except (_Ended, BrokenPipeError):
        return 0
    finally:
        server.close()


def _end(number: int, frame: FrameType | None) -> None:
    """Handle a signal: later ones are ignored, and a thread ends the process where its clean-up hangs."""
    del number, frame
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_exit_late, daemon=True).start()
    raise _Ended


def _exit_late() -> None:
    time.sleep(END_SECONDS)
    os._exit(1)


def _read_then_end(stream: FrameStream) -> None:
    stream.read_to_end()
    os.kill(os.getpid(), signal.SIGTERM)


def _beat(stream: FrameStream) -> None:
    beat = encode_message(CallProgress(""))
    with contextlib.suppress(OSError):
        while True:
            stream.write(beat)
            time.sleep(BEAT_SECONDS)
