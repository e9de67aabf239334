"""Whose plan stands for a model, a device and a budget."""

from dataclasses import replace
from pathlib import Path

import pytest

from dashboards.champions import Champion, grid, of_entry, of_logged, of_study, once, reigning
from dashboards.logged import Logged
from tests.dashboards import made

FAST = Champion("net()", "chip", "65%", "fast", charged_bytes=2**20, seconds=0.1, ratio=0.9, at=1.0)


def test_a_study_s_champion_is_its_plan_file(tmp_path: Path) -> None:
    found = of_study(made.study(tmp_path, "run"))
    assert found is not None
    assert (found.model, found.device, found.budget) == ("chain(layers=12)", "Test <Silicon>", "65%")
    assert found.ratio == pytest.approx(1.01)
    assert found.origin == "run"


def test_a_run_that_handed_nothing_back_has_none(tmp_path: Path) -> None:
    run_dir = made.study(tmp_path, "run")
    (run_dir / "plan.json").unlink()
    assert of_study(run_dir) is None


def test_a_night_s_champion_has_the_figures_of_its_last_night(tmp_path: Path) -> None:
    found = of_entry(made.nights(tmp_path))
    assert found is not None
    assert (found.nightly, found.ratio, found.charged_bytes) == (True, 1.2, 800_000)


def test_the_night_s_champion_stands_before_a_faster_plan_and_the_faster_before_a_slower() -> None:
    slow, nightly = replace(FAST, origin="slow", ratio=1.1), replace(FAST, origin="night", ratio=1.2, nightly=True)
    other = replace(FAST, budget="45%", ratio=1.5)
    assert reigning([slow, FAST, other]) == [other, FAST]
    assert reigning([slow, FAST, nightly]) == [nightly]


def test_a_plan_without_a_ratio_stands_only_where_no_other_has_one() -> None:
    alone = replace(FAST, ratio=None, seconds=0.01)
    assert reigning([alone, FAST]) == [FAST]
    assert reigning([alone, replace(alone, seconds=0.02)]) == [alone]


def test_a_study_that_mlflow_has_is_told_once_with_its_page() -> None:
    logged = replace(FAST, page="#/experiments/1/runs/2")
    lost, nightly = replace(FAST, origin="lost"), replace(FAST, nightly=True)
    assert once([logged], [FAST, lost, nightly]) == [logged, lost, nightly]


def test_what_mlflow_says_of_a_study_becomes_its_champion() -> None:
    best = {"step_charged_bytes": 2.0**20, "step_seconds": 0.1, "time_ratio": 0.9}
    logged = Logged("fast.1.0.abcd1234.1000", "7", "run7", "net()", "chip", "65%", 1.0, best)
    assert of_logged(logged) == replace(FAST, origin="fast.1.0", page="#/experiments/7/runs/run7")
    assert of_logged(replace(logged, best={})) is None


def test_the_grid_has_a_row_a_model_a_column_a_device_and_every_budget_in_a_cell() -> None:
    head, rows = grid([FAST, replace(FAST, budget="45%", ratio=1.25), replace(FAST, model="other()", device="card")])
    assert head == ["model", "card", "chip"]
    assert rows == [
        ["net()", "-", "65%: 1.0 MiB at 0.90x, 45%: 1.0 MiB at 1.25x"],
        ["other()", "65%: 1.0 MiB at 0.90x", "-"],
    ]
