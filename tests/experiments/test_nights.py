"""The benchmark of two nights, with a fake command: what is run, continued and reported."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.nightly.config import load_nightly_config
from experiments.benchmarks.nights.__main__ import TINY, run_nights
from experiments.common.commands import UNFINISHED
from experiments.common.result_file import missing_facts

FACTS = {"machine": {"silicon": "Fake 9000"}, "commit": "abc", "date": "2026-11-24", "command": "c", "load_before": 0.5}


class Nights:
    """Fake `autotune nightly`, which may be interrupted in a night, or fail before it begins one."""

    def __init__(self, interrupted: int = 0, fails: int = 0) -> None:
        self.interrupted, self.fails, self.done = interrupted, fails, 0
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], directory: Path) -> tuple[int, str]:
        self.commands.append(list(command[3:]))
        name = f"night {self.done + 1}"
        if self.done + 1 == self.fails:
            self.fails = 0
            return 75, ""
        pages = directory / "runs" / "nightly" / "nights" / name
        pages.mkdir(parents=True, exist_ok=True)
        (pages / "nightly.md").write_text(name)
        (pages / "nightly.json").write_text("{}")
        if self.done + 1 == self.interrupted:
            self.interrupted = 0
            return 130, json.dumps({"night": name, "entries": [], "interrupted": 2})
        self.done += 1
        verdict = "new" if self.done == 1 else "same"
        entry: dict[str, Any] = {
            "entry": "lstm", "verdict": verdict, "champion": "0123456789", "ratio": 0.91, "seconds": 60.0, "detail": "a|b",
            "conditions": {"code": {"graph": "08ff"}},
        }  # fmt: skip
        return 0, json.dumps({"night": name, "entries": [entry], "interrupted": 0})


def test_two_nights_are_run_and_the_second_verifies(tmp_path: Path):
    nights = Nights()
    results = run_nights(tmp_path / "n.yaml", tmp_path / "work", tmp_path / "out", lambda: dict(FACTS), nights.run)
    assert [night["code"] for night in results["nights"]] == [0, 0]
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "verified the champions of 1 of 1 entries" in text
    assert "| lstm | 2 | same | 01234567 | 0.910 | 60 | a\\|b |" in text
    assert [(tmp_path / "out" / f"night-{n}" / "nightly.md").read_text() for n in (1, 2)] == ["night 1", "night 2"]
    document = json.loads((tmp_path / "out" / "nights.json").read_text())
    assert (document["graphs"], missing_facts(document)) == ({"lstm": "08ff"}, ())
    # a further call measures nothing
    run_nights(tmp_path / "n.yaml", tmp_path / "work", tmp_path / "out", lambda: dict(FACTS), nights.run)
    assert len(nights.commands) == 2


@pytest.mark.parametrize("interrupted", [1, 2])
def test_an_interrupted_night_is_continued(tmp_path: Path, interrupted: int):
    nights = Nights(interrupted)
    places = tmp_path / "n.yaml", tmp_path / "work", tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        run_nights(*places, lambda: dict(FACTS), nights.run)
    assert ended.value.code == UNFINISHED
    results = run_nights(*places, lambda: dict(FACTS), nights.run)
    assert ["--resume" in command for command in nights.commands] == [n == interrupted for n in range(3)]
    assert [night["resumed"] for night in results["nights"]] == [interrupted == 1, interrupted == 2]


def test_a_night_whose_command_an_interrupt_ended_is_unfinished(tmp_path: Path):
    def run(command: Sequence[str], directory: Path) -> tuple[int, str]:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_nights(tmp_path / "n.yaml", tmp_path / "work", tmp_path / "out", lambda: dict(FACTS), run)
    assert ended.value.code == UNFINISHED


def test_nights_of_other_results_are_not_continued(tmp_path: Path):
    nights = Nights()
    config, work = tmp_path / "n.yaml", tmp_path / "work"
    run_nights(config, work, tmp_path / "first", lambda: dict(FACTS), nights.run)
    run_nights(config, work, tmp_path / "second", lambda: dict(FACTS), nights.run)
    assert not any("--resume" in command for command in nights.commands)
    assert len(nights.commands) == 4


@pytest.mark.parametrize("fails", [1, 2])
def test_a_night_that_could_not_begin_is_begun_again_not_continued(tmp_path: Path, fails: int):
    nights = Nights(fails=fails)
    places = tmp_path / "n.yaml", tmp_path / "work", tmp_path / "out"
    with pytest.raises(SystemExit, match=f"night {fails} ended with exit code 75"):
        run_nights(*places, lambda: dict(FACTS), nights.run)
    results = run_nights(*places, lambda: dict(FACTS), nights.run)
    assert ["--resume" in command for command in nights.commands] == [False, False, False]
    assert [night["night"] for night in results["nights"]] == ["night 1", "night 2"]


def test_the_tiny_config_is_one(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    assert len(load_nightly_config(path).entries) == 1
