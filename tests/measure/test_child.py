"""The coordinator's end of a child process."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import StoreError
from autotune.ir.plan import Plan
from autotune.measure import child
from autotune.measure.child import Child
from autotune.measure.messages import BatchSizeRequest, ChildError, EagerResultsRequest, Failure, decode, encode
from autotune.measure.numerics import find_expected_results
from autotune.measure.spec import Spec
from autotune.measure.survey import explain_eager_failure, explain_survey_failure
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


def test_a_child_that_hangs_before_it_reads_a_large_request_is_ended_at_the_time_limit(tmp_path: Path) -> None:
    requests, replies = os.pipe(), os.pipe()
    process = subprocess.Popen(["sleep", "60"], pass_fds=(requests[0], replies[1]), start_new_session=True)
    for end in (requests[0], replies[1]):
        os.close(end)
    hanging = Child(process, (requests[1], replies[0]), tmp_path / "child.log", 0, None)
    with pytest.raises(ChildError, match=r"^no answer within 0\.2 s$") as caught:
        hanging.ask(EagerResultsRequest(Path("x" * 2**20)), 0.2)
    assert caught.value.outcome is Outcome.TIMEOUT
    assert not hanging.alive


def test_the_end_of_a_large_log_is_read_alone(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.touch()
    os.truncate(log, 2**26)  # of a model that prints
    tracemalloc.start()
    try:
        error = ask_script("os.write(2, b'\\nlast words\\n')\nos._exit(3)", log)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.detail.endswith("last words")
    assert peak_bytes < 2**24


def test_an_error_arrives_though_the_disk_of_the_log_is_full(tmp_path: Path) -> None:
    requests, replies = os.pipe(), os.pipe()
    command = [sys.executable, "-P", "-m", "autotune.measure.worker.main"]
    command += [str(number) for number in (os.getpid(), requests[0], replies[1])]
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command, pass_fds=(requests[0], replies[1]), stderr=full)
    for end in (requests[0], replies[1]):
        os.close(end)
    os.write(requests[1], encode(Spec(WorkloadRef("zoo"), tmp_path, scratch=tmp_path)) + encode(BatchSizeRequest()))
    with os.fdopen(replies[0], "rb") as lines:
        reply = decode(lines.readline())
    os.close(requests[1])
    process.wait(60)
    assert isinstance(reply, Failure)
    assert "no zoo workload" in reply.detail


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


def test_a_disk_that_fills_up_while_a_workload_prepares_is_no_evidence_against_a_plan(tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ChildError(Outcome.DISK_FULL, "No space left on device", "OSError")

    workload = WorkloadRef("resnet18")
    error = explain_survey_failure(
        workload, Outcome.DISK_FULL, "No space left on device", seconds=600.0, limit_bytes=None
    )
    assert isinstance(error, StoreError)
    assert "No space left on device; free space on the disks of the run directory, the stores and" in str(error)
    children: Any = SimpleNamespace(ask=refuse)
    with pytest.raises(StoreError, match="the captured step could not be written: No space left on device; free space"):
        find_expected_results(children, Spec(workload, tmp_path), Plan((0,)), tmp_path)


def test_a_workload_that_takes_too_long_is_told_how_to_import_its_file_without_training() -> None:
    workload = WorkloadRef("train.py:factory")
    slow = explain_eager_failure(workload, Measurement(Outcome.TIMEOUT, "no answer within 300 s"))
    late = explain_survey_failure(workload, Outcome.TIMEOUT, "", seconds=600.0, limit_bytes=None)
    for error in (slow, late):
        assert 'if its file trains when it is imported, put that under `if __name__ == "__main__":`' in str(error)
