"""Two plans beside each other, on a graph whose bytes can be counted."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.study.recorded_run import RecordedRun
from dashboards.plan_comparison import (
    PlanSide,
    build_side,
    compare_decisions,
    compare_figures,
    compare_peaks,
    list_budgets,
    list_choices,
    memory_points,
)
from tests.dashboards import sample_runs


@pytest.fixture
def records(tmp_path: Path) -> RecordedRun:
    return RecordedRun.load(sample_runs.study(tmp_path, "run"))


@pytest.fixture
def both(records: RecordedRun) -> tuple[PlanSide, PlanSide]:
    """Plain eager, and the plan that won."""
    assert records.best is not None
    return build_side(records, 0, "eager"), build_side(records, records.best.number, "best")


def test_the_best_comes_first_then_plain_eager(records: RecordedRun) -> None:
    labels = list(list_choices(records).values())
    assert labels[0].endswith("1.01x (best)")
    assert labels[1].startswith("0 eager, as traced")
    assert len(labels) == len(records.trials)


def test_both_timelines_stand_on_one_axis_and_reach_their_peaks(both: tuple[PlanSide, PlanSide]) -> None:
    rows = memory_points(*both)
    for side in both:
        points = [row for row in rows if row[0] == side.name]
        assert max(row[2] for row in points) == side.timeline.peak_bytes / 2**20
        assert points[0][1] == 0.0
        assert points[-1][1] == pytest.approx(1e3 * side.timeline.seconds)


def test_budgets_are_named_where_they_differ_and_one_where_they_do_not(both: tuple[PlanSide, PlanSide]) -> None:
    first, second = (replace(side, budget_bytes=4096) for side in both)
    assert list_budgets(first, second) == [("budget", 4096)]
    assert list_budgets(first, replace(second, budget_bytes=8192)) == [("first budget", 4096), ("second budget", 8192)]
    assert list_budgets(first, replace(second, budget_bytes=None)) == [("first budget", 4096)]
    assert list_budgets(replace(first, budget_bytes=None), replace(second, budget_bytes=None)) == []


def test_differences_at_the_peak_add_up_to_that_of_the_peaks(both: tuple[PlanSide, PlanSide]) -> None:
    first, second = both
    rows = compare_peaks(first, second, most=10**6)
    assert sum(row[3] for row in rows) == pytest.approx(
        (second.timeline.peak_bytes - first.timeline.peak_bytes) / 2**20
    )
    assert [abs(row[3]) for row in rows] == sorted((abs(row[3]) for row in rows), reverse=True)


def test_figures_say_what_is_known_of_each_and_the_change(both: tuple[PlanSide, PlanSide]) -> None:
    cells = {row[0]: row[1:] for row in compare_figures(*both)}
    predicted = cells["peak of the step, predicted"]
    first, second = both
    assert predicted[2] == f"{100 * (second.timeline.peak_bytes / first.timeline.peak_bytes - 1):+.1f} %"
    assert cells["charged for the step, predicted"] == ("-", "-", "")


def test_seconds_of_two_trials_have_no_difference_and_ratios_to_eager_of_their_own_turns_have(
    both: tuple[PlanSide, PlanSide],
) -> None:
    cells = {row[0]: row[1:] for row in compare_figures(*both)}
    assert "-" not in cells["step time, measured"][:2]
    assert cells["step time, measured"][2] == ""
    assert cells["step time over eager"][2].endswith(" %")


def test_decisions_name_planners_and_what_came_of_them(both: tuple[PlanSide, PlanSide]) -> None:
    cells = {row[0]: row[1:] for row in compare_decisions(*both)}
    assert cells["recompute"] == ("-", "greedy")
    assert cells["offloaded"][0] == "nothing"
    assert "values to ssd, window of 1" in cells["offloaded"][1]


def test_a_trial_or_a_graph_that_is_not_there_is_named(records: RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trial 99"):
        build_side(records, 99, "first")
    (tmp_path / "run" / "graph.json").unlink()
    with pytest.raises(ConfigError, match=r"first: no graph\.json"):
        build_side(RecordedRun.load(tmp_path / "run"), 0, "first")
