"""Confirmation on records made by hand, and on recorded noise: whose turn is next, what is said, and how often it is wrong."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.ir.plan import Plan
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts import confirm
from autotune.study.verdicts.confirm import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    ConfirmationStatus,
    compare_confirmed,
    select_contenders,
    select_fallback,
    select_next,
)
from autotune.study.verdicts.next_run import select_next_run
from autotune.study.verdicts.ranking import Rules, reject_by_estimate
from tests.nightly.fakes import NOISE, recorded
from tests.study.test_ranking import estimate

RULES = Rules(budget_bytes=1000, floor_bytes=500, tolerance=0.0, baseline_seconds=10.0)
BLOCKS = 5
"""Of one measurement at ten samples, as configs have it."""


def measured(ratio: float, charged: int = 1450, noise: Iterator[float] | None = None, **fields: object) -> Measurement:
    turns = [ratio * (next(noise) if noise is not None else 1 + 0.001 * (turn % 3 - 1)) for turn in range(BLOCKS)]
    seen = Measurement(
        Outcome.OK, peak_bytes=charged, charged_bytes=charged, floor_bytes=500,
        step_seconds=tuple(turn for turn in turns for _ in range(2)), baseline_seconds=(1.0,) * 2 * BLOCKS, max_error=0.0,
    )  # fmt: skip
    return replace(seen, **fields)


def trial(number: int, seen: Measurement, plan: int, kind: TrialKind = TrialKind.SEARCH) -> Trial:
    return Trial(number, kind, "w", "d", {}, Plan((plan,)), estimate(), seen)


def searched(*ratios: float) -> list[Trial]:
    """One run of each plan, numbered as the ratios are."""
    return [trial(number, measured(ratio), number) for number, ratio in enumerate(ratios)]


def played(trials: list[Trial], fresh: dict[int, Iterator[float] | float]) -> list[Trial]:
    """All that confirmation asks for, each plan's pace from its own noise or as it is."""
    while (one := select_next(trials, RULES)) is not None:
        plan = one.plan.order[0]
        pace = fresh[plan]
        seen = measured(pace) if isinstance(pace, float) else measured(1.0, noise=pace)
        trials = [*trials, trial(len(trials), seen, plan, TrialKind.CONFIRM)]
    return trials


def asked(trials: list[Trial]) -> list[int]:
    return [one.plan.order[0] for one in trials if one.kind == "confirm"]


def test_the_leader_and_those_near_it_take_turns_and_two_rounds_tell():
    trials = played(searched(1.0, 1.03, 1.05, 1.06, 1.5), dict.fromkeys(range(5), 1.0))
    assert asked(trials) == [0, 1, 2, 0, 1, 2]


def test_what_is_a_tenth_slower_is_not_measured_again():
    assert [one.number for one in select_contenders(searched(1.0, 1.09, 1.11), RULES)] == [0, 1]


def test_of_plans_as_fast_and_as_large_each_other_is_a_tie_with_the_best():
    best, *others = compare_confirmed(played(searched(1.0, 1.0, 1.0), dict.fromkeys(range(3), 1.0)), RULES)
    assert best.label == "BEST"
    assert best.versus_best is None
    assert [other.label for other in others] == [f"tie with {best.trial.number}"] * 2


def test_a_plan_that_was_fast_by_luck_is_slower_once_it_is_measured_afresh():
    found = compare_confirmed(played(searched(0.95, 1.0), {0: 1.05, 1: 1.0}), RULES)
    assert [(one.trial.plan.order[0], one.status) for one in found] == [
        (1, ConfirmationStatus.BEST),
        (0, ConfirmationStatus.SLOWER),
    ]
    assert found[1].versus_best.ratio == pytest.approx(1.05, rel=0.002)


def test_while_it_cannot_be_told_there_are_more_rounds_until_there_are_six():
    wild = {plan: iter([0.8, 1.25, 0.9, 1.1] * 100) for plan in range(2)}
    trials = played(searched(1.0, 1.0), wild)
    assert [asked(trials).count(plan) for plan in range(2)] == [MAX_ROUNDS] * 2
    assert [one.label for one in compare_confirmed(trials, RULES)] == ["BEST", "inconclusive"]


def test_a_plan_that_is_told_apart_has_no_more_rounds_than_it_needs():
    wild = iter([0.9, 1.2, 1.02, 1.1, 0.95] * 100)
    trials = played(searched(1.0, 1.0, 1.09), {0: 1.0, 1: wild, 2: 1.09})
    assert asked(trials).count(2) == MIN_ROUNDS
    assert asked(trials).count(1) > MIN_ROUNDS


def test_a_contender_that_fails_afresh_gives_its_place_to_the_next_and_says_why():
    trials = searched(1.0, 1.01, 1.02, 1.03)
    died = Measurement(Outcome.OUT_OF_MEMORY, "killed")
    trials = played([*trials, trial(4, died, 0, TrialKind.CONFIRM)], dict.fromkeys(range(4), 1.0))
    assert set(asked(trials)[1:]) == {1, 2, 3}
    assert compare_confirmed(trials, RULES)[-1].label == "out of memory"


def test_a_fresh_run_that_was_refused_is_no_round_and_confirms_nothing():
    refused = [trial(number, reject_by_estimate(estimate(peak=1001), RULES), 0, TrialKind.CONFIRM) for number in (2, 3)]
    trials = [*searched(1.0, 1.01), *refused]
    assert compare_confirmed(trials, RULES) == []
    trials = played(trials, {0: 1.05, 1: 1.0})
    assert asked(trials) == [0, 0, 0, 1, 0, 1]
    best, other = compare_confirmed(trials, RULES)
    assert (best.trial.plan.order[0], best.rounds, other.rounds) == (1, 2, 2)


def test_a_plan_whose_re_measurements_were_all_cut_off_has_failed_and_one_with_another_run_has_not():
    killed = Measurement(Outcome.CRASHED, "killed by SIGKILL")
    trials = [
        *searched(1.0, 1.05), trial(2, killed, 0, TrialKind.CONFIRM),
        trial(3, measured(1.05), 1, TrialKind.CONFIRM), trial(4, killed, 1, TrialKind.CONFIRM),
    ]  # fmt: skip
    confirmed = [(plan.trial.number, plan.label, plan.rounds) for plan in compare_confirmed(trials, RULES)]
    assert confirmed == [(3, "BEST", 1), (2, "crashed", 1)]


def test_a_near_miss_is_planned_again_first_unless_no_time_may_be_left_to_re_measure_the_best_plan():
    over = measured(1.0, charged=1505, outcome=Outcome.OVER_BUDGET)
    trials = [trial(0, measured(1.02), 0), trial(1, over, 1)]
    assert select_next_run("time", trials, RULES, is_late=False).kind is TrialKind.LOWERED
    late = select_next_run("time", trials, RULES, is_late=True)
    assert (late.kind, late.candidate.plan) == (TrialKind.CONFIRM, Plan((0,)))
    trials += [trial(2, over, 0, TrialKind.CONFIRM), trial(3, measured(1.05), 3)]  # a re-measurement that failed
    assert select_next_run("time", trials, RULES, is_late=True).kind is TrialKind.LOWERED


def test_nothing_is_asked_where_nothing_fits():
    over = [trial(0, measured(1.0, charged=1600, outcome=Outcome.OVER_BUDGET), 0)]
    assert select_next(over, RULES) is None
    assert compare_confirmed(over, RULES) == []


def test_the_fallback_is_the_fastest_that_leaves_a_tenth_of_the_budget():
    best, slow, tight = (
        trial(n, measured(r, charged=c), n) for n, r, c in [(0, 1.0, 1490), (1, 1.3, 1100), (2, 1.1, 1390)]
    )
    fit = [best, slow, tight]
    assert select_fallback(fit, best, RULES) == tight
    assert select_fallback([best, slow], best, RULES) == slow


def test_without_such_a_plan_the_smallest_is_the_fallback_if_it_is_notably_smaller():
    best, near, same = (trial(n, measured(1.0 + n / 10, charged=c), n) for n, c in [(0, 1490), (1, 1450), (2, 1489)])
    assert select_fallback([best, near, same], best, RULES) == near
    assert select_fallback([best, same], best, RULES) is None


def test_a_best_plan_with_room_of_its_own_needs_no_fallback():
    roomy, smaller = trial(0, measured(1.0, charged=1400), 0), trial(1, measured(1.2, charged=900), 1)
    assert select_fallback([roomy, smaller], roomy, RULES) is None


def test_the_fallback_is_measured_once_and_named():
    trials = [*searched(1.0, 1.01), trial(2, measured(1.4, charged=1100), 2)]
    trials = [
        replace(one, measurement=replace(one.measurement, charged_bytes=1490 if n < 2 else 1100))
        for n, one in enumerate(trials)
    ]
    while (one := select_next(trials, RULES)) is not None:
        plan = one.plan.order[0]
        seen = measured([1.0, 1.01, 1.4][plan], charged=[1490, 1490, 1100][plan])
        trials = [*trials, trial(len(trials), seen, plan, TrialKind.CONFIRM)]
    assert asked(trials).count(2) == 1
    assert compare_confirmed(trials, RULES)[-1].label == "safe fallback, slower"


def test_a_run_of_one_block_tells_nothing_and_is_no_fault():
    short = replace(measured(1.0), step_seconds=(1.0,), baseline_seconds=(1.0,))
    trials = [*searched(1.0, 1.0), trial(2, short, 0, TrialKind.CONFIRM), trial(3, short, 1, TrialKind.CONFIRM)]
    found = compare_confirmed(trials, RULES)
    assert [one.label for one in found] == ["BEST", "inconclusive"]
    assert found[0].seconds is found[0].ratio is None


def test_blocks_of_seconds_do_not_span_runs_and_the_table_has_no_infinity():
    one_step = replace(measured(1.0), step_seconds=(1.0,), baseline_seconds=(1.0,))
    runs = [trial(number, one_step, 0, TrialKind.CONFIRM) for number in range(1, 7)]
    other = trial(7, replace(one_step, step_seconds=(1.1,)), 1, TrialKind.CONFIRM)
    more = replace(other, number=8)
    trials = [trial(0, one_step, 0), *runs, other, more]
    best, slower = compare_confirmed(trials, RULES)
    assert best.seconds is not None
    assert best.ratio is not None
    assert best.seconds.basis == best.ratio.basis == "95 % of 6"
    assert slower.versus_best is not None
    assert slower.versus_best.high == math.inf
    rows = confirm.to_table([best, slower])
    assert rows[1]["beside_best"]["high"] is None
    assert "Infinity" not in json.dumps(rows)


def test_without_a_baseline_seconds_are_compared_and_there_is_no_ratio():
    trials = [replace(one, measurement=replace(one.measurement, baseline_seconds=())) for one in searched(10.0, 10.0)]
    for plan in (0, 1, 0, 1):
        seen = replace(measured(10.0), baseline_seconds=())
        trials.append(trial(len(trials), seen, plan, TrialKind.CONFIRM))
    found = compare_confirmed(trials, RULES)
    assert [one.status for one in found] == [ConfirmationStatus.BEST, ConfirmationStatus.TIE]
    assert found[0].ratio is None
    assert found[0].seconds.middle == pytest.approx(10.0, rel=0.01)


def test_a_program_reads_every_figure_of_the_table():
    told = confirm.to_table(compare_confirmed(played(searched(1.0, 1.02), {0: 1.0, 1: 1.05}), RULES))
    assert json.loads(json.dumps(told)) == told
    assert [one["verdict"] for one in told] == ["BEST", "slower"]
    assert told[1]["beside_best"]["low"] > 1.04
    assert told[0]["time_ratio"]["low"] <= 1.0 <= told[0]["time_ratio"]["high"]
    assert told[0]["step_charged_bytes"] == 950


# -- recorded noise -----------------------------------------------------------------------------------------------

ALLOCATORS = json.loads(
    (Path(__file__).parents[2] / "experiments" / "benchmarks" / "allocators" / "results" / "results.json").read_text()
)["models"]
REPEATS = 120


def shares(noise: str, pace: float) -> dict[ConfirmationStatus, float]:
    """How often each word is said of the plan that is not the best, of many confirmations of two; the second one takes
    `pace` of the first one's time. Where a slower plan comes out best, `BEST` is counted.
    """
    said = dict.fromkeys(ConfirmationStatus, 0)
    for repeat in range(REPEATS):
        plans = [recorded(noise, f"{plan} {pace} {repeat}") for plan in range(2)]
        slowed = {0: plans[0], 1: (pace * turn for turn in plans[1])}
        best, other = compare_confirmed(played(searched(1.0, 1.0), slowed), RULES)
        said[ConfirmationStatus.BEST if pace > 1 and best.trial.plan.order[0] == 1 else other.status] += 1
    return {word: count / REPEATS for word, count in said.items()}


@pytest.mark.parametrize("machine", NOISE)
def test_two_plans_of_one_pace_are_a_tie_in_19_of_20_confirmations(machine: str):
    assert shares(machine, 1.0)[ConfirmationStatus.TIE] >= 19 / 20


@pytest.mark.parametrize("machine", NOISE)
def test_a_plan_that_is_three_percent_slower_is_said_to_be_in_19_of_20_confirmations(machine: str):
    assert shares(machine, 1.03)[ConfirmationStatus.SLOWER] >= 19 / 20


def neighbours(model: str, allocator: str) -> list[float]:
    """A block's seconds over those of the same allocator's block before it: real steps on a machine that others share."""
    blocks = [sum(one["seconds"]) for one in ALLOCATORS[model]["blocks"] if one["allocator"] == allocator]
    return [later / earlier for earlier, later in itertools.pairwise(blocks)]


def test_on_a_machine_so_noisy_that_it_cannot_be_told_equal_plans_are_still_not_called_slower(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(NOISE, "shared", neighbours("mobilenet_v2", "glibc"))
    found = shares("shared", 1.0)
    assert found[ConfirmationStatus.TIE] + found[ConfirmationStatus.INCONCLUSIVE] >= 19 / 20
