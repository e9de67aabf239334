"""A process ends with the one that started it."""

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_whose_parent_has_ended_before_it_could_ask_ends_too(number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        "from autotune.measure.parent import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]), signal.Signals(int(sys.argv[2])))\n"
        "print('on')"
    )
    for parent, expected in ((os.getpid(), (0, "on\n")), (os.getppid(), (-number, ""))):
        command = [sys.executable, "-c", code, str(parent), str(int(number))]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        assert (child.returncode, child.stdout) == expected
