"""Run commands of the command line in this process, in an empty directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import main as cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, standard output, standard error) of a command, run in this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return call
