"""A study of the Pareto front on a runner without a device: its budgets, its points, its files, and a resumed one."""

import csv
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from autotune.errors import ConfigError, PlanError
from autotune.ir.plan import Plan
from autotune.ir.schedule import lower
from autotune.planners import make_plan
from autotune.planners.candidates import DevicePlanning
from autotune.predict.simulate import simulate
from autotune.records import plan_file as planfile
from autotune.records.config import Config, load_config
from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir
from autotune.records.trial import Trial, append_trial, load_trials
from autotune.report.html import write_report
from autotune.study.front.budget_levels import EVEN_LEVELS, LEVELS
from autotune.study.front.budget_scale import find_budget_scale
from autotune.study.front.front_files import SPREAD_BYTES
from autotune.study.offline.landscape import landscape_from_run
from autotune.study.outcome import StudyResult
from autotune.study.recorded_run import RecordedRun
from autotune.study.session import tune
from autotune.study.verdicts.confirm import MIN_ROUNDS
from autotune.study.verdicts.front import FrontStatus
from autotune.study.verdicts.ranking import Rules, plan_hash
from autotune.testing.fake_runner import FLOOR_BYTES, FakeRunner
from autotune.testing.graphs import training_chain
from dashboards.studies import read_study

ROOT = Path(__file__).parents[2]
GREEDY = {"recompute": ["keep", "greedy"], "reorder": ["keep"], "order": ["traced"], "update": ["at_end"]}
"""Planners whose plans meet the target to a few kilobytes, in milliseconds."""


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the planners quick: windows take CP-SAT seconds each."""
    monkeypatch.setattr("autotune.planners.space.find_spec", lambda _: None)


def runner(**fields: object) -> FakeRunner:
    return FakeRunner(graph=training_chain(24, nbytes=100_000, param_bytes=5_000), **fields)


def configured(directory: Path, **fields: object) -> Config:
    given = {"trials": 20, "objective": "pareto", "plans": str(directory / "plans"), "planners": GREEDY, **fields}
    return load_config("resnet18", overrides=given)


def run(directory: Path, fake: FakeRunner | None = None, *, lasting: bool = False, **fields: object) -> StudyResult:
    return tune(configured(directory, **fields), fake or runner(), directory / "run", lasting=lasting)


def test_a_front_of_a_step_of_a_few_kilobytes_has_plan_files(tmp_path: Path):
    """A point's budget is above 1000 % of such a step, more than a budget in percent may be."""
    small = FakeRunner(graph=training_chain(10, nbytes=1000, param_bytes=100))
    run(tmp_path, small, trials=6)
    files = sorted(RunDir(tmp_path / "run").front.glob("plan-*.json"))
    assert files
    assert all(planfile.read(path).budget.startswith("step:") for path in files)


def test_a_session_removes_no_other_files_from_the_folder_of_the_front_than_plans(tmp_path: Path):
    small = FakeRunner(graph=training_chain(10, nbytes=1000, param_bytes=100))
    names = "plan-1.trace.json", "plan-a.json"
    run(tmp_path, small, trials=6)
    front = RunDir(tmp_path / "run").front
    for name in ("plan-99.json", *names):
        (front / name).write_text("{}")
    run(tmp_path, small, trials=6)
    assert all((front / name).exists() for name in names)
    assert not (front / "plan-99.json").exists()


@dataclass
class Recording(FakeRunner):
    """Runner that lists the plans that it measured in the processes since each `renew`."""

    processes: list[list[str]] = field(default_factory=lambda: [[]])

    def renew(self) -> None:
        super().renew()
        self.processes.append([])

    def measure(self, plan, *, budget_bytes, beat=None):
        seen = super().measure(plan, budget_bytes=budget_bytes, beat=beat)
        self.processes[-1].append(self.measured[-1])
        return seen


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recording, StudyResult]:
    """One whole study of a front, looked at from many sides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.planners.space.find_spec", lambda _: None)
        directory = tmp_path_factory.mktemp("front")
        fake = Recording(graph=training_chain(24, nbytes=100_000, param_bytes=5_000))
        return directory, fake, run(directory, fake, lasting=True)


def scale_of(result: StudyResult):
    scale = find_budget_scale(result.trials, Rules(result.budget_bytes, result.floor_bytes, 0.0, 0.0))
    assert scale is not None
    return scale


def test_without_a_budget_targets_end_at_eagers_peak_and_the_limit_leaves_room_for_the_allocator(told):
    _, fake, result = told
    eager = result.baseline.measurement.step_peak_bytes
    assert configured(told[0]).budget == "110%"
    assert result.budget_bytes == int(1.1 * eager)
    assert max(trial.target_bytes for trial in result.trials if trial.target_bytes) <= eager
    assert scale_of(result).high_bytes == eager
    assert fake.beats[0] is None  # the smallest plan is a point however slow it is


def test_the_planners_answer_first_for_even_budgets_and_then_where_the_time_falls_most(told):
    _, _, result = told
    planned = [trial for trial in result.trials[2:] if trial.number < 2 + LEVELS]
    assert {trial.kind for trial in planned} <= {"planner", "repeat"}
    top, low = planned[0].estimate.peak_bytes, result.trials[1].estimate.peak_bytes
    even = [trial.target_bytes for trial in planned[1:EVEN_LEVELS]]
    assert sorted(even) == [low + (top - low) * level // EVEN_LEVELS for level in range(1, EVEN_LEVELS)]
    known = {(trial.estimate.peak_bytes, trial.estimate.seconds) for trial in result.trials[1 : 2 + EVEN_LEVELS]}
    for trial in planned[EVEN_LEVELS:]:
        steps = list(itertools.pairwise(sorted(known)))
        (left, _), (right, _) = max(steps, key=lambda step: step[0][1] / step[1][1])
        assert trial.target_bytes == (left + right) // 2
        known.add((trial.estimate.peak_bytes, trial.estimate.seconds))
    assert all(trial.estimate.peak_bytes <= trial.target_bytes for trial in planned)
    assert all(trial.kind in ("search", "repeat", "confirm") for trial in result.trials[2 + LEVELS :])


def test_at_least_eight_points_are_verified_and_each_is_faster_than_every_smaller_one(told):
    _, fake, result = told
    assert len(result.front) >= 8
    charges = [point.charged_bytes for point in result.front]
    ratios = [point.ratio.middle for point in result.front]
    assert charges == sorted(charges)
    assert ratios == sorted(ratios, reverse=True)
    assert charges[-1] <= result.budget_bytes * 1.005
    assert ratios[-1] < 1.05
    runs = [trial for trial in result.trials if trial.kind == "confirm"]
    assert MIN_ROUNDS <= fake.renewed < len(runs)
    for point in result.front:
        assert point.rounds == sum(trial.plan == point.trial.plan for trial in runs) >= 2


def test_no_point_is_dominated_by_a_re_measured_plan_and_every_plan_left_out_has_a_rival(told):
    _, _, result = told
    by_number = {point.number: point for point in result.front_plans}
    for point in result.front:
        for other in result.front_plans:
            if other.charged_bytes <= point.charged_bytes and other is not point:
                assert other.ratio.middle > point.ratio.middle
    for left in set(by_number) - {point.number for point in result.front}:
        rival = by_number[left].rival
        assert rival is not None
        assert by_number[left].status in (FrontStatus.UNCERTAIN, FrontStatus.DOMINATED)


def test_each_point_has_a_plan_file_whose_settings_and_target_make_the_same_plan_again(told):
    directory, fake, result = told
    files = RunDir(directory / "run")
    assert sorted(files.front.glob("plan-*.json")) == sorted(result.front_paths)
    for point, path in zip(result.front, result.front_paths, strict=True):
        file = planfile.read(path)
        graph, costs = planfile.read_records(path, file)
        assert make_plan(graph, file.settings, file.target_bytes, costs) == file.plan == point.trial.plan
        assert simulate(graph, lower(graph, file.plan), costs).peak_bytes == file.estimate.peak_bytes
        planfile.match_plan(path, file, fake.prepare())
        assert file.measurement.step_charged_bytes == point.charged_bytes <= file.budget_bytes
        assert file.budget_bytes >= point.charged_bytes + SPREAD_BYTES, "another process may be charged more"
        assert file.budget_bytes <= (point.charged_bytes + SPREAD_BYTES) * 1.01
        assert file.verified == "bit-equal to eager"
        assert file.floor_bytes == FLOOR_BYTES


def test_a_point_of_another_graph_is_refused(told):
    path = told[2].front_paths[0]
    other = replace(runner(), graph=training_chain(8))
    with pytest.raises(PlanError, match="ops of forward instead of"):
        planfile.match_plan(path, planfile.read(path), other.prepare())


def test_the_table_lists_what_the_result_has_in_both_forms(told):
    directory, _, result = told
    files = RunDir(directory / "run")
    document = json.loads(files.front_table.read_text())
    assert document["limit_bytes"] == result.budget_bytes
    assert document["eager_bytes"] == result.baseline.measurement.step_peak_bytes
    assert [row["plan"] for row in document["plans"]] == [point.number for point in result.front_plans]
    front = [row for row in document["plans"] if row["status"] == "front"]
    assert [row["time_ratio"]["low"] for row in front] == [point.ratio.low for point in result.front]
    assert [files.front / row["file"] for row in front] == list(result.front_paths)
    with files.front_csv.open() as file:
        flat = list(csv.DictReader(file))
    assert [int(row["step_charged_bytes"]) for row in flat] == [row["step_charged_bytes"] for row in document["plans"]]
    assert [row["file"] or None for row in flat] == [row["file"] for row in document["plans"]]


def test_optuna_has_the_budget_of_every_trial_that_it_suggested(told):
    directory, _, result = told
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{directory}/run/optuna.db")
    assert study.metric_names == ["step_bytes", "time_ratio"]
    scale = scale_of(result)
    shares = set()
    for ours, theirs in zip(result.trials, study.trials, strict=True):
        if ours.kind in ("planner", "search", "repeat"):
            share = theirs.params["budget"]
            target = scale.to_bytes(share)
            assert ours.target_bytes == target
            shares.add(share)
    assert len(shares) > LEVELS


def test_the_records_alone_give_the_same_front_and_the_report_and_the_study_page_show_it(told):
    directory, _, result = told
    records = RecordedRun.load(directory / "run")
    assert [(point.number, point.ratio) for point in records.front] == [
        (point.number, point.ratio) for point in result.front
    ]
    page = write_report(directory / "run").read_text()
    assert "<h2>Pareto front</h2>" in page
    assert f"A front of {len(result.front)} plans" in page
    assert "verified front" in page
    shown = read_study(directory / "run")
    assert [row[0] for row in shown.front] == [str(point.number) for point in result.front_plans]
    assert [point.number for point in shown.points if point.is_verified] == [
        number for number in sorted(point.trial.number for point in result.front) for number in [_first(result, number)]
    ]


def test_the_page_of_a_study_shows_its_front_in_place_of_the_plans_beside_the_best(told, monkeypatch):
    from streamlit.testing.v1 import AppTest

    directory, _, result = told
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    arguments = ["--runs", str(directory), "--experiments", "none", "--mlflow", "http://127.0.0.1:9"]
    monkeypatch.setattr(sys, "argv", ["app.py", *arguments])
    page = AppTest.from_file(str(ROOT / "dashboards" / "views" / "study.py"), default_timeout=60)
    page.query_params["study"] = "run"
    page.run()
    assert not page.exception, page.exception[0].message
    assert "Pareto front" in [element.value for element in page.subheader]
    front, trials = (element.value for element in page.dataframe)
    assert list(front["plan"]) == [str(point.number) for point in result.front_plans]
    assert len(trials) == len(result.trials)


def _first(result: StudyResult, number: int) -> int:
    return next(point.number for point in result.front if point.trial.number == number)


def test_a_run_with_many_budgets_is_no_landscape(told):
    with pytest.raises(ConfigError, match="with a budget for each plan; a replay needs a run of objective: time"):
        landscape_from_run(told[0] / "run")


def test_a_resumed_study_that_was_complete_runs_nothing_and_has_the_same_front(told, tmp_path):
    directory, _, first = told
    shutil.copytree(directory / "run", tmp_path / "run")
    files = {path.name: path.read_bytes() for path in first.front_paths}
    again = run(tmp_path, fake := runner(), lasting=True)
    assert fake.measured == []
    assert again.trials == first.trials
    assert [(point.number, point.ratio) for point in again.front] == [(p.number, p.ratio) for p in first.front]
    assert {path.name: path.read_bytes() for path in again.front_paths} == files


def test_a_study_cut_off_among_the_levels_goes_on_with_the_same_levels(told, tmp_path):
    whole = told[2]
    first = run(tmp_path / "cut", trials=6)
    # as if it had been killed before any confirmation
    path = RunDir(tmp_path / "cut" / "run").trials
    lines = path.read_text().splitlines(keepends=True)[:6]
    path.write_text("".join(lines))
    rest = run(tmp_path / "cut")
    assert rest.trials[:6] == first.trials[:6]
    levels = [trial.target_bytes for trial in whole.trials[2 : 2 + LEVELS]]
    assert {trial.target_bytes for trial in rest.trials[2 : 2 + LEVELS]} == set(levels)
    assert len(rest.front) >= 8


def test_a_level_that_no_plan_meets_is_proposed_once_and_the_other_levels_are_planned(told, tmp_path):
    levels = [trial.target_bytes for trial in told[2].trials[2 : 2 + EVEN_LEVELS]]
    unmet, asked = levels[1], list[int]()

    class Coarse(DevicePlanning):
        """All of its plans for one of the even levels are too large."""

        def propose(self, budget_bytes, seconds):
            asked.append(budget_bytes)
            for candidate in super().propose(budget_bytes, seconds):
                if budget_bytes != unmet or candidate.estimate.peak_bytes > unmet:
                    yield candidate

    tune(configured(tmp_path, trials=2 + LEVELS), runner(), tmp_path / "run", planning=Coarse, lasting=False)
    assert asked.count(unmet) == 1
    assert set(levels) <= set(asked)


def test_levels_go_on_the_same_after_a_resume_where_recorded_estimates_are_not_the_planners(tmp_path):
    """On a GPU the peak of the caching allocator replaces the one that planners predict."""

    class Reserving(DevicePlanning):
        def estimate_layout(self, candidate):
            return replace(candidate.estimate, peak_bytes=candidate.estimate.peak_bytes + 10_000)

    def plan_levels() -> list[int | None]:
        config = configured(tmp_path, trials=2 + EVEN_LEVELS)
        result = tune(config, runner(), tmp_path / "run", planning=Reserving, lasting=False)
        return [trial.target_bytes for trial in result.trials[2 : 2 + EVEN_LEVELS]]

    whole, path = plan_levels(), RunDir(tmp_path / "run").trials
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))  # as if it had been killed
    assert plan_levels() == whole


def test_a_budget_is_the_upper_limit_of_the_front(tmp_path):
    result = run(tmp_path, budget="50%", trials=14)
    assert result.front
    eager = result.baseline.measurement.step_peak_bytes
    assert all(point.charged_bytes <= eager * 0.5 * 1.005 for point in result.front)
    assert max(trial.target_bytes for trial in result.trials if trial.target_bytes) <= eager // 2


def test_a_plan_that_fails_later_loses_its_file(told, tmp_path):
    directory, _, first = told
    shutil.copytree(directory / "run", tmp_path / "run")
    lost = first.front[3]
    failed = replace(
        lost.trial, number=len(first.trials), measurement=replace(lost.trial.measurement, outcome=Outcome.CRASHED)
    )
    append_trial(RunDir(tmp_path / "run").trials, failed)
    again = run(tmp_path)
    assert lost.number not in [point.number for point in again.front]
    assert {path.name for path in RunDir(tmp_path / "run").front.glob("plan-*.json")} == {
        path.name for path in again.front_paths
    }


def test_an_earlier_run_without_targets_is_read_and_goes_on(tmp_path):
    """Earlier versions searched one budget for `pareto`, and recorded no targets."""
    before = run(tmp_path, objective="time", budget="90%", trials=8)
    files = RunDir(tmp_path / "run")
    config = load_config(str(files.config)).model_copy(update={"objective": "pareto"})
    files.config.write_text(files.config.read_text().replace("objective: time", "objective: pareto"))
    lines = [json.loads(line) for line in files.trials.read_text().splitlines()]
    for line in lines:
        del line["target_bytes"]
    files.trials.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = RecordedRun.load(tmp_path / "run")
    assert records.is_front
    assert {point.trial.plan for point in records.front_plans} == {plan.trial.plan for plan in before.confirmed}
    assert "Pareto front" in write_report(tmp_path / "run").read_text()
    landscape_from_run(tmp_path / "run")  # all of its plans are for one budget
    after = tune(config.model_copy(update={"trials": 22}), runner(), tmp_path / "run", lasting=False)
    assert [replace(trial, target_bytes=None) for trial in after.trials[: len(lines)]] == [
        replace(trial, target_bytes=None) for trial in before.trials
    ]
    assert len(after.front) >= 8


def test_where_eager_does_not_fit_the_front_is_in_seconds(tmp_path):
    class Unfit(FakeRunner):
        """Plans run without eager beside them."""

        def measure(self, plan, *, budget_bytes, beat=None):
            return replace(super().measure(plan, budget_bytes=budget_bytes), baseline_seconds=())

    fake = Unfit(graph=training_chain(24, nbytes=100_000, param_bytes=5_000), baseline_fits=False)
    result = run(tmp_path, fake)
    assert len(result.front) >= 4
    assert all(point.ratio is None and point.seconds is not None for point in result.front)
    seconds = [point.seconds.middle for point in result.front]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("sampler", ["gp", "random"])
def test_every_sampler_chooses_budgets(tmp_path, sampler):
    result = run(tmp_path, sampler=sampler, trials=16)
    searched = {trial.target_bytes for trial in result.trials[2 + LEVELS :] if trial.kind in ("search", "repeat")}
    assert len(searched) > 1
    scale = scale_of(result)
    assert all(scale.low_bytes <= target <= scale.high_bytes for target in searched)


def test_a_search_that_adds_no_point_ends_by_itself(tmp_path):
    one = {"order": ["traced"], "update": ["at_end"], "recompute": ["keep"], "reorder": ["keep"]}
    result = run(tmp_path, trials=None, planners=one, patience=2)
    assert result.best is not None
    assert [point.number for point in result.front] == [1]
    assert not [trial for trial in result.trials if trial.kind == "search"]


class SlowRunner(FakeRunner):
    """A measurement takes ten seconds of a clock that nothing else moves; the first one takes forty."""

    now = 0.0

    def measure(self, plan, *, budget_bytes, beat=None):
        self.now += 10 if self.measured else 40
        return super().measure(plan, budget_bytes=budget_bytes, beat=beat)


def test_plans_share_new_processes_and_none_runs_twice_in_the_same_ones(told):
    _, fake, result = told
    processes = fake.processes
    confirmed = [plan_hash(trial.plan) for trial in result.trials if trial.kind == "confirm"]
    assert sorted(itertools.chain(*processes[1:])) == sorted(confirmed)
    assert all(len(ran) == len(set(ran)) for ran in processes[1:])
    assert max(map(len, processes[1:])) > 1


@pytest.mark.parametrize(("limit", "points"), [("95s", 2), ("200s", 4), ("300s", 7)])
def test_a_front_uses_its_time_and_verifies_every_point_that_it_has_time_for(tmp_path, monkeypatch, limit, points):
    fake = SlowRunner(graph=training_chain(24, nbytes=100_000, param_bytes=5_000))
    for module in ("session", "runner"):
        clock = SimpleNamespace(monotonic=lambda: fake.now, time=time.time)
        monkeypatch.setattr(f"autotune.study.{module}.time", clock)
    result = run(tmp_path, fake, trials=None, patience=1000, time=limit)
    seconds = float(limit.removesuffix("s"))
    assert len(result.front) >= points
    assert seconds - 2 * 40 <= fake.now <= seconds + 10  # no trial begins that may take as long as the longest
    assert min(point.rounds for point in result.front) >= MIN_ROUNDS


def test_uncertain_plans_run_again_before_a_search_that_adds_nothing_goes_on(tmp_path):
    """Where times of neighbours are hard to tell apart, two runs of each leave the front uncertain."""
    fake = runner(slowdown_of=lambda plan: random.Random(2000 + len(fake.measured)).uniform(0.94, 1.06))
    result = run(tmp_path, fake, trials=60, patience=1000, sampler="random")
    kinds = [trial.kind for trial in result.trials]
    rounds: Counter[Plan | None] = Counter()
    first_extra = None
    for trial in result.trials:
        rounds[trial.plan] += trial.kind == "confirm"
        if first_extra is None and rounds[trial.plan] > MIN_ROUNDS:
            first_extra = trial.number
    assert "search" in kinds[first_extra:], "the search goes on after the runs"
    assert first_extra is not None


def test_a_plan_that_a_smaller_one_is_surely_faster_than_is_stopped_early_and_no_other(tmp_path):
    slow: set[str] = set()

    def slowdown(plan: Plan) -> float:
        # every second plan of the levels is much slower than predicted
        if plan_hash(plan) in slow or len(fake.measured) % 2 == 0:
            slow.add(plan_hash(plan))
        return 3.0 if plan_hash(plan) in slow else 1.0

    fake = runner(slowdown_of=slowdown)
    result = run(tmp_path, fake)
    stopped = [trial for trial in result.trials if trial.measurement.outcome is Outcome.STOPPED_EARLY]
    assert stopped
    for trial in stopped:
        smaller = [
            other.measurement.time_ratio
            for other in result.trials[: trial.number]
            if other.was_run and other.measurement.outcome is Outcome.OK
            and other.plan is not None and other.step_charged_bytes < trial.estimate.peak_bytes
        ]  # fmt: skip
        assert trial.measurement.time_ratio > min(smaller)
    assert not {trial.plan for trial in stopped} & {point.trial.plan for point in result.front_plans}


def test_trials_of_the_other_objective_record_their_targets_too(tmp_path):
    result = run(tmp_path, objective="time", budget="70%", trials=6)
    fake = runner()
    for trial in load_trials(RunDir(tmp_path / "run").trials):
        if trial.plan is not None and trial.kind in ("planner", "search", "confirm"):
            assert make_plan(fake.graph, trial.settings, trial.target_bytes, fake.costs) == trial.plan
    assert result.front == ()
    assert result.plan.target_bytes == result.best.target_bytes
    assert not RunDir(tmp_path / "run").front.exists()


def test_a_trial_without_a_target_is_read():
    assert Trial(0, "baseline", "w", "d").target_bytes is None
