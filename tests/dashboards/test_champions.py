"""Whose plan stands for a model, a device and a budget."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dashboards.champions import (
    Champion,
    build_grid,
    from_logged_study,
    merge_champions,
    read_entry_champion,
    read_run_champion,
    select_current,
)
from dashboards.mlflow_studies import LoggedStudy
from tests.dashboards import sample_runs

FAST = Champion("net()", "chip", "65%", "fast", charged_bytes=2**20, seconds=0.1, ratio=0.9, recorded=1.0)


def test_a_study_s_champion_is_its_plan_file(tmp_path: Path) -> None:
    champion = read_run_champion(sample_runs.study(tmp_path, "run"))
    assert champion is not None
    assert (champion.model, champion.device, champion.budget) == ("chain(layers=12)", "Test <Silicon>, 2 cores", "65%")
    assert champion.ratio == pytest.approx(1.01)
    assert champion.interval is not None, "re-measured beside eager"
    assert champion.origin == "run"


def test_a_run_that_handed_nothing_back_has_none(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    (run_dir / "plan.json").unlink()
    assert read_run_champion(run_dir) is None


def test_a_night_s_champion_has_the_figures_of_its_last_night(tmp_path: Path) -> None:
    champion = read_entry_champion(sample_runs.nights(tmp_path))
    assert champion is not None
    assert (champion.nightly, champion.ratio, champion.charged_bytes) == (True, 1.2, 800_000)
    assert champion.summary.endswith("at 1.20x (1.10 to 1.30)")


def test_a_champion_beside_which_eager_does_not_fit_has_seconds_and_no_ratio(tmp_path: Path) -> None:
    champion = read_entry_champion(sample_runs.nights(tmp_path, has_eager=False))
    assert champion is not None
    assert (champion.ratio, champion.interval, champion.seconds) == (None, None, 1.2)
    assert champion.summary.endswith("at 1.20 s")


def test_a_ratio_of_a_newer_winner_is_not_shown_beside_the_older_plan(tmp_path: Path) -> None:
    run_dir = sample_runs.study(tmp_path, "run")
    before = read_run_champion(run_dir)
    document = json.loads((run_dir / "plan.json").read_text())
    document["plan"]["allocator"] = "system" if document["plan"]["allocator"] != "system" else "arena"
    (run_dir / "plan.json").write_text(json.dumps(document))
    champion = read_run_champion(run_dir)
    assert before is not None
    assert champion is not None
    assert before.interval is not None
    assert champion.interval is None


def test_the_night_s_champion_stands_before_a_faster_plan_and_the_faster_before_a_slower() -> None:
    slow, nightly = replace(FAST, origin="slow", ratio=1.1), replace(FAST, origin="night", ratio=1.2, nightly=True)
    other = replace(FAST, budget="45%", ratio=1.5)
    assert select_current([slow, FAST, other]) == [other, FAST]
    assert select_current([slow, FAST, nightly]) == [nightly]


def test_plans_for_different_loops_do_not_compete() -> None:
    gradients = replace(FAST, loop="gradients", ratio=1.5)
    assert select_current([gradients, FAST]) == [FAST, gradients]
    assert gradients.summary == "65%, loop gradients: 1.0 MiB at 1.50x"


def test_a_study_whose_loop_is_the_factory_s_own_is_the_same_in_mlflow_and_on_disk() -> None:
    on_disk = replace(FAST, loop="clip")
    assert merge_champions([replace(FAST, page="#/1")], [on_disk]) == [replace(on_disk, page="#/1")]


def test_a_plan_without_a_ratio_stands_only_where_no_other_has_one() -> None:
    alone = replace(FAST, ratio=None, seconds=0.01)
    assert select_current([alone, FAST]) == [FAST]
    assert select_current([alone, replace(alone, seconds=0.02)]) == [alone]


def test_a_study_that_mlflow_has_is_told_once_with_its_page_and_with_the_figures_of_the_disk() -> None:
    page = "#/experiments/1/runs/2"
    logged, gone = replace(FAST, ratio=0.95, page=page), replace(FAST, origin="gone", page="#/experiments/1/runs/3")
    lost, nightly = replace(FAST, origin="lost"), replace(FAST, nightly=True)
    merged = merge_champions([logged, gone], [FAST, lost, nightly])
    assert merged == [replace(FAST, page=page), gone, lost, nightly]


def test_what_mlflow_says_of_a_study_becomes_its_champion() -> None:
    best = {"step_charged_bytes": 2.0**20, "step_seconds": 0.1, "time_ratio": 0.9}
    logged = LoggedStudy("fast.1.0.abcd1234.1000", "7", "run7", "net()", "chip", "65%", 1.0, best)
    assert from_logged_study(logged) == replace(
        FAST, origin="fast.1.0", page="#/experiments/7/runs/run7?workflowType=machine_learning"
    )
    assert from_logged_study(replace(logged, best={})) is None


def test_the_grid_has_a_row_a_model_a_column_a_device_and_every_budget_in_a_cell() -> None:
    head, rows = build_grid(
        [FAST, replace(FAST, budget="45%", ratio=1.25), replace(FAST, model="other()", device="card")]
    )
    assert head == ["model", "card", "chip"]
    assert rows == [
        ["net()", "-", "65%: 1.0 MiB at 0.90x, 45%: 1.0 MiB at 1.25x"],
        ["other()", "65%: 1.0 MiB at 0.90x", "-"],
    ]
