"""The contract of runners over every engine of the fleet, with a fake device at the far end."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.fleet import ENGINES
from autotune.fleet.channel import Channel, Reach
from autotune.testing.fake_far_end import OPENER
from autotune.testing.runner_contract import RunnerContract

FAR_END = (sys.executable, "-m", "autotune.testing.fake_far_end")


class TestLocal(RunnerContract):
    is_in_this_process = True

    def open_channel(self, directory: Path, report: Callable[[str], None]) -> Channel:
        return ENGINES["local"](Reach("fake", directory, opener=OPENER), report)


@pytest.mark.slow
class TestCommand(RunnerContract):
    def open_channel(self, directory: Path, report: Callable[[str], None]) -> Channel:
        return ENGINES["command"](Reach("fake", directory, command=FAR_END), report)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
class TestRay(RunnerContract):
    tells_of_waits = False

    def open_channel(self, directory: Path, report: Callable[[str], None]) -> Channel:
        return ENGINES["ray"](Reach("fake", directory, resource="fake", opener=OPENER), report)
