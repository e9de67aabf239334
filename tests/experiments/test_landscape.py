"""Searches on recorded landscapes: near the best known within 25 measured trials, and hardly any of 60 lost to memory."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.ir.plan import Plan
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.offline.landscape import Landscape, read_landscape
from autotune.study.offline.replay import replay
from autotune.study.verdicts.ranking import plan_hash
from autotune.units import parse_seconds
from experiments.benchmarks.landscape import __main__ as landscape_script
from experiments.benchmarks.landscape import gains, record_all, replays
from experiments.benchmarks.landscape.leaders import remeasure_leaders
from tests.experiments.paths import BENCHMARKS

RESULTS = BENCHMARKS / "landscape" / "results"
RECORDED = sorted(RESULTS.glob("*.json"))
"""Whatever lies there is searched; `NAME-simulated.json` was measured by nobody."""
NEAR, LOST = 0.02, 3
NONE = pytest.param(
    None,
    marks=pytest.mark.skip(
        reason="nothing is recorded: python -m experiments.benchmarks.landscape, or the same with --simulated"
    ),
    id="none",
)


@pytest.fixture(scope="module", params=[pytest.param(path, id=path.stem) for path in RECORDED] or [NONE])
def recorded(request: pytest.FixtureRequest) -> tuple[Path, Landscape]:
    return request.param, read_landscape(request.param)


@pytest.mark.long
def test_a_search_is_within_2_percent_of_the_best_known_after_25_trials_and_loses_3_of_60_to_memory_at_most(recorded):
    found = replay(recorded[1], "auto", 0, 60)
    assert found.fastest_gaps[:25][-1] <= NEAR
    assert found.lost[-1] <= LOST


def test_a_landscape_holds_enough_plans_to_lose_the_way_in(recorded):
    known = recorded[1]
    plans = {point.plan: worth for point in known.points if (worth := known.ratio_of(point)) is not None}
    assert len(plans) >= 25
    assert sorted(plans.values())[len(plans) // 2] > (1 + NEAR) * known.best_ratio


def test_what_nobody_measured_says_so_in_its_name_and_in_its_source(recorded):
    path, known = recorded
    meters = {point.measurement.meter for point in known.points if point.measurement.meter}
    if path.stem.endswith("-simulated"):
        assert known.source.startswith("simulated")
        assert meters == {"simulated"}
    else:
        assert known.source.startswith("measured")
        assert "simulated" not in meters


def test_noise_and_errors_are_the_recorded_ones():
    recorded = landscape_script.RecordedNoise.from_results(BENCHMARKS / "frontier" / "results")
    assert len(recorded.bytes_off) == len(recorded.seconds_off) == len(recorded.ratios) >= 10
    assert max(recorded.bytes_off) < 0.02
    assert 0.85 < min(recorded.seconds_off) < 1 < max(recorded.seconds_off) < 1.15


def test_five_workloads_are_recorded_and_those_with_a_file_are_skipped(tmp_path: Path):
    document = yaml.safe_load((BENCHMARKS / "landscape" / "landscapes.yaml").read_text())
    commands = dict(record_all.build_commands(document, tmp_path, tmp_path / "work"))
    assert len(commands) == 5
    assert parse_seconds(document["time"]) * 5 <= 8 * 3600
    (tmp_path / "gpt2.json").touch()
    again = dict(record_all.build_commands(document, tmp_path, tmp_path / "work"))
    assert again == {name: command for name, command in commands.items() if name != "gpt2"}
    assert dict(record_all.build_commands(document, tmp_path, tmp_path / "work", ["gpt2"])) == commands


@pytest.mark.parametrize(
    "entry", yaml.safe_load((BENCHMARKS / "landscape" / "landscapes.yaml").read_text())["landscapes"]
)
def test_each_config_of_the_landscapes_is_valid(entry: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    document = yaml.safe_load((BENCHMARKS / "landscape" / "landscapes.yaml").read_text())
    commands = dict(record_all.build_commands({**document, "landscapes": [entry]}, tmp_path, tmp_path / "work"))
    recorded: list[argparse.Namespace] = []
    monkeypatch.setattr(landscape_script, "record", recorded.append)
    monkeypatch.setattr("sys.argv", commands[entry["name"]][1:])
    landscape_script.main()
    config = landscape_script.build_config(recorded[0], tmp_path)
    assert (config.workload, config.arguments, config.budget) == (
        entry["workload"],
        entry["arguments"],
        entry["budget"],
    )
    assert recorded[0].work == tmp_path / "work" / entry["name"]
    assert set(landscape_script.make_spec(config, tmp_path).stores) == set(entry.get("stores", []))


def test_the_committed_replays_are_of_committed_landscapes_and_summarized_from_their_own_file():
    paths = sorted((RESULTS / "replays").glob("*.json"))
    assert paths
    for path in paths:
        results = json.loads(path.read_text())
        assert (RESULTS / results["landscape"]).exists()
        assert replays.summarize(results) in (RESULTS / "replays" / "summary.md").read_text()
        assert (RESULTS / "replays" / f"{path.stem}.png").exists()
        for name in replays.DRAWN:
            assert len(results["searches"][name]) >= 20


def test_the_replays_table_states_medians_intervals_and_trials_until_two_percent():
    searches = [{"gaps": gaps, "lost": [0, 1], "requests": 4} for gaps in ([0.3, 0.01], [0.2, 0.1], [None, 0.0])]
    facts = {"machine": {"silicon": "chip"}, "commit": "abc", "date": "today", "load_before": 0.5, "command": "run"}
    table = replays.summarize({**facts, "landscape": "net.json", "searches": {"random": searches}})
    row = table.splitlines()[-1]
    assert row.startswith("| random | 3 | 1.0 % (0.0 % to 10.0 %) |")
    assert "| 2 of 3, median after 2 | 1.0 | 4 |" in row


class Machine:
    """Runner on which every plan has one true time, and a made-up eager of one second."""

    def __init__(self, seconds: dict[Plan, float]) -> None:
        self.seconds, self.measured = seconds, list[Plan]()

    def measure(self, plan: Plan, *, budget_bytes: int) -> Measurement:
        self.measured.append(plan)
        return timed(self.seconds[plan], charged_bytes=budget_bytes)


def timed(seconds: float, **fields: Any) -> Measurement:
    return Measurement(
        Outcome.OK, peak_bytes=1, floor_bytes=0, step_seconds=(seconds,) * 2, baseline_seconds=(1.0, 1.0), **fields
    )


def test_a_plan_that_was_lucky_once_does_not_lead_and_a_disturbed_one_is_left_out():
    known = read_landscape(RESULTS / "resnet18.json")
    plans = [Plan((number,)) for number in range(5)]
    true = dict(zip(plans, (0.90, 0.80, 0.85, 0.95, 0.70), strict=True))
    first = dict(zip(plans, (0.60, 0.81, 0.84, 0.95, 0.50), strict=True))
    disturbed = {plans[4]: "other processes used 38 % of the CPUs"}
    points = tuple(
        replace(
            known.points[0],
            plan=plan_hash(plan),
            measurement=timed(first[plan], charged_bytes=1, disturbed=disturbed.get(plan, "")),
        )
        for plan in plans
    )
    trials = [
        Trial(number, TrialKind.SEARCH, "w", "g", {}, plan, points[number].estimate, points[number].measurement)
        for number, plan in enumerate(plans)
    ]
    machine = Machine(true)
    result = remeasure_leaders(replace(known, points=points, floor_bytes=0), trials, machine, 2)
    assert result.best_ratio == 0.80
    assert [point.plan for point in result.points] == [plan_hash(plan) for plan in plans[:4]]
    assert [result.ratio_of(point) for point in result.points] == [0.90, 0.80, 0.85, 0.95]
    assert machine.measured == [plans[0], plans[1]] * 3 + [plans[2]] * 3


def test_the_search_is_compared_with_the_planners_fastest_plan_of_fresh_measurements():
    known = read_landscape(RESULTS / "resnet18.json")
    plans = [Plan((number,)) for number in range(4)]
    kinds = (TrialKind.PLANNER, TrialKind.PLANNER, TrialKind.SEARCH, TrialKind.SEARCH)
    true = dict(zip(plans, (0.90, 0.80, 0.72, 0.60), strict=True))
    recorded = (0.70, 0.85, 0.71, 0.75)
    points = tuple(
        replace(known.points[0], kind=kind, plan=plan_hash(plan), measurement=timed(seconds, charged_bytes=1))
        for plan, kind, seconds in zip(plans, kinds, recorded, strict=True)
    )
    trials = [
        Trial(number, kind, "w", "g", {}, plan) for number, (plan, kind) in enumerate(zip(plans, kinds, strict=True))
    ]
    result = gains.compare(replace(known, points=points, floor_bytes=0), trials, Machine(true))
    assert (result["planner"]["plan"], result["search"]["plan"]) == (plan_hash(plans[1]), plan_hash(plans[2]))
    assert result["rounds"] == [{"planner": 0.80, "search": 0.72}] * 8
    assert gains.format_gain(result) == "0.900 (0.900 to 0.900; 95 % of 8)"
