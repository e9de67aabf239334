"""Serve a fake runner as the far end of a fleet: `python -m autotune.testing.fake_far_end`.

The environment of the request has its options: `FAKE_SECONDS` is the time that each measurement takes, and `FAKE_LOCKS`
a directory, with which the device is locked as a real one is.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import PlanError
from autotune.fleet.far_end.device_lock import lock_device
from autotune.fleet.far_end.serve import serve
from autotune.fleet.messages import OpenDevice
from autotune.testing.fake_runner import FakeRunner

OPENER = "autotune.testing.fake_far_end:open_fake_device"
"""Name of this module's opener."""


@contextlib.contextmanager
def open_fake_device(request: OpenDevice, report: Callable[[str], None]) -> Iterator[FakeRunner]:
    """Open a fake runner.

    The workload's name chooses what goes wrong: `prints`, `kills`, `raises PlanError`, `has a child` or `never opens`; any
    other name goes well.
    """
    workload = str(request.config["workload"])
    seconds = float(request.environment.get("FAKE_SECONDS", "0"))
    locks = request.environment.get("FAKE_LOCKS")

    def work(runner: FakeRunner) -> None:
        del runner
        match workload:
            case "prints":
                print("user code", flush=True)
                os.write(1, b"of a C library")
            case "kills":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises PlanError":
                raise PlanError("the plan was made for another graph")
        time.sleep(seconds)

    if workload == "never opens":
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.ExitStack() as stack:
        if locks:
            stack.enter_context(lock_device("cpu", report, Path(locks)))
        if workload == "has a child":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            stack.callback(child.kill)
        yield FakeRunner(before_measure=work)


if __name__ == "__main__":
    sys.exit(serve(open_fake_device))
