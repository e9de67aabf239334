"""The benchmark of transferred settings, with fake tunings: what is run, and when a tuning has arrived."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from autotune.records.config import load_config
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind, append_trial
from experiments.benchmarks.fleet import ratios as fleet_ratios
from experiments.benchmarks.transfer.__main__ import TINY, describe_saving, find_best, find_first_good, run_tunings
from experiments.common.result_file import missing_facts
from tests.experiments.test_nights import FACTS

RATIOS = {"source": [1.0, 1.2, 0.9], "unseeded": [1.0, 1.3, 1.1, 0.92, 0.9], "seeded": [1.0, 0.91, 0.95]}
"""Time ratio of each trial, from the baseline on; trials begin 10 s apart."""


class Tunings:
    """Fake `autotune tune`."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[list[str], Mapping[str, str]]] = []

    def run(self, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> tuple[int, str]:
        name = command[command.index("--name") + 1]
        self.calls.append((list(command[4:]), environment))
        if name == self.fails:
            self.fails = ""
            return 130, ""
        run = directory / "runs" / name
        run.mkdir(parents=True)
        for number, ratio in enumerate(RATIOS[name]):
            append_trial(run / "trials.jsonl", make_trial(number, ratio))
        return 0, json.dumps({"confirmed": [], "disturbed": ""})


def make_trial(number: int, ratio: float) -> Trial:
    measurement = Measurement(Outcome.OK, step_seconds=(ratio,) * 3, baseline_seconds=(1.0,) * 3)
    kind = TrialKind.SEARCH if number else TrialKind.BASELINE
    return Trial(number, kind, "resnet18", "0" * 8, started=100.0 + 10 * number, measurement=measurement)


def test_trials_and_seconds_until_the_best_of_both_are_compared(tmp_path: Path):
    tunings = Tunings()
    run_tunings(tmp_path / "c.yaml", tmp_path / "work", tmp_path / "out", lambda: dict(FACTS), tunings.run)
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "The fastest plan takes 0.900 of eager's time; a plan within 2 % of it takes at most 0.918." in text
    assert "| unseeded | 2 | 0.900 | 4 | - | 5 | - |" in text
    assert "| seeded | 2 | 0.910 | 1 | 20 | 3 | - |" in text
    assert "The seeds saved 3 trials." in text
    assert [call[1]["OMP_NUM_THREADS"] for call in tunings.calls] == ["1", "2", "2"]
    document = json.loads((tmp_path / "out" / "transfer.json").read_text())
    assert (document["graphs"], missing_facts(document)) == ({"workload": "0" * 8}, ())
    assert [call[0][-2:] == ["--seed-from", "runs/source"] for call in tunings.calls] == [False, False, True]


def test_tunings_on_record_are_not_repeated(tmp_path: Path):
    tunings = Tunings(fails="unseeded")
    places = tmp_path / "c.yaml", tmp_path / "work", tmp_path / "out"
    with pytest.raises(SystemExit, match="tuning unseeded ended with exit code 130"):
        run_tunings(*places, lambda: dict(FACTS), tunings.run)
    run_tunings(*places, lambda: dict(FACTS), tunings.run)
    names = [call[0][call[0].index("--name") + 1] for call in tunings.calls]
    assert names == ["source", "unseeded", "unseeded", "seeded"]


def test_only_first_measurements_within_the_budget_count():
    trials = [
        {"number": 0, "kind": "baseline", "outcome": "ok", "ratio": 0.5, "seconds": 1.0},
        {"number": 1, "kind": "planner", "outcome": "over_budget", "ratio": 0.5, "seconds": 2.0},
        {"number": 2, "kind": "search", "outcome": "ok", "ratio": 0.9, "seconds": 3.0},
        {"number": 3, "kind": "confirm", "outcome": "ok", "ratio": 0.8, "seconds": 4.0},
    ]
    assert find_best({"trials": trials}) == 0.9
    assert find_first_good({"trials": trials}, 0.9) == (2, 3.0)
    assert find_first_good({"trials": trials}, 0.8) is None


def test_what_was_saved_is_said_in_trials_and_seconds():
    assert describe_saving((5, 50.0), (2, 20.0)) == "The seeds saved 3 trials and 30 s; a negative number is a loss."
    assert describe_saving(None, (2, 20.0)) == "Only the seeded tuning reached this time."
    assert describe_saving((5, 50.0), None) == "The seeded tuning did not reach this time."


def test_the_tiny_config_is_one(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    assert load_config(str(path)).trials == 8


def test_ratios_here_and_there_are_compared_within_a_round():
    here = [1.0, 1.2, 0.9, 1.0, 1.1, 1.0]  # the pace of the machine changes from round to round
    ratios = {"here": here, "command": [1.01 * value for value in here], "ray": [1.05 * value for value in here]}
    text = fleet_ratios.summarize({**FACTS, "ratios": ratios})
    assert "| command | 1.010 (0.909 to 1.212) | 1.010 (1.010 to 1.010) |" in text
    assert "command: kept; ray: exceeded." in text


def test_an_interval_that_is_wider_than_the_difference_decides_nothing():
    ratios = {"here": [1.0] * 6, "command": [0.95, 1.0, 1.0, 1.0, 1.01, 1.05]}
    assert "command: not decided" in fleet_ratios.summarize({**FACTS, "ratios": ratios})
