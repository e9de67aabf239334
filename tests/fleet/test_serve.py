"""The far end of a pipe as a process: what ends it, what it leaves, and what it tells of a command that fails."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.errors import DeviceLostError, DeviceRefusedError
from autotune.fleet.channel import Reach
from autotune.fleet.command import open_channel
from autotune.fleet.framing import FrameReader, to_frame
from autotune.fleet.messages import (
    CallFailed,
    CallProgress,
    MeasureCall,
    NodeFacts,
    OpenDevice,
    PrepareCall,
    code_identity,
    decode_reply,
    encode_message,
)
from autotune.fleet.remote_runner import RemoteRunner
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import make_config, wait_for_death
from tests.support.waiting import wait_for

FAR_END = (sys.executable, "-m", "autotune.testing.fake_far_end")
PLAN = Plan.traced(FakeRunner().graph)


def request(workload: str = "has a child", **environment: str) -> OpenDevice:
    config = make_config(Path()).model_dump(mode="json") | {"workload": workload}
    return OpenDevice(code_identity(), "fake", config, environment=environment)


class FarEnd:
    """A far end whose pipes the test holds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(FAR_END, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.reader, self.frames = FrameReader(), []

    def send(self, message: object) -> None:
        self.process.stdin.write(to_frame(encode_message(message)))
        self.process.stdin.flush()

    def receive(self) -> object:
        while True:
            while not self.frames:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, self.process.stderr.read().decode()
                self.frames += self.reader.feed(data)
            reply = decode_reply(self.frames.pop(0))
            if not isinstance(reply, CallProgress):
                return reply

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(number) for number in path.read_text().split()]


@pytest.mark.parametrize(
    "ending",
    [
        "SIGTERM",
        pytest.param("SIGHUP", marks=pytest.mark.slow),
        pytest.param("SIGINT", marks=pytest.mark.slow),
        "end of input",
    ],
)
def test_a_far_end_in_a_measurement_leaves_no_process_after_two_seconds(ending: str):
    far_end = FarEnd()
    far_end.send(request(FAKE_SECONDS="60"))
    assert isinstance(far_end.receive(), NodeFacts)
    children = far_end.children()
    far_end.send(MeasureCall(PLAN, 10**9))
    time.sleep(0.1)
    if ending == "end of input":
        far_end.process.stdin.close()
    else:
        far_end.process.send_signal(getattr(signal, ending))
    assert far_end.process.wait(2.0) == 0
    assert len(children) == 1
    assert wait_for_death(children[0], 0.5)


def test_a_study_killed_in_a_measurement_takes_its_far_end_along(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from tests.fleet.test_serve import *\n"
        f"runner = RemoteRunner(lambda report: open_channel(Reach('fake', Path({str(tmp_path)!r}), command=FAR_END), report),"
        " request('resnet18', FAKE_SECONDS='60'))\n"
        "runner.prepare(); print(runner.facts.pid, flush=True); runner.measure(PLAN, budget_bytes=1)"
    )
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    pid = int(study.stdout.readline())
    study.kill()
    study.wait()
    assert wait_for_death(pid, 2.0)


def test_input_and_output_of_user_code_are_not_the_pipe():
    far_end = FarEnd()
    far_end.send(request("prints"))
    far_end.receive()
    for _ in range(3):
        far_end.send(MeasureCall(PLAN, 10**9))
        far_end.receive()
    assert far_end.reader.noise == b""
    _, errors = far_end.process.communicate()
    assert errors.count(b"user code\nof a C library") == 3


def test_requests_sent_at_once_and_broken_ones_get_their_replies_in_order():
    far_end = FarEnd()
    frames = [encode_message(request("resnet18")), b"no JSON", b'{"type": "Unknown", "fields": {}}', b"[]"]
    frames.append(encode_message(PrepareCall()))
    far_end.process.stdin.write(b"a banner" + b"".join(map(to_frame, frames)))
    far_end.process.stdin.flush()
    kinds = [type(far_end.receive()) for _ in frames]
    assert kinds == [NodeFacts, CallFailed, CallFailed, CallFailed, PreparedWorkload]
    far_end.process.communicate()


def test_a_call_before_a_device_is_open_is_refused_without_a_traceback():
    far_end = FarEnd()
    far_end.send(PrepareCall())
    refused = far_end.receive()
    assert (refused.error, refused.detail) == (
        "ConfigError",
        "PrepareCall came before a device was open; open one first",
    )
    far_end.send(dataclasses.replace(request(), config={"whatever": 1}))
    failed = far_end.receive()
    assert (failed.error, failed.detail) == ("KeyError", "'workload'")
    _, errors = far_end.process.communicate()
    assert errors.count(b"Traceback") == 1  # of the second, which is a defect
    for reply in (refused, failed):
        (note,) = reply.to_error("node").__notes__
        assert note.startswith("On node:\nTraceback")
        assert note.endswith(f"{reply.error}: {reply.detail}")


def runner_of(tmp_path: Path, *command: str) -> RemoteRunner:
    reach = Reach("a100", tmp_path, command=command)
    return RemoteRunner(lambda report: open_channel(reach, report), request(), pause_seconds=0.0)


def test_a_command_that_fails_is_quoted_with_its_last_lines(tmp_path: Path):
    runner = runner_of(tmp_path, "sh", "-c", "echo Welcome; echo no such partition >&2; exit 3")
    told: list[str] = []
    runner.listen(told.append)
    with pytest.raises(DeviceLostError, match=r"ended with exit code 3: Welcome \| no such partition"):
        runner.prepare()
    assert len(told) == 4
    assert told[0].startswith("lost a device of class fake: ")


def test_a_command_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(
        DeviceRefusedError, match=r"^command 'srunn': No such file or directory; check `command` of the class$"
    ):
        runner_of(tmp_path, "srunn", "autotune", "serve").prepare()


def test_a_message_larger_than_a_pipe_arrives_both_ways(tmp_path: Path):
    channel = open_channel(Reach("fake", tmp_path, command=FAR_END), print)
    large = "x" * 5_000_000
    opened = dataclasses.replace(request("resnet18"), environment={"LARGE": large})
    assert isinstance(channel.ask(opened, print), NodeFacts)
    failed = dataclasses.replace(request("resnet18"), device_class=large, config={"whatever": 1})
    reply = channel.ask(failed, print)
    assert isinstance(reply, CallFailed)
    channel.close()


def test_a_far_end_that_neither_answers_nor_ends_counts_as_lost_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Started(subprocess.Popen):
        """A command that has written its first line, after which it ignores SIGTERM."""

        def __init__(self, command: object, **options: object) -> None:
            super().__init__(command, **options)
            pids.append(self.pid)
            wait_for(lambda: sum(path.stat().st_size > 0 for path in tmp_path.glob("a100-*.log")) == len(pids))

    pids: list[int] = []
    monkeypatch.setattr("autotune.fleet.command.subprocess.Popen", Started)
    monkeypatch.setattr("autotune.fleet.remote_runner.ATTEMPTS", 2)
    monkeypatch.setattr("autotune.fleet.command.START_SECONDS", 0.1)
    monkeypatch.setattr("autotune.fleet.command.CLOSE_SECONDS", 0.1)
    runner = runner_of(tmp_path, "sh", "-c", "trap '' TERM; echo started >&2; while :; do sleep 0.1; done")
    with pytest.raises(DeviceLostError, match=r"no sign of life for 0\.1 s: "):
        runner.prepare()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
