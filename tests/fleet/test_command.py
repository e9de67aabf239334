"""The command that reaches a device: its close ends, whatever it does; a reply that it cuts off is a lost device."""

import errno
import os
from pathlib import Path

import pytest

from autotune.errors import DeviceRefusedError
from autotune.fleet import command
from autotune.fleet.channel import FarEndLostError
from autotune.fleet.command import CommandChannel
from autotune.fleet.framing import to_frame
from autotune.fleet.messages import OpenDevice, RenewCall, Renewed, encode_message
from autotune.study.interrupts import expire_after


def test_a_command_of_another_user_is_closed_without_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(group: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    channel = CommandChannel(["cat"], tmp_path / "log")
    monkeypatch.setattr(os, "killpg", refuse)
    channel.close()
    assert channel._process.returncode == 0


def test_a_command_that_neither_ends_nor_dies_does_not_hold_up_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(os, "killpg", lambda group, number: None)  # a signal without an effect
    channel = CommandChannel(["sleep", "20"], tmp_path / "log")
    try:
        channel.close()
        assert channel._process.poll() is None
    finally:
        channel._process.kill()
        channel._process.wait()


def test_a_reply_that_is_cut_off_is_a_lost_device_and_a_first_frame_that_is_no_message_a_refusal(tmp_path: Path):
    def run(*parts: str) -> CommandChannel:
        return CommandChannel(["sh", "-c", 'printf %s "$@"', "sh", *parts], tmp_path / "log")

    torn = ('\x1e{"type": "Ren', "Connection to n7 closed\n")
    renewed = to_frame(encode_message(Renewed())).decode()
    lost, refused = run(renewed, *torn), run(*torn)
    assert lost.ask(RenewCall(), print) == Renewed()
    with pytest.raises(FarEndLostError, match=r"its reply is cut off: .*Connection to n7 closed"):
        lost.ask(RenewCall(), print)
    with pytest.raises(DeviceRefusedError, match="which is no message; check its command"):
        refused.ask(RenewCall(), print)
    lost.close()
    refused.close()


def test_a_command_that_reads_no_request_is_a_lost_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "START_SECONDS", 0.2)
    monkeypatch.setattr(command, "CLOSE_SECONDS", 0.05)
    channel = CommandChannel(["sleep", "60"], tmp_path / "log")
    larger_than_a_pipe = OpenDevice("", "fake", {"text": 200_000 * "x"})
    try:
        with pytest.raises(FarEndLostError, match=r"sleep 60: it reads no request for 0\.2 s"), expire_after(20):
            channel.ask(larger_than_a_pipe, print)
    finally:
        channel.close()
