"""Closing the command that reaches a device ends, whatever that command does."""

import errno
import os
from pathlib import Path

import pytest

from autotune.fleet import command
from autotune.fleet.command import CommandChannel


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
