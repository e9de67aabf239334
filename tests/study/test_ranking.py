"""What a trial is worth, on records made by hand."""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autotune.ir.plan import Plan
from autotune.measure.early_stop import cannot_beat
from autotune.predict.simulate import Estimate
from autotune.records.budget import STEP_TOLERANCE, Budget
from autotune.records.measurement import Measurement, Outcome
from autotune.records.trial import Trial, TrialKind
from autotune.study.verdicts.ranking import (
    NOTABLE_SHARE,
    TIE_SHARE,
    Rules,
    allocator_overheads,
    apply_rules,
    baseline_step_bytes,
    compute_stop_ratio,
    compute_target_bytes,
    drop_cut_off,
    estimate_overhead,
    estimate_spread,
    exceeds_budget,
    plan_hash,
    pool_runs,
    ratio_noise,
    reject_by_estimate,
    reuse_measurement,
    score_trial,
    select_fitting,
    select_leader,
    select_winner,
)
from tests.nightly.fakes import NOISE, recorded

RULES = Rules(budget_bytes=1000, floor_bytes=500, tolerance=0.0, baseline_seconds=10.0)


def test_a_plan_that_named_no_rebuild_price_keeps_the_identity_of_earlier_records():
    assert plan_hash(Plan((0, 1))) == "e5c5778614137770"
    identities = {price: plan_hash(Plan((0, 1), kernels="inductor", rebuild_price=price)) for price in (0.05, 0.5, 4.0)}
    assert identities[0.05] == "b3c862d73fee6c1b"
    assert len(set(identities.values())) == 3


def estimate(peak: int = 900, seconds: float = 11.0) -> Estimate:
    return Estimate(peak, "conv1", peak, seconds, 0.0, 0, 0.0, 100, 10.0)


def seen(charged: int = 1400, ratio: float = 1.1, spread: float = 0.0, **fields: object) -> Measurement:
    samples = tuple(ratio * (1 + spread * (i - 3.5) / 3.5) for i in range(8))
    made = Measurement(
        Outcome.OK, peak_bytes=charged - 50, charged_bytes=charged, floor_bytes=500, step_seconds=samples,
        baseline_seconds=(1.0,) * 8, max_error=0.0,
    )  # fmt: skip
    return replace(made, **fields)


def trial(number: int, measurement: Measurement, kind: TrialKind = TrialKind.SEARCH, plan: int | None = None) -> Trial:
    return Trial(number, kind, "w", "d", {}, Plan((number if plan is None else plan,)), estimate(), measurement)


def test_planners_aim_at_what_the_most_waste_leaves_outliers_left_out():
    assert compute_target_bytes(1030, []) == 1000  # 3 % until something was measured
    assert compute_target_bytes(1300, [0.05, 0.2, 0.1, 0.3]) == 1000
    assert estimate_overhead([0.01, 0.0, 0.02, 0.01, 0.3]) == 0.02
    assert compute_target_bytes(1000, [-0.2]) == 1000


def test_waste_is_what_was_charged_above_the_estimate():
    assert allocator_overheads([trial(1, seen(charged=1490))]) == [pytest.approx(990 / 900 - 1)]
    assert (
        allocator_overheads([trial(1, reject_by_estimate(estimate(), RULES)), trial(2, seen(), kind=TrialKind.REPEAT)])
        == []
    )
    assert estimate_overhead([0.0]) == 0.0


def test_a_percentage_is_of_the_peak_not_of_the_charge():
    assert baseline_step_bytes(seen(charged=2000)) == 1450


def test_charge_above_floor_and_budget_is_over_budget():
    assert apply_rules(seen(charged=1500), RULES).outcome is Outcome.OK
    assert apply_rules(seen(charged=1501), RULES).outcome is Outcome.OVER_BUDGET


def test_a_process_with_another_floor_is_held_to_what_its_step_was_charged():
    assert apply_rules(seen(charged=1502, floor_bytes=502), RULES).outcome is Outcome.OK
    assert score_trial(trial(1, seen(charged=1502, floor_bytes=502)), RULES, []).memory == 0.0
    assert apply_rules(seen(charged=1499, floor_bytes=498), RULES).outcome is Outcome.OVER_BUDGET


@pytest.mark.parametrize("error", [1e-12, float("nan"), None])
def test_any_difference_at_all_is_a_wrong_result(error):
    assert apply_rules(seen(max_error=error), RULES).outcome is Outcome.WRONG_RESULT


def test_where_nothing_can_be_compared_nothing_is_wrong():
    assert apply_rules(seen(max_error=None), replace(RULES, tolerance=None)).outcome is Outcome.OK


def test_constraints_are_relative_to_the_whole_process():
    told = score_trial(trial(1, seen(charged=1650)), RULES, [])
    assert (told.memory, told.numerics, told.imputed) == (pytest.approx(0.1), 0.0, False)
    assert told.time_ratio == pytest.approx(1.1)
    assert told.step_bytes == 1150


def test_what_never_ran_gets_the_simulators_time_and_a_violation():
    over = replace(trial(1, reject_by_estimate(estimate(2500), RULES)), estimate=estimate(2500, 13.0))
    told = score_trial(over, RULES, [0.0])
    assert (told.time_ratio, told.memory, told.imputed) == (pytest.approx(1.3), pytest.approx(1.0), True)
    failed = score_trial(trial(1, Measurement(Outcome.OUT_OF_MEMORY)), RULES, [])
    assert failed.memory == 0.01  # estimated to fit, so by how much it failed is not known


def test_a_wrong_result_violates_numerics_alone():
    told = score_trial(trial(1, seen(outcome=Outcome.WRONG_RESULT, max_error=float("nan"))), RULES, [])
    assert told.numerics > 0 >= told.memory


def test_without_a_baseline_time_is_told_over_the_predicted_one():
    told = score_trial(trial(1, seen(baseline_seconds=(), ratio=12.0)), RULES, [])
    assert (told.time_ratio, told.imputed) == (pytest.approx(1.2), False)


def test_fastest_within_the_budget_wins():
    trials = [trial(1, seen(ratio=1.3)), trial(2, seen(ratio=1.1)), trial(3, seen(ratio=1.0, charged=1501))]
    assert select_winner(trials, RULES).number == 2


def test_within_the_noise_the_smaller_wins():
    trials = [trial(1, seen(ratio=1.100, spread=0.05)), trial(2, seen(ratio=1.105, spread=0.05, charged=1200))]
    assert select_winner(trials, RULES).number == 2
    certain = [trial(1, seen(ratio=1.100)), trial(2, seen(ratio=1.105, charged=1200))]
    assert select_winner(certain, RULES).number == 1
    notably_slower = [trials[0], trial(2, seen(ratio=1.125, spread=0.5, charged=1200))]
    assert select_winner(notably_slower, RULES).number == 1
    hardly_smaller = [trials[0], trial(2, seen(ratio=1.105, spread=0.05, charged=1395))]
    assert select_winner(hardly_smaller, RULES).number == 1


def test_a_plan_of_a_session_that_could_compare_nothing_stays_the_winner_where_a_later_one_compares():
    assert select_winner([trial(1, seen(max_error=None))], RULES).number == 1
    assert select_winner([trial(1, seen(max_error=1e-12))], RULES) is None


def test_fresh_numbers_outweigh_those_that_chose_the_plan():
    lucky = trial(1, seen(ratio=1.0))
    honest = trial(3, seen(ratio=1.2), kind=TrialKind.CONFIRM, plan=1)
    assert select_leader([lucky, trial(2, seen(ratio=1.1))], RULES).number == 1
    assert select_leader([lucky, trial(2, seen(ratio=1.1)), honest], RULES).number == 2


def test_a_confirmed_plan_wins_over_one_that_may_have_been_lucky_unless_it_fits_no_more():
    first, other = trial(1, seen(ratio=1.0)), trial(2, seen(ratio=1.1))
    fresh = trial(3, seen(ratio=1.2), kind=TrialKind.CONFIRM, plan=1)
    assert select_winner([first, other], RULES).number == 1
    assert select_winner([first, other, fresh], RULES).number == 3
    too_large = trial(3, seen(ratio=1.2, outcome=Outcome.OVER_BUDGET), kind=TrialKind.CONFIRM, plan=1)
    assert select_winner([first, other, too_large], RULES).number == 2
    refused = trial(3, reject_by_estimate(estimate(peak=1001), RULES), kind=TrialKind.CONFIRM, plan=2)
    assert select_winner([first, other, refused], RULES).number == 1


def test_a_plan_that_failed_once_does_not_win():
    failed = trial(2, Measurement(Outcome.OUT_OF_MEMORY), kind=TrialKind.CONFIRM, plan=1)
    assert select_winner([trial(1, seen()), failed], RULES) is None


def test_nothing_wins_where_nothing_was_run():
    assert (
        select_winner(
            [
                Trial(0, TrialKind.BASELINE, "w", "d", measurement=seen()),
                trial(1, reject_by_estimate(estimate(), RULES)),
            ],
            RULES,
        )
        is None
    )


def test_pooling_keeps_all_samples_and_the_highest_bytes():
    pooled = pool_runs([trial(1, seen(charged=1400)), trial(2, seen(charged=1300), plan=1)]).measurement
    assert len(pooled.step_seconds) == 16
    assert pooled.charged_bytes == 1400


def test_pooled_bytes_are_the_highest_of_a_step_whatever_the_floors_of_its_processes():
    runs = [trial(1, seen(charged=1400, floor_bytes=500)), trial(2, seen(charged=1410, floor_bytes=520), plan=1)]
    for pooled in (pool_runs(runs).measurement, pool_runs(runs[::-1]).measurement):
        assert (pooled.step_charged_bytes, pooled.step_peak_bytes) == (900, 850)


CUT_OFF = [Measurement(Outcome.CRASHED, "killed by SIGKILL"), Measurement(Outcome.DISK_FULL, "the disk is full")]


@pytest.mark.parametrize("cut_off", CUT_OFF, ids=lambda result: str(result.outcome))
def test_plans_that_were_cut_off_are_dropped_with_their_repeats_only_where_no_plan_won(cut_off: Measurement):
    first = trial(1, cut_off)
    repeat = trial(2, Measurement(Outcome.CRASHED, "same plan as trial 1: not run again"), TrialKind.REPEAT, plan=1)
    over, fault = trial(3, seen(charged=1600)), trial(4, Measurement(Outcome.CRASHED, "killed by SIGSEGV"))
    trials = [first, repeat, over, fault]
    assert drop_cut_off(trials, RULES) == 2
    assert trials == [over, fault]
    trials = [first, repeat, trial(5, seen())]
    assert drop_cut_off(trials, RULES) == 0
    assert len(trials) == 3


@pytest.mark.parametrize("cut_off", CUT_OFF, ids=lambda result: str(result.outcome))
def test_a_run_that_was_cut_off_counts_only_where_no_other_run_of_its_plan_ended(cut_off: Measurement):
    ended, other = trial(1, seen(), plan=7), trial(2, cut_off, TrialKind.CONFIRM, plan=7)
    for runs in ([ended, other], [other, ended]):
        assert [fitting.number for fitting in select_fitting(runs, RULES)] == [1]
    assert select_fitting([other], RULES) == []


@pytest.mark.parametrize("cut_off", CUT_OFF, ids=lambda result: str(result.outcome))
def test_a_plan_whose_re_measurement_was_cut_off_wins_only_where_no_plan_was_re_measured(cut_off: Measurement):
    fastest, other = trial(1, seen(ratio=1.0)), trial(2, seen(ratio=1.1))
    trials = [fastest, other, trial(3, cut_off, TrialKind.CONFIRM, plan=1)]
    assert select_winner(trials, RULES) == fastest
    confirmed = trial(4, seen(ratio=1.1), TrialKind.CONFIRM, plan=2)
    assert select_winner([*trials, confirmed], RULES) == confirmed


@pytest.mark.parametrize("cut_off", CUT_OFF, ids=lambda result: str(result.outcome))
def test_a_repeat_reuses_the_run_that_ended_and_not_the_one_that_was_cut_off(cut_off: Measurement):
    trials = [trial(1, seen()), trial(2, cut_off, TrialKind.CONFIRM, plan=1)]
    repeat = reuse_measurement(trial(3, cut_off, plan=1), trials)
    assert repeat is not None
    assert repeat.kind is TrialKind.REPEAT
    assert repeat.measurement == replace(seen(), detail="same plan as trial 1: not run again")


def test_a_plan_is_hopeless_once_all_pairs_together_exclude_what_is_to_be_beaten():
    eager = (1.0,) * 4
    assert cannot_beat((1.2, 1.3, 1.2, 1.4), eager, 1.1)
    assert cannot_beat((1.3, 1.3), eager[:2], 1.1)
    assert not cannot_beat((1.2,), eager[:1], 1.1)  # one step has no noise to compare with
    assert not cannot_beat((1.12, 1.14, 1.08, 1.12), eager, 1.1)
    assert not cannot_beat((1.0, 1.0, 9.0, 1.0), eager, 1.1)  # one accident is no evidence
    assert not cannot_beat((1.2, 1.3, 1.2, 1.4), (), 1.1)
    assert not cannot_beat((1.2, 1.3, 1.2, 1.4), (1.1, 1.2, 1.1, 1.3), 1.1)  # eager was slow in the same turns


def test_what_is_to_be_beaten_is_the_leaders_time():
    next_one = trial(2, seen())
    assert compute_stop_ratio(trial(1, seen(ratio=1.1)), next_one, []) == pytest.approx(1.1)
    noisy = seen(ratio=1.1, spread=0.1)
    assert compute_stop_ratio(trial(1, noisy), next_one, []) == noisy.time_ratio
    assert compute_stop_ratio(trial(1, seen(baseline_seconds=())), next_one, []) is None
    assert compute_stop_ratio(None, next_one, []) is None


def test_what_is_to_be_beaten_is_the_highest_ratio_of_the_leaders_plan():
    runs = [
        trial(1, seen(ratio=1.1)),
        trial(2, seen(ratio=1.05), TrialKind.CONFIRM, plan=1),
        trial(3, seen(ratio=1.3, outcome=Outcome.CRASHED), TrialKind.CONFIRM, plan=1),
        trial(4, seen(ratio=1.4), TrialKind.REPEAT, plan=1),
        trial(5, seen(ratio=1.5)),
    ]
    leader = select_leader(runs[:2], RULES)
    assert leader is not None
    assert leader.measurement is not None
    assert leader.measurement.time_ratio == pytest.approx(1.05)  # a re-measured plan is ranked by those runs alone
    assert compute_stop_ratio(leader, trial(6, seen()), runs) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("kind", "peak", "may_tie"),
    [
        (TrialKind.SEARCH, 880, True), (TrialKind.SEARCH, 895, False), (TrialKind.SEARCH, 900, False),
        (TrialKind.SEARCH, None, True), (TrialKind.MOVE, 880, False),
    ],
)  # fmt: skip
def test_only_a_notably_smaller_plan_may_win_although_it_is_slower(kind: TrialKind, peak: int | None, may_tie: bool):
    other = replace(trial(2, seen(), kind), estimate=None if peak is None else estimate(peak))
    expected = 1.1 * (1 + TIE_SHARE) if may_tie else 1.1
    assert compute_stop_ratio(trial(1, seen(ratio=1.1)), other, []) == pytest.approx(expected)
    if may_tie:
        smaller = replace(other, measurement=seen(charged=1380, ratio=1.1 * 1.015, spread=0.05))
        leader = select_leader([trial(1, seen(ratio=1.1, spread=0.05)), smaller], RULES)
        assert leader is not None
        assert leader.number == 2


def count_steps(ratios: Iterator[float], beat: float) -> int:
    """Return the number of steps of ten after which a plan with these ratios to eager is given up; 10 if never."""
    steps = list(itertools.islice(ratios, 10))
    return next((count for count in range(1, 10) if cannot_beat(steps[:count], (1.0,) * count, beat)), 10)


@pytest.mark.parametrize("peak", [800, 900], ids=["smaller", "as large"])
@pytest.mark.parametrize(("machine", "noise"), [("vit", 0.17), ("resnet152", 0.015)])
def test_on_recorded_noise_no_plan_that_is_5_percent_faster_is_given_up_and_one_that_is_4_percent_slower_soon_is(
    machine: str, noise: float, peak: int
):
    assert statistics.stdev(map(math.log, NOISE[machine])) == pytest.approx(noise, rel=0.15)
    counts: dict[float, list[int]] = {0.95: [], 1.0: [], 1.04: [], 1.1: [], 1.4: []}
    for repeat in range(200):
        steps = tuple(itertools.islice(recorded(machine, f"leader {repeat}"), 10))
        leader = trial(1, seen(step_seconds=steps, baseline_seconds=(1.0,) * 10))
        beat = compute_stop_ratio(leader, replace(leader, estimate=estimate(peak)), [leader])
        for pace, used in counts.items():
            used.append(count_steps((pace * ratio for ratio in recorded(machine, f"other {repeat}")), beat))
    shares = {pace: sum(used < 10 for used in counts[pace]) / 200 for pace in counts}
    assert shares[0.95] == 0
    assert shares[1.0] <= (0.05 if peak == 800 else 0.3), "a smaller plan wins a tie"
    assert shares[1.04] >= 0.85
    assert statistics.fmean(counts[1.04]) <= (5 if peak == 800 else 3)
    assert shares[1.1] >= (0.9 if noise > 0.1 else 1.0)
    assert shares[1.4] == 1
    assert statistics.fmean(counts[1.4]) <= 2.2


def test_what_cannot_be_laid_out_within_the_budget_is_not_run_and_says_so():
    wasteful = replace(estimate(990), layout_bytes=830, layout_live_bytes=800)
    assert exceeds_budget(wasteful, RULES)
    assert "as its buffers can be laid out" in reject_by_estimate(wasteful, RULES).detail
    assert score_trial(trial(1, reject_by_estimate(wasteful, RULES)), RULES, [0.0]).memory > 0
    assert not exceeds_budget(replace(wasteful, layout_bytes=810), RULES)
    assert exceeds_budget(estimate(1001), RULES)
    assert "at conv1" in reject_by_estimate(estimate(1001), RULES).detail


def test_noise_of_equal_samples_is_none_and_grows_with_their_spread():
    assert ratio_noise(seen()) == 0.0
    assert ratio_noise(seen(spread=0.1)) > ratio_noise(seen(spread=0.01)) > 0


def test_few_samples_do_not_look_free_of_noise():
    few, fewer = (seen(step_seconds=(1.1,) * n, baseline_seconds=(1.0,) * n) for n in (3, 2))
    assert ratio_noise(fewer) > ratio_noise(few) > 0.03


def test_the_charge_of_a_percentage_budget_has_a_tolerance_and_that_of_an_absolute_one_has_none():
    percent, absolute = Budget.parse("65%"), Budget.parse("6GiB")
    assert (percent.tolerance, absolute.tolerance) == (STEP_TOLERANCE, 0.0)
    charged = replace(seen(), charged_bytes=RULES.floor_bytes + 1004)
    tolerant = replace(RULES, budget_tolerance=percent.tolerance)
    assert apply_rules(charged, tolerant).outcome is Outcome.OK
    over = apply_rules(charged, RULES)
    assert over.outcome is Outcome.OVER_BUDGET
    assert "4 bytes (0.4 %) over the budget" in over.detail
    above = apply_rules(replace(charged, charged_bytes=RULES.floor_bytes + 1006), tolerant)
    assert above.outcome is Outcome.OVER_BUDGET
    assert "0.5 % is tolerated" in above.detail


def test_the_spread_is_the_widest_range_of_one_plan_over_processes_and_planners_aim_lower_by_it():
    floor = RULES.floor_bytes
    baseline = replace(seen(), process_charged_bytes=(floor + 1000, floor + 1002))
    first = Trial(0, TrialKind.BASELINE, "w", "d", measurement=baseline)
    assert estimate_spread([first]) == pytest.approx(0.002)
    again = [
        trial(number, replace(seen(), charged_bytes=floor + nbytes), plan=7) for number, nbytes in ((1, 800), (2, 804))
    ]
    assert estimate_spread([first, *again]) == pytest.approx(0.005)
    assert (
        estimate_spread([first, *again, trial(3, replace(seen(), charged_bytes=floor + 900), plan=7)]) == NOTABLE_SHARE
    )
    assert estimate_spread([]) == 0.0
    assert compute_target_bytes(1000, [0.0], spread=0.005) == 995
