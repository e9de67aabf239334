"""The Pareto front on records made by hand: every point against the definition, written out again."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ir.plan import Plan
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.front.budget_scale import BudgetScale, find_budget_scale
from autotune.study.verdicts.confirm import MAX_ROUNDS, MIN_ROUNDS
from autotune.study.verdicts.front import (
    FRONT_PLANS,
    FrontStatus,
    assess_front,
    extends_front,
    select_front_contenders,
    select_front_run,
    spread,
)
from autotune.study.verdicts.ranking import NOTABLE_SHARE, Rules
from autotune.study.verdicts.statistics import compare_ratios
from tests.study.test_ranking import estimate

FLOOR = 500
RULES = Rules(budget_bytes=1_000_000, floor_bytes=FLOOR, tolerance=0.0, baseline_seconds=10.0)
NOISE = 0.002
"""Relative noise of one block of steps."""
BLOCKS = 5


def measured(charged: int, ratio: float, noise: float = NOISE, seed: object = 0) -> Measurement:
    dice = random.Random(f"{charged} {ratio} {seed}")
    turns = [ratio * math.exp(dice.uniform(-noise, noise)) for _ in range(BLOCKS)]
    return Measurement(
        Outcome.OK, peak_bytes=FLOOR + charged, charged_bytes=FLOOR + charged, floor_bytes=FLOOR,
        step_seconds=tuple(turn for turn in turns for _ in range(2)), baseline_seconds=(1.0,) * 2 * BLOCKS, max_error=0.0,
    )  # fmt: skip


def trial(number: int, seen: Measurement, plan: int, kind: TrialKind = TrialKind.SEARCH) -> Trial:
    return Trial(number, kind, "w", "d", {}, Plan((plan,)), estimate(), seen)


def searched(*plans: tuple[int, float]) -> list[Trial]:
    """One run of each plan of (bytes, ratio), numbered in order."""
    return [trial(number, measured(*plan), number) for number, plan in enumerate(plans)]


def confirmed(trials: list[Trial], *plans: int, rounds: int = MIN_ROUNDS, noise: float = NOISE) -> list[Trial]:
    """The same records with further runs of some plans, whose bytes and ratio are those of the search."""
    for seed, plan in itertools.product(range(1, rounds + 1), plans):
        charged, ratio = trials[plan].step_charged_bytes, trials[plan].time_cost
        seen = measured(charged, ratio, noise, seed)
        trials = [*trials, trial(len(trials), seen, plan, TrialKind.CONFIRM)]
    return trials


def numbers(trials: list[Trial], status: FrontStatus = FrontStatus.FRONT) -> list[int]:
    return [point.number for point in assess_front(trials, RULES) if point.status is status]


def test_the_front_is_what_no_plan_dominates_and_the_others_name_who_does():
    trials = confirmed(searched((100, 2.0), (200, 1.5), (300, 1.6), (400, 1.0)), 0, 1, 2, 3)
    assert numbers(trials) == [0, 1, 3]
    (dominated,) = [point for point in assess_front(trials, RULES) if point.status is FrontStatus.DOMINATED]
    assert (dominated.number, dominated.rival, dominated.label) == (2, 1, "dominated by 1")
    assert dominated.versus_rival.low > 1


def test_only_plans_that_ran_in_new_processes_are_points():
    trials = searched((100, 2.0), (200, 1.5), (300, 1.0))
    assert assess_front(trials, RULES) == []
    assert numbers(confirmed(trials, 0, 2)) == [0, 2]


def test_a_plan_within_the_noise_of_a_smaller_one_is_no_point():
    trials = confirmed(searched((100, 1.501), (200, 1.5), (300, 1.0)), 0, 1, 2, noise=0.02)
    assert numbers(trials) == [0, 2]
    (uncertain,) = [point for point in assess_front(trials, RULES) if point.number == 1]
    assert uncertain.status in (FrontStatus.UNCERTAIN, FrontStatus.DOMINATED)
    assert uncertain.rival == 0
    assert uncertain.versus_rival.high >= 1


def test_a_larger_plan_within_the_noise_of_charges_replaces_a_slower_one():
    near = int(10_000 * (1 + NOTABLE_SHARE))
    assert numbers(confirmed(searched((10_000, 1.5), (near, 1.2)), 0, 1)) == [1]
    assert numbers(confirmed(searched((10_000, 1.5), (near + 100, 1.2)), 0, 1)) == [0, 1]


def test_a_plan_of_the_search_excludes_a_point_only_where_it_is_certainly_better():
    certain = confirmed(searched((100, 1.2), (200, 1.5)), 1)
    assert numbers(certain) == []
    assert numbers(certain, FrontStatus.DOMINATED) == [1]
    lucky = confirmed(searched((100, 1.499), (200, 1.5)), 1, noise=0.02)
    assert numbers(lucky) == [1]


def test_a_plan_that_exceeded_the_limit_once_is_no_point_and_dominates_nothing():
    trials = confirmed(searched((100, 1.0), (200, 0.9)), 0, 1)
    over = replace(measured(2_000_000, 1.0), outcome=Outcome.OVER_BUDGET)
    trials = [*trials, trial(len(trials), over, 0, TrialKind.CONFIRM)]
    assert numbers(trials) == [1]
    assert numbers(trials, FrontStatus.FAILED) == [0]


@given(
    plans=st.lists(
        st.tuples(st.integers(1, 40).map(lambda n: 1000 * n), st.integers(50, 250).map(lambda n: n / 100)),
        min_size=1, max_size=9,
    ),
    runs=st.data(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_point_and_no_other_is_certainly_faster_than_all_smaller_plans(plans, runs):
    rounds = [runs.draw(st.integers(0, 2), label=f"rounds of {plan}") for plan in range(len(plans))]
    noise = runs.draw(st.sampled_from([0.0005, 0.02, 0.1]))
    trials = [trial(number, measured(*plan, noise), number) for number, plan in enumerate(plans)]
    for plan, count in enumerate(rounds):
        trials = confirmed(trials, plan, rounds=count, noise=noise)

    def blocks(plan: int) -> list[float]:
        again = [one for one in trials if one.plan == Plan((plan,)) and one.kind == TrialKind.CONFIRM]
        return [s for one in again or [trials[plan]] for s in one.measurement.step_seconds[::2]]

    def median(values: list[float]) -> float:
        ordered = sorted(values)
        return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def certainly_faster(one: int, other: int) -> bool:
        return compare_ratios(blocks(one), blocks(other)).high < 1

    def comes_before(one: int, other: int) -> bool:
        mine, theirs = (plans[one][0], median(blocks(one)), one), (plans[other][0], median(blocks(other)), other)
        return mine < theirs

    every = range(len(plans))
    chain = [
        one
        for one in sorted(every, key=lambda one: plans[one][0])
        if rounds[one]
        and all(certainly_faster(one, other) for other in every if rounds[other] and comes_before(other, one))
        and not any(
            compare_ratios(blocks(other), blocks(one)).high < 1
            for other in every
            if not rounds[other] and comes_before(other, one)
        )
    ]
    wanted: list[int] = []
    for one in reversed(chain):
        if not wanted or plans[wanted[0]][0] > (1 + NOTABLE_SHARE) * plans[one][0]:
            wanted.insert(0, one)
    assert numbers(trials) == wanted
    # so no point is dominated by any re-measured plan
    for one, other in itertools.product(wanted, (other for other in every if rounds[other])):
        assert not (comes_before(other, one) and compare_ratios(blocks(one), blocks(other)).ratio >= 1)
    # and every re-measured plan is listed once, whatever its status
    assert sorted(point.number for point in assess_front(trials, RULES)) == [one for one in every if rounds[one]]


def test_contenders_run_in_turns_until_each_has_its_rounds_and_all_is_conclusive():
    trials, order = searched((100, 2.0), (200, 1.5), (250, 1.7), (400, 1.0)), []
    while (following := select_front_run(trials, RULES)) is not None:
        plan = following.plan.order[0]
        order.append(plan)
        trials = [
            *trials, trial(len(trials), measured(*((100, 2.0), (200, 1.5), (250, 1.7), (400, 1.0))[plan], seed=len(order)),
                           plan, TrialKind.CONFIRM),
        ]  # fmt: skip
    assert sorted(order[:3]) == sorted(order[3:]) == [0, 1, 3]
    assert numbers(trials) == [0, 1, 3]


def test_plans_that_cannot_be_told_apart_run_at_most_so_often_and_are_not_both_points():
    trials, runs = searched((100, 1.5), (200, 1.46)), 0
    while (following := select_front_run(trials, RULES)) is not None:
        runs += 1
        charged = following.step_charged_bytes
        seen = measured(charged, 1.5 if charged == 100 else 1.499, 0.2, seed=runs)
        trials = [*trials, trial(len(trials), seen, following.plan.order[0], TrialKind.CONFIRM)]
    assert runs <= 2 * MAX_ROUNDS
    assert numbers(trials) == [0]


def test_no_more_plans_are_re_measured_than_the_time_is_reserved_for_and_they_cover_both_ends():
    trials = searched(*((1000 * (number + 1), 2.0 / (1 + 0.1 * number)) for number in range(40)))
    contenders = [one.number for one in select_front_contenders(trials, RULES)]
    assert len(contenders) == FRONT_PLANS
    assert contenders[:2] == [0, 39]


def test_a_plan_extends_the_front_only_by_a_notable_gain():
    first = searched((1000, 2.0), (2000, 1.0))
    assert extends_front(first, RULES)
    assert extends_front([*first, trial(2, measured(1500, 1.5), 2)], RULES)
    assert not extends_front([*first, trial(2, measured(2500, 0.999), 2)], RULES)
    assert not extends_front([*first, trial(2, measured(1500, 1.5), 2, TrialKind.REPEAT)], RULES)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_any_first_part_of_a_spread_holds_the_farthest_points(points):
    order = spread(points)
    assert sorted(order) == list(range(len(points)))
    if len(points) > 1:
        assert {points[order[0]], points[order[1]]} == {min(points), max(points)}


@given(low=st.integers(0, 2**40), width=st.integers(1, 2**40), place=st.floats(0, 1))
def test_a_target_becomes_a_share_and_the_same_target_again(low, width, place):
    scale = BudgetScale(low, low + width)
    target = low + int(place * width)
    assert scale.to_bytes(scale.to_share(target)) == target
    assert 0 <= scale.to_share(target) <= 1


def test_the_scale_of_budgets_goes_from_the_smallest_plan_to_eager_or_to_the_limit():
    baseline = replace(trial(0, measured(5000, 1.0), 0, TrialKind.BASELINE), plan=None)
    smallest = trial(1, measured(1000, 2.0), 1, TrialKind.SMALLEST)
    low = smallest.estimate.peak_bytes
    assert find_budget_scale([baseline], RULES) is None
    assert find_budget_scale([baseline, smallest], RULES) == BudgetScale(low, 5000)
    assert find_budget_scale([baseline, smallest], replace(RULES, budget_bytes=2000)) == BudgetScale(low, 2000)
    failed = replace(baseline, measurement=Measurement(Outcome.OUT_OF_MEMORY))
    assert find_budget_scale([failed, smallest], RULES) == BudgetScale(low, RULES.budget_bytes)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_spread_of_few_points_needs_no_gap(count: int):
    assert spread([(1.0,)] * count) == list(range(count))


def test_a_plan_whose_re_measurements_were_all_killed_is_no_point():
    killed = Measurement(Outcome.CRASHED, "killed by SIGKILL")
    trials = searched((800, 1.2), (900, 1.0)) + [trial(n, killed, 0, TrialKind.CONFIRM) for n in (2, 3)]
    assert FrontStatus.FRONT not in [point.status for point in assess_front(trials, RULES)]
