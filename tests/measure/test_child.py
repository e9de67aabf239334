"""The coordinator's end of a child process."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import StoreError
from autotune.measure import child
from autotune.measure.child import Child
from autotune.measure.messages import BatchSizeRequest, ChildError
from autotune.measure.spec import Spec
from autotune.measure.survey import explain_eager_failure
from autotune.records.measurement import Measurement, Outcome
from autotune.workloads.reference import WorkloadRef


def test_a_process_that_cannot_be_started_leaves_no_pipe_and_no_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    cgroup = SimpleNamespace(cgroup=SimpleNamespace(path=tmp_path / "cgroup"), remove=lambda: removed.append("cgroup"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(child, "_create_cgroup", lambda _: cgroup)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="temporarily unavailable"):
        Child.start(Spec(WorkloadRef("resnet18"), tmp_path), tmp_path / "child.log")
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert removed == ["cgroup"]


def ask_script(script: str, log: Path) -> ChildError:
    """Return the error of a request to a program that runs in place of a child; `replies` is its end of the pipe."""
    requests, replies = os.pipe(), os.pipe()
    code = f"import os, signal, time\nreplies = {replies[1]}\n{script}"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(replies[1],), stderr=output, start_new_session=True
        )
    for end in (requests[0], replies[1]):
        os.close(end)
    asked = Child(process, (requests[1], replies[0]), log, 0, None)
    with pytest.raises(ChildError) as caught:
        asked.ask(BatchSizeRequest(), 30.0)
    assert not asked.alive
    return caught.value


def test_a_child_that_dies_is_noticed_though_a_process_that_it_forked_holds_the_pipe(tmp_path: Path) -> None:
    script = "if os.fork() == 0:\n    time.sleep(60)\nos.kill(os.getpid(), signal.SIGKILL)"
    error = ask_script(script, tmp_path / "child.log")
    assert error.outcome is Outcome.CRASHED
    assert error.detail.startswith("killed by SIGKILL from outside, as systemd-oomd or earlyoom do")


def test_a_child_that_closes_its_pipe_and_does_not_exit_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "EXIT_SECONDS", 0.3)
    error = ask_script("os.close(replies)\ntime.sleep(60)", tmp_path / "child.log")
    assert error.outcome is Outcome.CRASHED
    assert error.detail.startswith("closed its pipe, but did not exit within 0.3 s")


def test_a_full_disk_is_not_blamed_on_plain_pytorch() -> None:
    full = Measurement(Outcome.DISK_FULL, "No space left on device")
    error = explain_eager_failure(WorkloadRef("resnet18"), full)
    assert isinstance(error, StoreError)  # no evidence against a plan
    message = str(error)
    assert "No space left on device; free space on the disk of the run directory" in message
    assert "run it once without autotune" not in message


def test_steps_that_are_too_slow_to_measure_are_not_called_broken() -> None:
    slow = Measurement(Outcome.TIMEOUT, "no answer within 300 s")
    message = str(explain_eager_failure(WorkloadRef("resnet18"), slow))
    assert "too slow to measure, or hang: no answer within 300 s; make the batch smaller" in message
    assert "fix that first" not in message
