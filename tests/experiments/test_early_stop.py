"""The recorded comparison of rules that stop a plan early supports the rule that the search uses."""

import json

import pytest

from experiments.benchmarks.early_stop import __main__ as early_stop

RESULTS = early_stop.HERE / "results"
RECORDED = json.loads((RESULTS / "early_stop.json").read_text(encoding="utf-8"))
BEFORE = early_stop.StopRule(0.012, allows_noise=True)


def row_of(noise: float, rule: early_stop.StopRule) -> dict[str, float]:
    return next(
        row
        for row in RECORDED["rows"]
        if (row["noise"], row["error"], row["allows_noise"]) == (noise, rule.error, rule.allows_noise)
    )


@pytest.mark.parametrize("noise", early_stop.NOISES)
def test_the_rule_in_use_times_more_plans_and_finds_none_that_is_surely_slower(noise: float):
    used, before = row_of(noise, early_stop.USED), row_of(noise, BEFORE)
    assert used["plans"] - 2 * used["plans_error"] > before["plans"] + 2 * before["plans_error"]
    assert used["slower"] <= before["slower"] + 2 * (used["slower_error"] + before["slower_error"])


def test_the_committed_rows_come_out_again():
    searches, times = RECORDED["searches"], early_stop.TrialTimes(**RECORDED["trial_seconds"])
    noise = early_stop.NOISES[0]
    found = [early_stop.simulate_search(early_stop.USED, noise, times, seed)[0] for seed in range(searches)]
    assert sum(found) / searches == pytest.approx(row_of(noise, early_stop.USED)["plans"])
    assert (RESULTS / "summary.md").read_text(encoding="utf-8") == early_stop.summarize(RECORDED)


def test_a_search_without_a_rule_times_every_plan_to_its_end():
    times = early_stop.TrialTimes(plan=4.0, pair=1.0, bytes=0.0)
    count, _ = early_stop.simulate_search(early_stop.StopRule(0.0, allows_noise=False), 0.02, times, seed=1)
    assert count == 24  # of 14 s each, the last one begins within 330 s
