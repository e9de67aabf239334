"""Two plans beside each other, on a graph whose bytes can be counted."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.study.recorded_run import Records
from dashboards.pairs import Side, alive, budgets, choices, decisions, figures, side, timelines
from tests.dashboards import made


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records.load(made.study(tmp_path, "run"))


@pytest.fixture
def both(records: Records) -> tuple[Side, Side]:
    """Plain eager, and the plan that won."""
    assert records.best is not None
    return side(records, 0, "eager"), side(records, records.best.number, "best")


def test_the_best_comes_first_then_plain_eager(records: Records) -> None:
    found = list(choices(records).values())
    assert found[0].endswith("1.01x (best)")
    assert found[1].startswith("0 eager, as traced")
    assert len(found) == len(records.trials)


def test_both_timelines_stand_on_one_axis_and_reach_their_peaks(both: tuple[Side, Side]) -> None:
    rows = timelines(*both)
    for one in both:
        mine = [row for row in rows if row[0] == one.name]
        assert max(row[2] for row in mine) == one.walk.peak_bytes / 2**20
        assert mine[0][1] == 0.0
        assert mine[-1][1] == pytest.approx(1e3 * one.walk.seconds)


def test_budgets_are_named_where_they_differ_and_one_where_they_do_not(both: tuple[Side, Side]) -> None:
    first, second = (replace(one, budget_bytes=4096) for one in both)
    assert budgets(first, second) == [("budget", 4096)]
    assert budgets(first, replace(second, budget_bytes=8192)) == [("first budget", 4096), ("second budget", 8192)]
    assert budgets(first, replace(second, budget_bytes=None)) == [("first budget", 4096)]
    assert budgets(replace(first, budget_bytes=None), replace(second, budget_bytes=None)) == []


def test_differences_at_the_peak_add_up_to_that_of_the_peaks(both: tuple[Side, Side]) -> None:
    first, second = both
    rows = alive(first, second, most=10**6)
    assert sum(row[3] for row in rows) == pytest.approx((second.walk.peak_bytes - first.walk.peak_bytes) / 2**20)
    assert [abs(row[3]) for row in rows] == sorted((abs(row[3]) for row in rows), reverse=True)


def test_figures_say_what_is_known_of_each_and_the_change(both: tuple[Side, Side]) -> None:
    found = {row[0]: row[1:] for row in figures(*both)}
    predicted = found["peak of the step, predicted"]
    first, second = both
    assert predicted[2] == f"{100 * (second.walk.peak_bytes / first.walk.peak_bytes - 1):+.1f} %"
    assert found["charged for the step, predicted"] == ("-", "-", "")


def test_decisions_name_planners_and_what_came_of_them(both: tuple[Side, Side]) -> None:
    found = {row[0]: row[1:] for row in decisions(*both)}
    assert found["recompute"] == ("-", "greedy")
    assert found["sent away"][0] == "nothing"
    assert "values to ssd, window of 1" in found["sent away"][1]


def test_a_trial_or_a_graph_that_is_not_there_is_named(records: Records, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trial 99"):
        side(records, 99, "first")
    (tmp_path / "run" / "graph.json").unlink()
    with pytest.raises(ConfigError, match=r"first: no graph\.json"):
        side(Records.load(tmp_path / "run"), 0, "first")
