"""A sampler with observations that nobody measured: it is faster where they are right, and not lost where they are wrong."""

import math
import statistics
from collections.abc import Callable, Sequence

import optuna
import pytest

from autotune.planners.space import Space
from autotune.study.priors.discrepancy import Calibrated, Calibration
from autotune.study.priors.observations import PriorSource
from autotune.study.priors.sampler import MOST_FOR_GAUSSIAN_PROCESS, PLAIN_EVERY, PriorSampler
from tests.study.priors.synthetic import RULES, SPACE, draw, misleading_log, observe, search, useful_log

SEEDS = range(20)
NEAR = 0.02


class Recorder(optuna.samplers.BaseSampler):
    """Draws at random, and keeps the trials that it is shown."""

    def __init__(self) -> None:
        self.inner, self.shown = optuna.samplers.RandomSampler(seed=0), list[list[optuna.trial.FrozenTrial]]()

    def infer_relative_search_space(self, study, trial):
        self.shown.append(study.get_trials())
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return self.inner.sample_independent(study, trial, name, distribution)


def calibrated(count: int, source: PriorSource = PriorSource.SIMULATED) -> list[Calibrated]:
    observations = [observe(settings, useful_log(settings), source) for settings in draw(count, 5)]
    return Calibration(observations, RULES).update([])


def asked(
    recorder: optuna.samplers.BaseSampler,
    shown: Sequence[Calibrated],
    count: int,
    objectives=("time_ratio",),
    *,
    value_of: Callable[[int], float] = lambda number: 1.0 + number,
    moves: bool = False,
) -> optuna.Study:
    """Ask for `count` trials, of which the third is a repeat; with `moves` each follows a trial without settings."""
    sampler = PriorSampler(recorder, SPACE, objectives, lambda: shown, 0)
    study = optuna.create_study(sampler=sampler, directions=["minimize"] * len(objectives))
    satisfied = {"memory": 0.0, "numerics": 0.0}
    for number in range(count):
        if moves:
            move = optuna.trial.create_trial(
                values=[0.5] * len(objectives), user_attrs={"kind": "move"}, constraints=satisfied
            )
            study.add_trial(move)
        trial = study.ask()
        for kind, planners in SPACE.items():
            trial.suggest_categorical(kind, list(planners))
        trial.set_user_attr("kind", "repeat" if number == 2 else "search")
        for name, violation in satisfied.items():
            trial.set_constraint(name, violation)
        study.tell(trial, [value_of(number)] * len(objectives))
    return study


def completed(shown: Sequence[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in shown if trial.state == optuna.trial.TrialState.COMPLETE]


def trials_until_near(bests: list[float]) -> float:
    return next((number for number, best in enumerate(bests, 1) if best <= NEAR), math.inf)


def test_with_useful_predictions_the_best_is_near_in_at_most_two_thirds_of_the_measured_trials():
    without = [trials_until_near(search("tpe", seed, 30, enough=NEAR)) for seed in SEEDS]
    with_them = [trials_until_near(search("tpe", seed, 30, useful_log, enough=NEAR)) for seed in SEEDS]
    assert statistics.median(with_them) <= 2 / 3 * statistics.median(without)
    assert sum(map(math.isinf, with_them)) <= sum(map(math.isinf, without))


def test_predictions_that_are_upside_down_cost_at_most_three_times_the_trials_of_random_search():
    by_chance = [search("random", seed, 10) for seed in SEEDS]
    misled = [search("tpe", seed, PLAIN_EVERY * 10, misleading_log) for seed in SEEDS]
    for count in (5, 10):
        ours = statistics.median(bests[PLAIN_EVERY * count - 1] for bests in misled)
        assert ours <= statistics.median(bests[count - 1] for bests in by_chance)


def test_one_suggestion_in_three_is_made_from_measured_trials_alone():
    recorder = Recorder()
    asked(recorder, calibrated(7), 9)
    complete = optuna.trial.TrialState.COMPLETE
    counts = [sum(trial.state == complete for trial in shown) for shown in recorder.shown]
    assert counts == [number + (7 if number % PLAIN_EVERY else 0) for number in range(9)]


def test_trials_without_settings_are_not_shown_and_do_not_change_which_suggestions_read_observations():
    recorder = Recorder()
    asked(recorder, calibrated(7), 9, moves=True)
    shown = [completed(trials) for trials in recorder.shown]
    assert [len(trials) for trials in shown] == [number + (7 if number % PLAIN_EVERY else 0) for number in range(9)]
    assert all(trial.params for trials in shown for trial in trials)


def test_a_repeat_keeps_its_value_where_there_are_no_observations():
    recorder = Recorder()
    asked(recorder, (), 6, value_of=lambda number: 6.0 - number)
    assert [trial.value for trial in completed(recorder.shown[5])] == [6.0, 5.0, 4.0, 3.0, 2.0]


def test_the_study_itself_holds_the_trials_that_were_told_and_nothing_else():
    study = asked(Recorder(), calibrated(7), 6)
    assert [trial.number for trial in study.trials] == list(range(6))
    assert [trial.value for trial in study.trials] == [1.0 + number for number in range(6)]
    assert all(trial.user_attrs["kind"] in ("search", "repeat") for trial in study.trials)


def test_observations_are_older_than_all_trials_and_only_the_running_trial_is_unfinished():
    recorder = Recorder()
    asked(recorder, calibrated(4), 6)
    for number, shown in enumerate(recorder.shown):
        offset = 4 if number % PLAIN_EVERY else 0
        finished = [trial for trial in shown if trial.state == optuna.trial.TrialState.COMPLETE]
        assert [trial.value for trial in finished[offset:]][:2] == [1.0, 2.0][:number]
        assert not shown[-1].state.is_finished()
        assert sum(not trial.state.is_finished() for trial in shown) == 1


def test_a_repeat_is_shown_with_the_highest_value_so_that_its_plan_is_not_asked_for_again():
    recorder = Recorder()
    asked(recorder, calibrated(4), 6)
    complete = [trial for trial in recorder.shown[5] if trial.state == optuna.trial.TrialState.COMPLETE]
    values = [trial.value for trial in complete if trial.user_attrs.get("kind") == "repeat"]
    assert values == [max(trial.value for trial in complete if trial.number <= complete[-3].number)]


def test_an_observation_leaves_once_its_own_parameters_are_measured():
    recorder, shown = Recorder(), calibrated(30)
    study = asked(recorder, shown, 12)
    drawn = [trial.params for trial in study.trials[:11]]
    observed = [trial.params for trial in recorder.shown[11] if trial.state == optuna.trial.TrialState.COMPLETE][:-11]
    assert len(observed) < len(shown)  # a third of the space has no number, so parameters coincide
    assert not [params for params in observed if params in drawn]


def test_settings_outside_of_the_space_are_not_shown():
    recorder, shown = Recorder(), calibrated(7)
    smaller: Space = {**SPACE, "order": {"traced": {}}}
    inside = [one for one in shown if one.observation.settings["order"]["planner"] == "traced"]
    made = PriorSampler(recorder, smaller, ("time_ratio",), lambda: shown, 0).make_observations(shown)
    assert 0 < len(made) == len(inside) < 7


def test_a_run_of_another_graph_predicts_no_bytes():
    shown = calibrated(5) + calibrated(3, PriorSource.OTHER_GRAPH)
    sampler = PriorSampler(Recorder(), SPACE, ("step_bytes", "time_ratio"), lambda: shown, 0)
    assert [trial.values[0] for trial in sampler.make_observations(shown)] == [900.0] * 5
    single = PriorSampler(Recorder(), SPACE, ("time_ratio",), lambda: shown, 0)
    assert len(single.make_observations(shown)) == 8


def test_a_gaussian_process_sees_the_fastest_observations_and_a_sample_of_the_others():
    shown = calibrated(100)
    gp = optuna.samplers.GPSampler(seed=0)
    made = PriorSampler(gp, SPACE, ("time_ratio",), lambda: shown, 0).make_observations(shown)
    fastest = sorted(one.time_ratio for one in shown)[: MOST_FOR_GAUSSIAN_PROCESS // 2]
    assert len(made) == MOST_FOR_GAUSSIAN_PROCESS
    assert [trial.value for trial in made[: len(fastest)]] == pytest.approx(fastest)
    assert len({trial.value for trial in made}) > len(fastest)
