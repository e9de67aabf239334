"""A study with priors: the sampler reads them, and no record but their own file shows them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import ConfigError
from autotune.records.trial import load_trials
from autotune.report.html import write_report
from autotune.study.events import Event, PhaseStarted, StudyPhase
from autotune.study.priors.observations import PriorSource, observe_earlier, read_priors
from autotune.study.priors.phase import SIMULATED_PER_TRIAL
from autotune.study.recorded_run import RecordedRun
from autotune.study.seeds import MAX_SEEDS, OBSERVED_KINDS, read_seeds
from autotune.study.session import StudyResult
from autotune.study.verdicts.ranking import TrialScore, plan_hash
from autotune.testing.fake_runner import DEVICE, FakeRunner
from autotune.testing.graphs import training_chain
from tests.study.test_session import QUICK, stored
from tests.study.test_session import run as run_study

WIDE = {**QUICK, "order": ["traced", "list_by_bytes", "depth_first"]}
"""More settings than plans that the planners propose, and each planned in milliseconds."""
COMPLETE = optuna.trial.TrialState.COMPLETE


def run(directory: Path, runner: Any = None, events: list[Event] | None = None, **fields: Any) -> StudyResult:
    """Run a study with priors on the runner without a device."""
    return run_study(directory, runner, events, **{"priors": True, **fields})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyResult, list[Event]]:
    directory, events = tmp_path_factory.mktemp("tuned"), list[Event]()
    return directory, run(directory, None, events, trials=14, lasting=True, planners=WIDE), events


def phases(events: list[Event]) -> list[StudyPhase]:
    return [event.phase for event in events if isinstance(event, PhaseStarted)]


def test_settings_are_simulated_once_before_the_search_as_many_as_the_trials_left_allow(tuned):
    directory, result, events = tuned
    assert phases(events).index(StudyPhase.PRIORS) + 1 == phases(events).index(StudyPhase.SEARCH)
    before = sum(trial.kind in ("baseline", "smallest", "planner") for trial in result.trials)
    simulated = read_priors(directory / "run").simulated
    assert 0 < len(simulated) <= SIMULATED_PER_TRIAL * (14 - before)
    assert {one.source for one in simulated} == {PriorSource.SIMULATED}
    assert all(one.score.imputed for one in simulated)


def test_re_measured_plans_take_no_simulated_settings_from_a_run_that_goes_on(tmp_path: Path):
    run(tmp_path, priors=False, trials=14, lasting=True, planners=WIDE)
    trials = load_trials(tmp_path / "run" / "trials.jsonl")
    confirmed = sum(trial.kind == "confirm" for trial in trials)
    assert confirmed >= 2
    more = len(trials) - confirmed + 2
    run(tmp_path, priors=True, trials=more, lasting=True, planners=WIDE)
    assert read_priors(tmp_path / "run").simulated


def test_no_simulated_setting_is_a_trial_on_disk_in_optuna_or_in_the_result(tuned):
    directory, result, _ = tuned
    trials = load_trials(directory / "run" / "trials.jsonl")
    complete = [trial for trial in stored(directory).trials if trial.state == COMPLETE]
    assert list(result.trials) == trials
    assert [trial.number for trial in complete] == [trial.number for trial in trials]
    assert [trial.user_attrs["kind"] for trial in complete] == [trial.kind for trial in trials]
    unmeasured = {one.plan for one in read_priors(directory / "run").simulated} - {
        plan_hash(trial.plan) for trial in trials if trial.plan
    }
    assert unmeasured  # some were simulated and never measured
    attributes = {trial.user_attrs.get("plan_hash") for trial in stored(directory).trials}
    assert not unmeasured & attributes
    assert plan_hash(result.best.plan) not in unmeasured
    assert result.best.measurement.step_seconds


def test_the_report_is_the_same_bytes_without_the_file_of_priors(tuned, tmp_path):
    for name in ("with", "without"):
        shutil.copytree(tuned[0] / "run", tmp_path / name / "run")
    (tmp_path / "without" / "run" / "priors.json").unlink()
    pages = [write_report(tmp_path / name / "run").read_bytes() for name in ("with", "without")]
    assert pages[0] == pages[1]


def test_a_resumed_study_reads_the_same_priors_and_simulates_nothing(tuned, tmp_path):
    directory, before, first = tuned
    second = list[Event]()
    shutil.copytree(directory / "run", tmp_path / "run")
    priors = (tmp_path / "run" / "priors.json").read_bytes()
    result = run(tmp_path, None, second, trials=16, lasting=True, planners=WIDE)
    assert StudyPhase.PRIORS in phases(first)
    assert StudyPhase.PRIORS not in phases(second)
    assert len(result.trials) > len(before.trials)
    assert (tmp_path / "run" / "priors.json").read_bytes() == priors


@pytest.mark.parametrize("fields", [{"priors": False}, {"sampler": "random"}])
def test_nothing_is_simulated_where_the_config_or_the_sampler_has_no_use_for_it(tmp_path, fields):
    events: list[Event] = []
    run(tmp_path, None, events, trials=11, planners=WIDE, **fields)
    assert StudyPhase.PRIORS not in phases(events)
    assert not (tmp_path / "run" / "priors.json").exists()


def test_nothing_is_simulated_for_a_search_without_a_trial(tmp_path):
    events: list[Event] = []
    run(tmp_path, None, events, trials=3, planners=WIDE)
    assert StudyPhase.PRIORS not in phases(events)


def test_a_damaged_file_of_priors_is_named_with_the_next_step(tmp_path):
    run(tmp_path, trials=11, planners=WIDE)
    path = tmp_path / "run" / "priors.json"
    path.write_text(path.read_text()[:100])
    before = load_trials(tmp_path / "run" / "trials.jsonl")
    with pytest.raises(
        ConfigError, match=r"priors\.json: not a priors file: .*delete it: settings are simulated again"
    ):
        run(tmp_path, trials=13, planners=WIDE)
    assert load_trials(tmp_path / "run" / "trials.jsonl") == before


def test_a_front_simulates_nothing_because_its_budget_is_a_variable(tmp_path):
    events: list[Event] = []
    run(tmp_path, None, events, objective="pareto", trials=12, planners=WIDE)
    assert StudyPhase.PRIORS not in phases(events)


def test_nothing_is_simulated_by_default(tmp_path):
    events: list[Event] = []
    run_study(tmp_path, None, events, trials=11, planners=WIDE)
    assert StudyPhase.PRIORS not in phases(events)


# -- another run ----------------------------------------------------------------------------------------------------


class Elsewhere(FakeRunner):
    """The same step on another device."""

    def prepare(self):
        return replace(super().prepare(), device=OTHER)


OTHER = type(DEVICE)("cpu", "Other 1", 2**34, 4, "2.13.0")


@pytest.mark.parametrize(
    ("runner", "source"),
    [
        (FakeRunner(), PriorSource.SAME_STUDY),
        (Elsewhere(), PriorSource.OTHER_DEVICE),
        (FakeRunner(graph=training_chain(30, nbytes=100_000, param_bytes=5_000)), PriorSource.OTHER_GRAPH),
        (
            Elsewhere(graph=training_chain(30, nbytes=100_000, param_bytes=5_000)),
            PriorSource.OTHER_GRAPH_AND_DEVICE,
        ),
    ],
    ids=["same", "device", "graph", "both"],
)
def test_all_trials_of_another_run_are_observations_and_the_fastest_are_measured_first(tuned, tmp_path, runner, source):
    directory, before, _ = tuned
    result = run(tmp_path, runner, seed_from=str(directory / "run"), trials=12, lasting=True, planners=WIDE)
    earlier = read_priors(tmp_path / "run").earlier
    observed = [trial for trial in before.trials if trial.kind in OBSERVED_KINDS]
    assert {one.source for one in earlier} == {source}
    if source.has_bytes:
        assert [one.settings for one in earlier] == [trial.settings for trial in observed]
        assert any(one.score.memory > 0 for one in earlier)  # what did not fit there may not fit here
    else:
        assert all(one.score.memory == 0 and not one.score.imputed for one in earlier)
    ratios = {
        one.score.time_ratio: trial.measurement.time_ratio
        for one in earlier
        for trial in observed
        if trial.settings == one.settings and not one.score.imputed
    }
    assert all(ratio == there for ratio, there in ratios.items())
    seeded = [trial for trial in result.trials if trial.kind == "seed"]
    assert len(earlier) > MAX_SEEDS >= len(seeded) > 0
    complete = [trial for trial in stored(tmp_path).trials if trial.state == COMPLETE]
    assert len(complete) == len(result.trials)


def test_a_run_for_another_budget_gives_ratios_only_and_a_front_gives_no_observations(tuned, tmp_path):
    run(tmp_path, seed_from=str(tuned[0] / "run"), budget="80%", trials=4, planners=WIDE)
    earlier = read_priors(tmp_path / "run").earlier
    assert {one.source for one in earlier} == {PriorSource.OTHER_GRAPH}
    run(tmp_path / "front", objective="pareto", trials=8, planners=WIDE)
    seeds = read_seeds(tmp_path / "front" / "run", tmp_path)
    assert seeds.settings
    assert seeds.earlier is None


def test_the_other_run_is_needed_no_more_once_its_trials_are_here(tuned, tmp_path):
    shutil.copytree(tuned[0] / "run", tmp_path / "source")
    run(tmp_path, seed_from=str(tmp_path / "source"), trials=6, planners=WIDE)
    earlier = read_priors(tmp_path / "run").earlier
    shutil.rmtree(tmp_path / "source")
    run(tmp_path, seed_from=str(tmp_path / "source"), trials=10, planners=WIDE)
    assert earlier
    assert read_priors(tmp_path / "run").earlier == earlier


def test_a_run_without_its_other_records_gives_its_fastest_settings_only(tuned, tmp_path):
    (tmp_path / "source").mkdir()
    shutil.copy(tuned[0] / "run" / "trials.jsonl", tmp_path / "source")
    seeds = read_seeds(tmp_path / "source", tmp_path)
    assert seeds.earlier is None
    assert 0 < len(seeds.settings) <= MAX_SEEDS


def test_a_wrong_result_of_another_graph_is_no_observation_and_one_of_this_graph_violates_its_constraint():
    right, wrong = TrialScore(1.0, 900, 0.2, 0.0, imputed=False), TrialScore(0.9, 900, 0.1, 1.0, imputed=False)
    scores = [({"order": {"planner": "traced"}}, right), ({"order": {"planner": "beam"}}, wrong)]
    assert [one.score for one in observe_earlier(PriorSource.SAME_STUDY, scores)] == [right, wrong]
    assert [one.score for one in observe_earlier(PriorSource.OTHER_GRAPH, scores)] == [replace(right, memory=0.0)]


def test_the_record_of_priors_is_plain_json_that_names_its_sources(tuned):
    document = json.loads((tuned[0] / "run" / "priors.json").read_text())
    assert document["schema"] == 1
    assert {one["source"] for one in document["simulated"]} == {"simulated"}
    assert RecordedRun.load(tuned[0] / "run").best.plan == tuned[1].best.plan
