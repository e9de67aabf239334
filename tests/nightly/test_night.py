"""The nightly job on a device without noise, or with recorded noise: verdicts, causes, champions, and what survives."""

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from autotune.errors import (
    CaptureError,
    ConfigError,
    DeviceRefusedError,
    InfeasibleError,
    LockedError,
    StoreError,
    WorkerError,
)
from autotune.fleet.far_end.device_server import DeviceServer
from autotune.fleet.messages import CallFailed, OpenDevice, PrepareCall, code_identity, decode_reply, encode_message
from autotune.ir.plan import Plan
from autotune.measure.device.conditions import MachineConditions
from autotune.measure.messages import ChildError
from autotune.nightly import parallel
from autotune.nightly.conditions import collect_conditions
from autotune.nightly.diagnosis import Cause, Conditions, diagnose
from autotune.nightly.history import EntryDirectory, NightRecord, NightVerdict, plan_identity
from autotune.nightly.night import NightJob, latest_night, run_entry, run_night
from autotune.nightly.result_files import build_row, to_document
from autotune.nightly.results import NightResults, worst_error
from autotune.nightly.rounds import MIN_ROUNDS
from autotune.records import plan_file as planfile
from autotune.records.json_codec import append_line
from autotune.records.measurement import Measurement, Outcome
from autotune.records.run_dir import lock_run_dir
from autotune.testing.fake_runner import DEVICE
from autotune.testing.graphs import training_chain
from tests.nightly.fakes import (
    CHALLENGER,
    CHAMPION,
    NOISE,
    Bench,
    FakeSearch,
    PacedRunner,
    make_bench,
    plan_file,
    recorded,
)

CHAMP, CHALL = plan_identity(plan_file(CHAMPION)), plan_identity(plan_file(CHALLENGER))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Turned by hand; no second is waited for."""
    return make_bench(tmp_path, monkeypatch)


def exit_code(results) -> int:
    error = worst_error(results)
    return error.exit_code if error else 0


# -- the champion -------------------------------------------------------------------------------------------------


def test_the_first_night_adopts_what_the_search_finds_and_begins_its_record(bench: Bench):
    bench.search.finds = CHAMPION
    night = bench.night("n1")
    assert (night.verdict, night.champion, night.promoted) == (NightVerdict.NEW, CHAMP, CHAMP)
    assert planfile.read(bench.home().champion).plan == CHAMPION
    assert not bench.home().challenger.exists()
    assert len(night.turns) >= 20
    assert bench.night("n2").verdict is NightVerdict.SAME


def test_a_champion_is_measured_in_fresh_processes_each_time(bench: Bench):
    bench.crown()
    renewed, measured = bench.runner.renewed, len(bench.runner.measured)
    bench.refines = False
    bench.night("n9")
    assert len(bench.runner.measured) - measured == bench.runner.renewed - renewed >= 2


@pytest.mark.parametrize("slower", [1.03, 1.2])
def test_a_slower_champion_is_red_only_after_one_rerun(bench: Bench, slower: float):
    bench.crown()
    bench.refines = False
    bench.runner.pace[CHAMPION] = slower
    before = len(bench.runner.measured)
    night = bench.night("n9")
    assert night.verdict is NightVerdict.REGRESSION
    assert night.change.ratio == pytest.approx(slower, rel=0.002)
    assert night.rerun.low > 1
    assert len(bench.runner.measured) - before == 4  # two rounds, and two again


def test_what_the_rerun_does_not_see_is_no_regression(bench: Bench):
    bench.crown()
    bench.refines = False
    bench.runner.pace[CHAMPION] = 1.1

    def recover(runner) -> None:
        if len(runner.measured) == slow_until:
            runner.pace[CHAMPION] = 1.0

    slow_until = len(bench.runner.measured) + 3
    bench.runner.before_measure = recover
    night = bench.night("n9")
    assert night.verdict is NightVerdict.SAME
    assert "suspicious" in night.detail
    assert night.rerun is None


def test_more_bytes_of_the_same_speed_are_red_too(bench: Bench):
    bench.crown()
    bench.runner.extra_bytes = 20_000
    night = bench.night("n9")
    assert night.verdict is NightVerdict.REGRESSION
    assert "charged +2.5 % vs. its record" in night.detail
    bench.runner.extra_bytes = 4_000
    assert bench.night("n10").verdict is NightVerdict.SAME


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.OUT_OF_MEMORY, Outcome.TIMEOUT, Outcome.OVER_BUDGET])
def test_a_champion_that_fails_twice_is_red_with_the_reason(bench: Bench, outcome: Outcome):
    bench.crown()
    before = len(bench.runner.measured)
    bench.runner.outcome_of = lambda plan: outcome
    bench.refines = False
    results = bench.run("n9")
    assert exit_code(results) == 3
    assert f"the worker said {outcome}" in results.nights[0].detail
    assert len(bench.runner.measured) - before == 2


def test_a_champion_with_wrong_results_is_red(bench: Bench):
    bench.crown()
    bench.runner.error_of = lambda plan: 1e-3
    night = bench.night("n9")
    assert night.verdict is NightVerdict.REGRESSION
    assert "wrong result" in night.detail


@pytest.mark.parametrize("outcome", [Outcome.DISK_FULL, Outcome.STOPPED_EARLY])
def test_what_says_nothing_of_the_plan_is_inconclusive(bench: Bench, outcome: Outcome):
    bench.crown()
    bench.runner.outcome_of = lambda plan: outcome
    assert exit_code(bench.run("n9")) == 5


def test_too_much_noise_is_inconclusive_and_uses_its_time_first(bench: Bench):
    bench.crown()
    bench.refines = False
    wild = iter([0.8, 1.25, 0.9, 1.1] * 1000)
    bench.runner.noise = wild
    before = bench.runner.clock.now
    results = bench.run("n9")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.INCONCLUSIVE, 5)
    assert "+3.0 % cannot be excluded" in results.nights[0].detail
    assert bench.runner.clock.now - before > 100


def test_what_lies_among_the_past_nights_is_no_regression_though_it_lies_above_the_record(bench: Bench):
    bench.refines = False
    bench.crown(nights=[])
    for number in range(8):
        bench.runner.pace[CHAMPION] = (0.988, 1.0, 1.012, 1.0)[number % 4]
        assert bench.night(f"n{number}").verdict is not NightVerdict.REGRESSION
    bench.runner.pace[CHAMPION] = 1.0165
    night = bench.night("n9")
    assert night.change.ratio > 1.015
    assert night.change.low > 1
    assert night.verdict is NightVerdict.SAME


def test_what_keeps_the_record_is_no_regression_though_the_last_nights_were_faster(bench: Bench):
    bench.refines = False
    bench.crown(nights=[f"n{number}" for number in range(5)])
    bench.runner.pace[CHAMPION] = 0.95
    for number in range(10):
        bench.night(f"n1{number}")
    bench.runner.pace[CHAMPION] = 1.0
    assert bench.night("n9").verdict is NightVerdict.SAME


def test_a_slow_rise_of_bytes_is_held_to_the_first_nights(bench: Bench):
    bench.refines = False
    bench.crown(nights=[])
    verdicts = []
    for number in range(30):
        bench.runner.extra_bytes = 800 * number  # a thousandth a night
        verdicts.append(bench.night(f"n{number:02d}").verdict)
    assert NightVerdict.REGRESSION in verdicts


def test_times_of_a_disturbed_night_are_no_record(bench: Bench):
    bench.refines = False
    bench.runner.pace[CHAMPION], bench.runner.disturbed = 1.1, lambda number: True
    bench.crown(nights=["n0", "n1"])
    bench.runner.pace[CHAMPION], bench.runner.disturbed = 1.0, lambda number: False
    first = bench.night("n2")
    assert (first.verdict, first.change) == (NightVerdict.NEW, None)
    assert "no night before was undisturbed" in first.detail
    bench.runner.pace[CHAMPION] = 1.08  # less than in the disturbed nights
    assert bench.night("n3").verdict is NightVerdict.REGRESSION


def test_on_a_machine_that_is_always_busy_only_the_first_night_of_a_champion_is_new(bench: Bench):
    bench.refines, bench.runner.disturbed = False, lambda number: True
    bench.crown(nights=[])
    verdicts = [bench.night(f"n{number}").verdict for number in range(3)]
    assert verdicts == [NightVerdict.NEW, NightVerdict.INCONCLUSIVE, NightVerdict.INCONCLUSIVE]


def test_a_disturbed_first_champion_is_recorded_as_disturbed(bench: Bench):
    bench.search.finds, bench.runner.disturbed = CHAMPION, lambda number: True
    night = bench.night("n1")
    assert night.verdict is NightVerdict.NEW
    assert night.conditions.disturbed


def test_a_slow_decline_is_held_to_the_first_nights(bench: Bench):
    bench.refines = False
    bench.crown(nights=[])
    verdicts = []
    for number in range(40):
        bench.runner.pace[CHAMPION] = 1.001**number
        verdicts.append(bench.night(f"n{number:02d}").verdict)
    assert NightVerdict.REGRESSION in verdicts


# -- recorded noise -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nights", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_three_percent_slower_is_found_in_19_of_20_nights_of_5_minutes(bench: Bench, nights: int):
    bench.refines = False
    detected, directory = 0, bench.directory
    for trial in range(nights):
        bench.directory = directory / f"{trial}"
        bench.runner.pace[CHAMPION], bench.runner.noise = 1.0, recorded("resnet152", f"slower {trial}")
        bench.crown(nights=[f"n{night}" for night in range(6)])
        bench.runner.pace[CHAMPION] = 1.03
        began = bench.runner.clock.now
        detected += bench.night("n9").verdict is NightVerdict.REGRESSION
        assert bench.runner.clock.now - began <= 300
    assert detected >= 19 / 20 * nights


@pytest.mark.parametrize("history", ["", pytest.param(" 0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", NOISE)
def test_an_unchanged_champion_raises_no_red_in_50_nights(bench: Bench, machine: str, history: str):
    bench.refines = False
    bench.runner.noise = recorded(machine, f"unchanged{history}")
    bench.crown(nights=[])
    verdicts = [bench.night(f"n{night:02d}").verdict for night in range(50)]
    assert NightVerdict.REGRESSION not in verdicts
    assert verdicts.count(NightVerdict.SAME) >= 40


def test_two_plans_of_one_pace_are_a_tie_in_19_of_20_confirmations(bench: Bench):
    ties, directory = 0, bench.directory
    for trial in range(20):
        bench.directory = directory / f"{trial}"
        bench.runner.noise = recorded("resnet152", f"tie {trial}")
        bench.search.finds = None
        bench.crown()
        bench.search = FakeSearch(CHALLENGER, ratio=0.5)  # by luck
        night = bench.night("n9")
        assert night.challenger == CHALL
        ties += not night.pending
    assert ties >= 19


# -- challengers --------------------------------------------------------------------------------------------------


def test_a_challenger_is_promoted_after_two_nights_and_not_after_one(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    first = bench.night("n5")
    assert (first.pending, first.promoted, first.verdict) == (CHALL, "", NightVerdict.SAME)
    assert first.gain.high < 1
    assert planfile.read(bench.home().champion).plan == CHAMPION
    second = bench.night("n6")
    assert (second.pending, second.promoted, second.verdict) == ("", CHALL, NightVerdict.PROMOTED)
    assert planfile.read(bench.home().champion).plan == CHALLENGER
    assert not bench.home().challenger.exists()
    bench.search.finds = None
    third = bench.night("n7")
    assert (third.champion, third.verdict) == (CHALL, NightVerdict.NEW)
    assert exit_code(bench.run("n8")) == 0


def test_champion_and_challenger_take_turns(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    bench.runner.plans.clear()
    bench.night("n5")
    assert bench.runner.plans == [CHAMPION, CHAMPION, CHALLENGER, CHAMPION, CHALLENGER, CHAMPION]


def test_a_challenger_that_was_fast_once_is_dropped(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    assert bench.night("n5").pending == CHALL
    bench.search.finds, bench.runner.pace[CHALLENGER] = None, 1.0
    night = bench.night("n6")
    assert (night.pending, night.promoted) == ("", "")
    assert not bench.home().challenger.exists()
    assert planfile.read(bench.home().champion).plan == CHAMPION


def test_a_gain_below_the_asked_one_is_none(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.995
    night = bench.night("n5")
    assert night.gain.high < 1
    assert night.pending == ""


def test_a_night_that_tells_nothing_leaves_the_challenger_waiting(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    bench.night("n5")
    bench.runner.outcome_of = lambda plan: Outcome.DISK_FULL
    assert bench.night("n6").pending == CHALL
    bench.runner.outcome_of = lambda plan: Outcome.OK
    assert bench.night("n7").promoted == CHALL


def test_a_champion_that_something_kills_in_a_duel_stays_the_champion(bench: Bench):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    assert bench.night("n5").pending == CHALL
    measure, turns = bench.runner.measure, itertools.count()

    def kill_in_the_duel(plan, **options):
        result = measure(plan, **options)
        is_duel = plan == CHAMPION and next(turns) >= 2  # two rounds verify the champion
        return Measurement(Outcome.CRASHED, "killed by SIGKILL: end of log") if is_duel else result

    bench.runner.measure = kill_in_the_duel
    night = bench.night("n6")
    assert (night.verdict, night.promoted, night.pending) == (NightVerdict.SAME, "", CHALL)
    assert planfile.read(bench.home().champion).plan == CHAMPION


def test_the_search_is_seeded_from_the_champion_and_has_the_time_that_is_left(bench: Bench):
    bench.crown()
    (config,) = bench.search.configs[-1:]
    assert config.seed_from == str(bench.home().champion)
    assert 60 <= config.time_seconds <= 300
    assert config.plans == str(bench.home().plans)


def test_each_night_searches_with_another_seed(bench: Bench):
    bench.crown()
    seeds = [config.seed for config in bench.search.configs]
    assert len(set(seeds)) == len(seeds) == 4


def test_a_search_that_finds_the_champion_or_nothing_faster_measures_nothing_more(bench: Bench):
    bench.crown()
    for finds, ratio in ((CHAMPION, 0.5), (CHALLENGER, 1.5), (None, 0.5)):
        bench.search.finds, bench.search.ratio = finds, ratio
        bench.runner.plans.clear()
        bench.night(f"n {ratio} {finds == CHAMPION}")
        assert set(bench.runner.plans) == {CHAMPION}


# -- causes -------------------------------------------------------------------------------------------------------

BEFORE = Conditions(
    {"commit": "aaaa"}, {"torch": "2.12.0", "kernel": "6.1"}, {"silicon": "Fake 9000"}, 0.1, 3000.0,
    threads={"torch threads": "4"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "causes", "words"),
    [
        ({"code": {"commit": "bbbb"}}, (Cause.CODE,), "commit aaaa -> bbbb"),
        ({"environment": {"torch": "2.13.0", "kernel": "6.1"}}, (Cause.ENVIRONMENT,), "torch 2.12.0 -> 2.13.0"),
        ({"environment": {"torch": "2.12.0", "kernel": "6.2"}}, (Cause.ENVIRONMENT,), "kernel 6.1 -> 6.2"),
        (
            {"threads": {"OMP_NUM_THREADS": "1", "torch threads": "1"}},
            (Cause.ENVIRONMENT,),
            "torch threads: recorded 4, now 1; OMP_NUM_THREADS: recorded not set, now 1",
        ),
        ({"device": {"silicon": "Fake 9100"}}, (Cause.DEVICE,), "silicon Fake 9000 -> Fake 9100"),
        ({"busy": 0.6}, (Cause.DEVICE,), "cores busy with other work 10 % -> 60 %"),
        ({"clock_mhz": 1500.0}, (Cause.DEVICE,), "clock 3000 -> 1500 MHz"),
        ({}, (Cause.DEVICE,), "code, packages and silicon are the same as in the last good night"),
        (
            {"code": {"commit": "bbbb"}, "environment": {"torch": "2.13.0"}, "busy": 0.6},
            (Cause.CODE, Cause.ENVIRONMENT, Cause.DEVICE),
            "commit aaaa -> bbbb; torch 2.12.0 -> 2.13.0; kernel 6.1 -> none; cores busy",
        ),
        (
            {"code": {"commit": "bbbb"}, "device": {"silicon": "Fake 9100"}},
            (Cause.DEVICE, Cause.CODE),
            "silicon Fake 9000 -> Fake 9100; commit aaaa -> bbbb",
        ),
    ],
)
def test_a_red_line_says_what_changed_since_the_last_good_night(bench: Bench, changes, causes, words):
    bench.conditions = BEFORE
    bench.crown()
    bench.conditions = replace(BEFORE, **changes)
    bench.runner.pace[CHAMPION] = 1.1
    night = bench.night("n9")
    assert (night.verdict, night.causes) == (NightVerdict.REGRESSION, causes)
    assert words in night.detail


def test_a_workload_that_no_longer_prepares_blames_nothing_that_it_did_not_collect():
    machine = MachineConditions("n7", {"commit": "aaaa"}, {"torch": "2.12.0"})
    device = replace(DEVICE, driver="Linux 6.1", environment={"torch threads": "2"})
    before = collect_conditions(machine, device, "0123456789abcdef", baseline_seconds=0.5)
    now = collect_conditions(replace(machine, code={"commit": "bbbb"}), None, "", baseline_seconds=None)
    assert diagnose(now, before) == ([Cause.CODE], "commit aaaa -> bbbb")
    same = collect_conditions(machine, None, "", baseline_seconds=None)
    assert diagnose(same, before) == ([], "code and packages are the same as in the last good night")
    night = NightRecord("n9", "chain", NightVerdict.REGRESSION)
    error = worst_error(NightResults("n9", "night.yaml", (night,), ()))
    assert str(error) == "night n9: regression of chain (cause unknown)"


def test_a_baseline_that_is_slower_itself_is_device_state(bench: Bench):
    bench.crown()
    bench.runner.pace[CHAMPION], bench.runner.eager_seconds = 1.1, 1.3
    night = bench.night("n9")
    assert night.causes == (Cause.DEVICE,)
    assert "eager step time +30.0 %" in night.detail


def test_times_that_other_work_disturbed_are_no_evidence_against_a_champion(bench: Bench):
    bench.crown()
    bench.runner.pace[CHAMPION], bench.runner.disturbed = 1.1, lambda number: True
    night = bench.night("n9")
    assert (night.verdict, night.causes) == (NightVerdict.INCONCLUSIVE, ())
    assert "other work disturbed it: other processes used 50 % of the CPUs" in night.detail
    assert night.rerun.ratio == pytest.approx(1.1)
    assert night.conditions.disturbed


def test_a_slowdown_that_is_measured_again_undisturbed_is_a_regression(bench: Bench):
    bench.crown()
    measured = len(bench.runner.measured)
    bench.runner.pace[CHAMPION], bench.runner.disturbed = 1.1, lambda number: number == measured + 1
    night = bench.night("n9")
    assert night.verdict is NightVerdict.REGRESSION
    assert (night.change, night.conditions.disturbed) == (night.rerun, "")
    assert "measurements disturbed" not in night.detail


def test_a_night_that_was_measured_again_undisturbed_counts_as_undisturbed(bench: Bench):
    bench.crown()
    disturbed = len(bench.runner.measured) + MIN_ROUNDS

    def set_pace(runner: PacedRunner) -> None:
        runner.pace[CHAMPION] = 1.1 if len(runner.measured) <= disturbed else 1.0

    bench.runner.before_measure, bench.runner.disturbed = set_pace, lambda number: number <= disturbed
    night = bench.night("n9")
    assert len(bench.runner.measured) > disturbed
    assert (night.verdict, night.conditions.disturbed) == (NightVerdict.SAME, "")


def test_more_bytes_are_a_regression_also_on_a_busy_machine(bench: Bench):
    bench.crown()
    bench.runner.extra_bytes, bench.runner.disturbed = 100_000, lambda number: True
    assert bench.night("n9").verdict is NightVerdict.REGRESSION


def test_a_champion_is_held_to_the_budget_that_the_entry_has_now(bench: Bench):
    bench.crown()
    night = bench.run("n9", bench.options(budget="step:0.9MB")).nights[0]  # the plans take 0.8 MB
    assert night.verdict is NightVerdict.SAME
    night = bench.run("n10", bench.options(budget="step:0.7MB")).nights[0]
    assert night.verdict is NightVerdict.REGRESSION
    assert "the budget is step:0.7MB, and the champion was found for 65%" in night.detail
    bench.search.finds = CHALLENGER
    night = bench.run("n11", bench.options(budget="65%")).nights[0]
    assert night.verdict is NightVerdict.SAME


def leave_no_memory_for_eager(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, measure = bench.runner.prepare(), bench.runner.measure
    monkeypatch.setattr(bench.runner, "prepare", lambda: replace(prepared, baseline_fits=False))
    monkeypatch.setattr(
        bench.runner,
        "measure",
        lambda plan, **options: replace(
            (result := measure(plan, **options)), baseline_seconds=(), step_seconds=(5.0,) * len(result.step_seconds)
        ),
    )


def test_seconds_of_a_night_in_which_eager_does_not_fit_are_not_compared_with_ratios(bench: Bench, monkeypatch):
    bench.crown()
    leave_no_memory_for_eager(bench, monkeypatch)
    night = bench.night("n9")
    assert (night.verdict, night.change) == (NightVerdict.NEW, None)
    assert "4 nights with a measurement of eager are not compared" in night.detail
    results = bench.run("n10", bench.options())
    (entry,) = to_document(results)["entries"]
    assert (entry["ratio"], entry["seconds_per_step"]) == (None, 5.0)
    assert build_row(results.nights[0])[2].startswith("5.000 s (")


def test_bytes_of_a_night_in_which_eager_does_not_fit_are_compared_with_those_of_all_nights(bench: Bench, monkeypatch):
    bench.crown()
    leave_no_memory_for_eager(bench, monkeypatch)
    bench.runner.extra_bytes = 100_000
    night = bench.night("n9")
    assert night.verdict is NightVerdict.REGRESSION
    assert "charged +12.5 % vs. its record" in night.detail


def test_another_graph_makes_the_plan_stale_and_its_successor_is_promoted_after_two_nights(bench: Bench):
    bench.crown()
    wider = training_chain(8, nbytes=200_000, param_bytes=5_000)
    bench.runner.graph = bench.search.graph = wider
    bench.search.finds = Plan.traced(wider)
    bench.runner.measured.clear()
    first = bench.run("n5")
    assert first.nights[0].causes == (Cause.STALE, Cause.CODE)
    assert "on other shapes" in first.nights[0].detail
    assert exit_code(first) == 3
    assert first.nights[0].pending == plan_identity(plan_file(Plan.traced(wider), wider))
    second = bench.night("n6")
    assert (second.verdict, second.promoted) == (
        NightVerdict.REGRESSION,
        plan_identity(plan_file(Plan.traced(wider), wider)),
    )
    assert planfile.read(bench.home().champion).graph_digest == wider.digest
    assert exit_code(bench.run("n7")) == 0


def test_a_plan_that_check_refuses_is_stale(bench: Bench):
    bench.crown()
    broken = replace(plan_file(CHAMPION), plan=Plan(CHAMPION.order[:-1]))
    planfile.write(bench.home().champion, broken)
    night = bench.night("n9")
    assert (night.verdict, night.causes[0]) == (NightVerdict.REGRESSION, Cause.STALE)


# -- entries that fail --------------------------------------------------------------------------------------------


def test_a_workload_that_no_longer_captures_is_a_regression_and_one_that_never_did_a_fault(bench: Bench, monkeypatch):
    def refuse() -> None:
        raise CaptureError("line 3 breaks the graph")

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner, "prepare", refuse)
        results = bench.run("n1")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.FAILED, 2)
    bench.crown()
    monkeypatch.setattr(bench.runner, "prepare", refuse)
    results = bench.run("n9")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.REGRESSION, 3)
    assert "line 3 breaks the graph" in results.nights[0].detail


def test_a_first_search_that_finds_no_plan_ends_with_its_own_code(bench: Bench):
    bench.search.error = InfeasibleError("needs more")
    assert exit_code(bench.run("n1")) == 4


def test_a_search_that_fails_beside_a_champion_is_only_a_note(bench: Bench):
    bench.crown()
    bench.search.error = InfeasibleError("needs more")
    results = bench.run("n9")
    assert exit_code(results) == 0
    assert "no challenger: needs more" in results.nights[0].detail


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("of ours")])
def test_an_internal_error_of_a_search_beside_a_champion_is_a_note_too(bench: Bench, capsys, error: Exception):
    bench.crown()
    bench.search.error = error
    results = bench.run("n9")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.SAME, 0)
    assert f"no challenger: internal error: {type(error).__name__}: {error}" in results.nights[0].detail
    assert "Traceback" in capsys.readouterr().err


def test_a_store_that_is_gone_is_inconclusive_for_a_champion(bench: Bench, monkeypatch):
    bench.crown()

    def refuse(plan: Plan, *, budget_bytes: int) -> None:
        raise StoreError("no directory /fast")

    monkeypatch.setattr(bench.runner, "measure", refuse)
    assert exit_code(bench.run("n9")) == 5


def test_a_store_that_is_gone_before_an_entry_opens_is_inconclusive_for_a_champion(bench: Bench):
    bench.crown()

    def refuse(entry, log_dir):
        raise StoreError("ssd store: no directory /fast")

    bench.open = refuse
    results = bench.run("n9")
    assert (results.nights[0].detail, exit_code(results)) == ("ssd store: no directory /fast", 5)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("conditions", DeviceRefusedError), ("conditions", ConfigError), ("prepare", DeviceRefusedError), ("prepare", WorkerError),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_used_or_a_process_that_is_killed_is_inconclusive_for_a_champion(
    bench: Bench, monkeypatch, call: str, error: type
):
    bench.crown()

    def refuse() -> None:
        raise error("n7 of class a100 runs autotune 0.0.1")

    monkeypatch.setattr(bench.runner, call, refuse)
    results = bench.run("n9")
    assert exit_code(results) == 5
    assert results.nights[0].detail == "n7 of class a100 runs autotune 0.0.1"


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_preparation_that_takes_too_long_is_inconclusive_for_a_champion(bench: Bench, monkeypatch, is_remote: bool):
    def refuse() -> None:
        raise CaptureError("chain took more than 600 s to capture") from ChildError(Outcome.TIMEOUT, "no answer")

    @contextlib.contextmanager
    def open_runner(request, report):
        yield SimpleNamespace(prepare=refuse)

    def refuse_far_away() -> None:
        server = DeviceServer(open_runner)
        server.answer(encode_message(OpenDevice(code_identity(), "a100", {})), print)
        reply = decode_reply(server.answer(encode_message(PrepareCall()), print))
        assert isinstance(reply, CallFailed)
        raise reply.to_error("n7")

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner, "prepare", refuse)
        assert bench.night("n1").verdict is NightVerdict.FAILED, "without a champion it is a fault of the entry"
    bench.crown()
    monkeypatch.setattr(bench.runner, "prepare", refuse_far_away if is_remote else refuse)
    results = bench.run("n9")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.INCONCLUSIVE, 5)
    assert "chain took more than 600 s to capture" in results.nights[0].detail


def test_one_bad_entry_does_not_end_the_night(bench: Bench):
    bench.search.finds = CHAMPION

    def open_one(entry, log_dir):
        if entry.key == "bad":
            raise StoreError("ssd store: no directory /fast")
        return Bench.open(bench, entry, log_dir)

    bench.open = open_one
    results = bench.run("n1", bench.options("bad", "good"))
    assert [night.verdict for night in results.nights] == [NightVerdict.FAILED, NightVerdict.NEW]
    assert exit_code(results) == 2


@pytest.mark.parametrize("in_processes", [False, True])
def test_an_entry_whose_history_cannot_be_read_fails_and_costs_no_other_its_night(
    bench: Bench, monkeypatch, in_processes: bool
):
    clock = bench.runner.clock
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda seconds: None))
    bench.search.finds = CHAMPION
    history = bench.home("bad").history_file
    history.parent.mkdir(parents=True)
    history.write_text("no record\n")

    def start(entry, entry_time) -> SimpleNamespace:
        """Run the entry at once, as its process would."""
        run_entry(job, entry.key, "n1", entry_time)
        return SimpleNamespace(poll=lambda: 0)

    job = NightJob(
        bench.options("bad", "good"), Path("night.yaml"), bench.open, bench.search, lambda night: None,
        {None: 1}, start if in_processes else None,
    )  # fmt: skip
    bad, good = run_night(job, "n1").nights
    assert (bad.verdict, good.verdict) == (NightVerdict.FAILED, NightVerdict.NEW)
    assert f"{history}:1: not JSON" in bad.detail
    assert history.read_text() == "no record\n"


def test_a_challenger_that_cannot_be_read_is_set_aside_and_costs_no_night(bench: Bench):
    bench.crown()
    bench.home().challenger.write_text('{"schema": 0}')
    night = bench.night("n9")
    assert night.verdict is NightVerdict.SAME
    assert "challenger is moved to challenger.json.damaged" in night.detail
    assert not bench.home().challenger.exists()
    assert bench.home().challenger.with_name("challenger.json.damaged").exists()


def test_a_fault_of_ours_in_one_entry_costs_no_other_its_night_and_is_1(bench: Bench, capsys):
    bench.search.finds, bench.search.error = CHAMPION, ZeroDivisionError("of ours")
    options = bench.options("a", "b")

    def mend(night) -> None:
        bench.search.error = None

    results = bench.run("n1", options, mend)
    assert [night.verdict for night in results.nights] == [NightVerdict.FAILED, NightVerdict.NEW]
    assert results.nights[0].detail == "internal error: ZeroDivisionError: of ours"
    assert exit_code(results) == 1
    assert "Traceback" in capsys.readouterr().err


# -- time, resume, signals ----------------------------------------------------------------------------------------


def test_time_is_shared_and_what_an_entry_leaves_goes_to_the_next(bench: Bench):
    bench.search.finds = CHAMPION
    options = bench.options("a", "b", time="10m")
    a, b = (entry.model_copy(update={"time": "1h"}) for entry in options.entries)
    bench.run("n1", options.model_copy(update={"entries": [a, b.model_copy(update={"share": 4.0})]}))
    first, second = (config.time_seconds for config in bench.search.configs)
    assert first == pytest.approx(0.6 * 120, abs=1)
    assert second == pytest.approx(0.6 * (600 - 90), abs=1)  # the first took two measurements of 45 s


def test_a_night_out_of_time_is_7_and_resume_does_the_rest_alone(bench: Bench):
    bench.search.finds = CHAMPION
    options = bench.options("a", "b", "c", time="100s")
    results = bench.run("n1", options)
    assert ([night.entry for night in results.nights], results.left) == (["a", "b"], ("c",))
    assert exit_code(results) == 7
    assert "autotune nightly night.yaml --resume" in str(worst_error(results))
    bench.opened.clear()
    results = bench.run(latest_night(options), options)
    assert bench.opened == ["c"]
    assert ([night.entry for night in results.nights], results.left) == (["a", "b", "c"], ())
    assert exit_code(results) == 0


def test_a_night_ends_while_its_entries_wait_for_a_device(bench: Bench, monkeypatch):
    monkeypatch.setattr(bench.runner, "conditions", lambda: time.sleep(60))
    began = time.monotonic()
    results = bench.run("n1", bench.options("a", "b", time="1s"))
    assert time.monotonic() - began < 30
    assert (results.nights, results.left, results.interrupted) == ((), ("a", "b"), 0)
    assert exit_code(results) == 7


@pytest.mark.parametrize("code", [0, LockedError.exit_code, 1, -signal.SIGKILL])
def test_an_entry_whose_process_was_told_to_end_is_left_and_one_that_died_failed(bench: Bench, monkeypatch, code: int):
    clock = bench.runner.clock
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda seconds: None))
    job = NightJob(
        bench.options(), Path("night.yaml"), bench.open, bench.search, lambda night: None,
        {None: 1}, lambda entry, entry_time: SimpleNamespace(poll=lambda: code),
    )  # fmt: skip
    results = run_night(job, "n1")
    if code in (0, LockedError.exit_code):
        assert (results.nights, results.left) == ((), ("chain",))
    else:
        (night,) = results.nights
        log = bench.directory / "nightly" / "chain" / "logs" / "n1.log"
        assert (night.verdict, night.detail) == (
            NightVerdict.FAILED, f"its process ended with exit code {code}; see {log}",
        )  # fmt: skip


def test_an_entry_whose_process_is_killed_is_inconclusive_for_a_champion(bench: Bench, monkeypatch):
    bench.crown()
    clock = bench.runner.clock
    monkeypatch.setattr(parallel, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda seconds: None))
    job = NightJob(
        bench.options(), Path("night.yaml"), bench.open, bench.search, lambda night: None,
        {None: 1}, lambda entry, entry_time: SimpleNamespace(poll=lambda: -signal.SIGKILL),
    )  # fmt: skip
    results = run_night(job, "n9")
    assert (results.nights[0].verdict, exit_code(results)) == (NightVerdict.INCONCLUSIVE, 5)
    assert planfile.read(bench.home().champion).plan == CHAMPION


def test_a_regression_outranks_the_entries_that_are_left(bench: Bench):
    bench.crown()
    bench.runner.pace[CHAMPION] = 1.2
    bench.refines = False
    results = bench.run("n9", bench.options("chain", "late", time="100s"))
    assert results.left == ("late",)
    assert exit_code(results) == 3
    assert "--resume" in str(worst_error(results))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done_and_resume_begins_with_the_entry_that_it_hit(bench: Bench, number):
    bench.search.finds = CHAMPION
    options = bench.options("a", "b")

    def strike(runner) -> None:
        if len(runner.measured) == 3:
            signal.raise_signal(number)

    bench.runner.before_measure = strike
    results = bench.run("n1", options)
    assert (results.interrupted, [night.entry for night in results.nights], results.left) == (number, ["a"], ("b",))
    assert to_document(results)["exit_code"] == 128 + number
    bench.opened.clear()
    assert bench.run("n1", options).left == ()
    assert bench.opened == ["b"]


def test_a_signal_in_the_search_ends_the_night(bench: Bench):
    bench.search.interrupted = signal.SIGINT
    results = bench.run("n1")
    assert (results.interrupted, results.left) == (signal.SIGINT, ("chain",))


def test_a_second_night_in_the_same_directory_is_refused(bench: Bench):
    with lock_run_dir(bench.directory / "nightly"), pytest.raises(LockedError, match="give another `directory`"):
        bench.run("n1")


CHILD = """
import sys
from itertools import count
from pathlib import Path
import pytest
from tests.nightly.fakes import make_bench

bench = make_bench(Path(sys.argv[1]), pytest.MonkeyPatch())
begun = len(bench.home().history())
if not begun:
    bench.crown(nights=[])
for number in count(begun):
    bench.night(f"n{number:05d}")
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_history_keeps_every_night_and_goes_on(bench: Bench):
    path, kept = bench.home().directory / "history.jsonl", b""
    for kill in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(bench.directory)], cwd=Path(__file__).parents[2])
        try:
            for _ in range(3000):
                if path.exists() and path.read_bytes().count(b"\n") > kept.count(b"\n") + kill:
                    break
                time.sleep(0.01)
        finally:
            child.kill()
            child.wait()
        now = path.read_bytes()
        assert now.startswith(kept)
        assert now.count(b"\n") > kept.count(b"\n")
        kept = now[: now.rfind(b"\n") + 1]
    assert len(bench.home().history()) == kept.count(b"\n")
    assert bench.night("n99999").verdict is NightVerdict.SAME
    assert path.read_bytes().startswith(kept)


def cut(bench: Bench, keep: int) -> None:
    """The last line as a crash in the middle of writing it leaves it."""
    path = bench.home().directory / "history.jsonl"
    whole = path.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    path.write_bytes(whole[: last + keep])


@pytest.mark.parametrize("keep", [0, 1, 200])
def test_a_torn_line_costs_its_own_night_and_no_other(bench: Bench, keep: int):
    bench.crown()
    before = bench.home().history()
    cut(bench, keep)
    assert bench.home().history() == before[:-1]
    assert bench.night("n3").verdict is NightVerdict.SAME
    assert [night.night for night in bench.home().history()] == ["n0", "n1", "n2", "n3"]


def kill_in_promotion(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the night that promotes a challenger after it wrote its history, before it moves the plan file."""
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9
    bench.night("n5")
    with monkeypatch.context() as patch:
        patch.setattr(EntryDirectory, "record", lambda home, night: append_line(home.history_file, night))
        assert bench.night("n6").promoted == CHALL
    assert planfile.read(bench.home().champion).plan == CHAMPION
    bench.search.finds = None


def test_killed_between_history_and_plan_file_a_promotion_is_finished_by_the_next_night(bench: Bench, monkeypatch):
    kill_in_promotion(bench, monkeypatch)
    assert bench.night("n7").champion == CHALL
    assert planfile.read(bench.home().champion).plan == CHALLENGER


def test_killed_between_history_and_plan_file_a_promotion_survives_a_night_that_cannot_begin(bench: Bench, monkeypatch):
    kill_in_promotion(bench, monkeypatch)

    def refuse(entry, log_dir):
        raise StoreError("ssd store: no directory /fast")

    bench.open = refuse
    assert bench.night("n7").verdict is NightVerdict.INCONCLUSIVE
    assert planfile.read(bench.home().champion).plan == CHALLENGER


def test_killed_before_the_history_a_plan_that_won_is_measured_again(bench: Bench, monkeypatch):
    bench.crown()
    bench.search.finds, bench.runner.pace[CHALLENGER] = CHALLENGER, 0.9

    def killed(self, night) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EntryDirectory, "record", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.night("n5")
    assert bench.home().challenger.exists()
    night = bench.night("n5")
    assert (night.pending, night.promoted) == (CHALL, "")


# -- pages --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(bench: Bench):
    """One of each: same, regression, inconclusive, failed, not done."""
    names = ("same", "failed", "red", "unclear", "late")
    running = ("same", "red", "unclear")
    for name in running:
        planfile.write(bench.home(name).champion, plan_file(CHAMPION))
    bench.refines = False
    for night in ("n0", "n1", "n2"):
        bench.run(night, bench.options(*running))

    def open_one(entry, log_dir):
        if entry.key == "failed":
            raise StoreError("ssd store: no directory | \x00 <fast>")
        bench.runner.pace[CHAMPION] = 1.2 if entry.key == "red" else 1.0
        bench.runner.outcome_of = lambda plan: Outcome.STOPPED_EARLY if entry.key == "unclear" else Outcome.OK
        return Bench.open(bench, entry, log_dir)

    bench.open = open_one
    # 90, 0, 180 and 45 s of measuring: there is no time for the last one
    results = bench.run("n9", bench.options(*names, time="300s"))
    return results, bench.directory / "nightly" / "nights" / "n9"


def test_junit_counts_what_it_holds(mixed):
    suite = ElementTree.parse(mixed[1] / "junit.xml").getroot()
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "1", "errors": "1", "skipped": "2",
    }  # fmt: skip
    kinds = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {
        "same": [], "red": ["failure"], "unclear": ["skipped"], "failed": ["error"], "late": ["skipped"],
    }  # fmt: skip
    assert suite.find("testcase/failure").get("type") == "device state"
    assert "no directory | ? <fast>" in suite.find("testcase/error").get("message")


def test_markdown_is_one_table_with_the_worst_first(mixed):
    text = (mixed[1] / "nightly.md").read_text()
    lines = text.splitlines()
    assert lines[0] == (
        "**nightly n9: 5 entries: 1 regression, 1 failed, 1 inconclusive, 1 same, 1 not done**"
    )  # fmt: skip
    rows = [line for line in lines if line.startswith("|")]
    assert [row.split()[1] for row in rows[2:]] == ["red", "failed", "unclear", "same", "late"]
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1


def test_json_is_read_back_with_every_number(mixed):
    results, directory = mixed
    document = json.loads((directory / "nightly.json").read_text())
    assert document == json.loads(json.dumps(to_document(results)))
    assert (document["exit_code"], document["left"]) == (3, ["late"])
    red = next(entry for entry in document["entries"] if entry["entry"] == "red")
    assert red["ratio"] == pytest.approx(1.2, rel=0.01)
    assert red["change"]["low"] > 1.1
    assert not list(directory.glob(".*"))
