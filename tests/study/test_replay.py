"""A search on a record: the study's own, answered by what was measured and by nothing else."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import ConfigError, StudyInterruptedError
from autotune.ir.plan import Plan
from autotune.records.budget import STEP_TOLERANCE
from autotune.records.measurement import Measurement, Outcome
from autotune.study.events import PhaseStarted, StudyPhase
from autotune.study.offline import replay as replays
from autotune.study.offline.landscape import Landscape, landscape_from_run
from autotune.study.offline.replay import RecordedPlanning, RecordedRunner, replay
from autotune.study.runner import CompleteRunner
from autotune.testing.fake_runner import FakeRunner
from tests.study.test_session import QUICK, run

MOST = 6


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Landscape:
    directory = tmp_path_factory.mktemp("recorded")
    planners = {kind: names for kind, names in QUICK.items() if kind != "order"}  # every order: plans to choose from
    run(directory, CompleteRunner(FakeRunner()), trials=24, sampler="random", planners=planners, moves=True)
    return landscape_from_run(directory / "run")


@pytest.fixture(scope="module")
def replayed(known: Landscape) -> replays.ReplayResult:
    return replay(known, "tpe", 0, MOST)


def test_it_is_the_studys_own_search(known: Landscape, monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []

    def tune(config, runner, run_dir, **options):
        begun.append(config.sampler)
        raise replays.ReplayEnded

    monkeypatch.setattr("autotune.study.session.tune", tune)
    assert replay(known, "gp", 0, MOST).fastest_gaps == ()
    assert begun == ["gp"]


def test_so_many_trials_are_measured_and_the_distance_to_the_best_never_grows(replayed):
    assert len(replayed.fastest_gaps) == len(replayed.leader_gaps) == len(replayed.lost) == MOST
    assert list(replayed.fastest_gaps) == sorted(replayed.fastest_gaps, reverse=True)
    assert all(gap >= 0 for gap in replayed.fastest_gaps if math.isfinite(gap))
    assert list(replayed.lost) == sorted(replayed.lost)


def test_the_same_seed_gives_the_same_search_and_others_others(known, replayed):
    assert replay(known, "tpe", 0, MOST) == replayed
    others = [replay(known, "random", seed, MOST) for seed in range(4)]
    assert len({(one.requests, one.neighbour_share) for one in others}) > 1


def test_with_all_plans_measured_the_best_on_record_is_found_and_it_is_enough(known: Landscape):
    ran = {point.plan for point in known.points if point.measurement.step_seconds}
    found = replay(known, "random", 3, 200)
    assert len(found.fastest_gaps) == len(ran)
    assert found.fastest_gaps[-1] == 0.0
    assert found.requests < 400


@pytest.mark.parametrize("tolerance", [0.0, STEP_TOLERANCE])
def test_the_replayed_study_has_the_budget_of_the_record_and_its_tolerance(
    known: Landscape, tmp_path: Path, tolerance: float
):
    record = replace(known, budget_tolerance=tolerance)
    budget = replays._config(record, "random", 0, MOST, tmp_path, priors=False).parsed_budget
    assert budget.tolerance == tolerance
    assert budget.step_bytes(floor_bytes=known.floor_bytes, baseline_step_bytes=0) == known.budget_bytes


def test_settings_on_record_get_their_own_plan_and_others_their_neighbours(known: Landscape):
    answers = RecordedPlanning(known)
    point = next(point for point in known.points if point.kind == "search")
    made = answers.make_candidate(point.settings, 0)
    assert answers.find_point(made.plan).plan == point.plan
    assert answers.neighbours == 0
    near = answers.make_candidate({**point.settings, "order": {"planner": "nobody has it"}}, 0)
    assert near.settings["order"] == {"planner": "nobody has it"}
    assert answers.find_point(near.plan).plan in {one.plan for one in known.points}
    assert (answers.requests, answers.neighbours) == (2, 1)


def recorded(known: Landscape, **fields: object) -> tuple[RecordedRunner, Plan]:
    answers = RecordedPlanning(known)
    first = next(answers.propose(0)).plan
    return RecordedRunner(answers, **{"most": 9, "samples": 4, "seed": 0, **fields}), first


def test_turns_are_drawn_from_the_recorded_ones_and_differ_each_time(known: Landscape):
    runner, plan = recorded(known)
    own = runner.planning.find_point(plan).measurement
    pairs = set(zip(own.step_seconds, own.baseline_seconds, strict=True))
    first, second = (runner.measure(plan, budget_bytes=0) for _ in range(2))
    for seen in (first, second):
        assert len(seen.step_seconds) == 4
        assert set(zip(seen.step_seconds, seen.baseline_seconds, strict=True)) <= pairs
        assert seen.charged_bytes == own.charged_bytes
    assert first.step_seconds != second.step_seconds


def test_a_plan_that_cannot_win_is_stopped_early_as_on_the_device(known: Landscape):
    runner, plan = recorded(known, samples=8)
    ratio = runner.planning.find_point(plan).measurement.time_ratio
    seen = runner.measure(plan, budget_bytes=0, beat=0.9 * ratio)
    assert (seen.outcome, len(seen.step_seconds)) == (Outcome.STOPPED_EARLY, 2)
    assert runner.measure(plan, budget_bytes=0, beat=1.1 * ratio).outcome is Outcome.OK


def test_what_failed_on_record_fails_the_same_way(known: Landscape):
    runner, plan = recorded(known)
    hashed = runner.planning.find_point(plan).plan
    points = tuple(
        replace(one, measurement=replace(one.measurement, outcome=Outcome.OUT_OF_MEMORY)) if one.plan == hashed else one
        for one in known.points
    )
    broken = replace(known, points=points)
    runner, plan = recorded(broken)
    assert runner.measure(plan, budget_bytes=0).outcome is Outcome.OUT_OF_MEMORY
    assert replay(broken, "random", 0, MOST).lost[-1] == 1


def test_a_run_whose_plain_step_did_not_fit_is_searched_too(known: Landscape):
    def alone(seen: Measurement) -> Measurement:
        return replace(seen, baseline_seconds=())

    points = tuple(replace(one, measurement=alone(one.measurement)) for one in known.points)
    without = replace(known, baseline=Measurement(Outcome.OUT_OF_MEMORY), points=points)
    found = replay(without, "random", 3, 200)
    assert len(found.fastest_gaps) == len({point.plan for point in points if point.measurement.step_seconds})
    assert found.fastest_gaps[-1] == 0.0


def test_after_so_many_measurements_it_is_enough(known: Landscape):
    runner, plan = recorded(known, most=1)
    runner.measure(plan, budget_bytes=0)
    with pytest.raises(replays.ReplayEnded):
        runner.measure(plan, budget_bytes=0)


def test_a_record_where_nothing_fits_is_refused_before_it_is_searched(known: Landscape):
    points = tuple(
        replace(one, measurement=replace(one.measurement, outcome=Outcome.OVER_BUDGET)) for one in known.points
    )
    with pytest.raises(ConfigError, match=r"no recorded plan was measured within .*: nothing to find"):
        replay(replace(known, points=points), "tpe", 0, MOST)


def test_planners_that_this_version_has_not_are_left_out(known: Landscape):
    new = {"recompute": {"planner": "of another version"}}
    points = tuple(
        replace(one, settings={**one.settings, **new}) if one.kind == "search" else one for one in known.points
    )
    assert len(replay(replace(known, points=points), "random", 0, MOST).fastest_gaps) == MOST
    only = tuple(replace(one, settings={**one.settings, **new}) for one in known.points)
    with pytest.raises(ConfigError, match="this version has no recompute planner of the record"):
        replay(replace(known, points=only), "random", 0, MOST)


def test_the_record_is_left_as_it_is(known: Landscape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    replay(known, "random", 0, 2)
    assert not list(tmp_path.iterdir())


def test_the_planners_alone_measure_what_they_propose_and_ask_for_nothing_else(known: Landscape):
    alone = replay(known, "planners", 0, 200)
    proposed = {point.plan for point in known.points if point.kind in ("planner", "smallest")}
    assert 1 < len(alone.fastest_gaps) <= len(proposed)
    assert (alone.planners, alone.priors) == (True, False)
    assert replay(known, "planners", 1, 200).fastest_gaps == alone.fastest_gaps


def test_a_search_alone_begins_without_the_planners_plans(known: Landscape):
    first = replay(known, "random", 0, 2, planners=False)
    smallest = next(point for point in known.points if point.kind == "smallest")
    assert first.fastest_gaps[0] == pytest.approx(known.ratio_of(smallest) / known.best_ratio - 1)
    assert first.requests >= 1
    assert not first.planners


def test_simulated_settings_count_as_no_request(known: Landscape):
    answers = RecordedPlanning(known)
    listener = replays.ReplayListener(answers, planners_alone=False)
    settings = known.points[-1].settings
    listener(PhaseStarted(StudyPhase.PRIORS))
    answers.make_candidate(settings, 0)
    assert answers.requests == 0
    listener(PhaseStarted(StudyPhase.SEARCH))
    answers.make_candidate(settings, 0)
    assert answers.requests == 1


def test_priors_are_replayed_for_samplers_that_read_them(known: Landscape):
    assert [replay(known, name, 0, 3).priors for name in ("tpe", "random")] == [True, False]
    assert not replay(known, "tpe", 0, 3, priors=False).priors


def test_regret_is_the_median_over_seeds_and_a_search_that_ended_keeps_its_last_gap(replayed):
    results = [replace(replayed, fastest_gaps=gaps) for gaps in ((0.3, 0.1), (0.2, 0.2, 0.0), (math.inf, 0.4, 0.4), ())]
    regret = replays.summarize_regret(results[:3], 3)
    assert (regret.middle, regret.low, regret.high) == (0.1, 0.0, 0.4)
    assert replays.summarize_regret(results, 1).high == math.inf
    assert [replays.trials_until_near(one, 0.1) for one in results] == [2, 3, math.inf, math.inf]


def test_a_replay_that_a_signal_ends_is_no_result(known: Landscape, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autotune.study.session.tune", lambda *args, **options: SimpleNamespace(interrupted=15))
    with pytest.raises(StudyInterruptedError) as ended:
        replay(known, "random", 0, MOST)
    assert ended.value.exit_code == 143


def test_cma_es_replays(known: Landscape):
    assert len(replay(known, "cmaes", 0, MOST).fastest_gaps) == MOST
