"""Studies read from a real MLflow store on SQLite."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autotune.errors import ConfigError
from autotune.records.config import Config
from autotune.records.run_dir import write_json
from autotune.report.mlflow_log import Tracker
from autotune.study.events import Ready
from autotune.study.recorded_run import RecordedRun
from dashboards.champions import from_logged_study, merge_champions, read_run_champion
from dashboards.mlflow_studies import LoggedStudy, load_studies
from tests.dashboards import sample_runs

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

PAGE = Path(__file__).parents[2] / "dashboards" / "views" / "models.py"


def run_page() -> "AppTest":
    from streamlit.testing.v1 import AppTest  # deferred: the import takes seconds

    return AppTest.from_file(str(PAGE), default_timeout=60).run()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One logged study, and one that was not logged."""
    root = tmp_path_factory.mktemp("logged") / "runs"
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = sample_runs.study(root, "told")
    records = RecordedRun.load(run_dir)
    assert records.graph is not None
    assert records.costs is not None
    assert records.device is not None
    tracker = Tracker(Config(workload="chain", arguments={"layers": 12}, runs=str(root)), run_dir)
    tracker(Ready(records.graph, records.costs, records.device))
    assert not tracker.finish().startswith("not logged")
    sample_runs.study(root, "untold")
    patch.undo()
    return root


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_study_comes_back_with_its_winner_s_figures_in_base_units(runs: Path) -> None:
    (study,) = load_studies(runs)
    best = RecordedRun.load(runs / "told").best
    assert best is not None
    assert best.measurement is not None
    assert study.best["step_charged_bytes"] == best.measurement.step_charged_bytes
    assert study.best["time_ratio"] == best.measurement.time_ratio
    assert (study.workload, study.device, study.budget) == ("chain(layers=12)", "Test <Silicon>, 2 cores", "65%")


def test_a_study_whose_winner_was_withdrawn_has_no_best_figures(runs: Path) -> None:
    best = RecordedRun.load(runs / "told").best
    assert best is not None

    def log(number: int | None) -> LoggedStudy:
        write_json(runs / "told" / "study.json", {"best": number, "interrupted": 0})
        config = Config(workload="chain", arguments={"layers": 12}, runs=str(runs))
        assert not Tracker(config, runs / "told").finish().startswith("not logged")
        (study,) = load_studies(runs)
        return study

    withdrawn, restored = log(None), log(best.number)
    assert not withdrawn.best
    assert from_logged_study(withdrawn) is None
    assert restored.best


def test_its_champion_is_that_of_the_run_directory_so_that_it_is_told_once(runs: Path) -> None:
    (logged,) = map(from_logged_study, load_studies(runs))
    on_disk, unlogged = read_run_champion(runs / "told"), read_run_champion(runs / "untold")
    assert logged is not None
    assert on_disk is not None
    assert unlogged is not None
    assert merge_champions([logged], [on_disk, unlogged]) == [replace(on_disk, page=logged.page), unlogged]
    assert logged.page


def test_the_page_links_each_study_that_mlflow_has(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), "--mlflow", "http://127.0.0.1:9"])
    test = run_page()
    assert not test.exception
    (study,) = load_studies(runs)
    links = test.dataframe[1].value.set_index("from")["MLflow"]
    assert (
        links["told"]
        == f"http://127.0.0.1:9/#/experiments/{study.experiment_id}/runs/{study.run_id}?workflowType=machine_learning"
    )
    assert list(links.index[links.isna()]) == ["untold"]


def test_where_nothing_was_logged_no_store_is_begun(tmp_path: Path) -> None:
    assert load_studies(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_store_that_does_not_answer_leaves_the_page_what_lies_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_runs.study(tmp_path, "kept")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(tmp_path)])
    with pytest.raises(ConfigError, match="MLflow does not answer"):
        load_studies(tmp_path)
    test = run_page()
    assert not test.exception
    assert test.warning[0].value.startswith("MLflow does not answer")
    assert list(test.dataframe[1].value["from"]) == ["kept"]
