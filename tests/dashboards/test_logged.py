"""What MLflow has on record of studies, from a real store on SQLite."""

import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from autotune.errors import ConfigError
from autotune.records.config import Config
from autotune.report.mlflow_log import Tracker
from autotune.study.events import Ready
from autotune.study.recorded_run import Records
from dashboards.champions import of_logged, of_study, once
from dashboards.logged import studies
from tests.dashboards import made

PAGE = Path(__file__).parents[2] / "dashboards" / "views" / "models.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that MLflow was told of, and one that it was not."""
    root = tmp_path_factory.mktemp("logged") / "runs"
    patch = pytest.MonkeyPatch()
    patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = made.study(root, "told")
    records = Records.load(run_dir)
    assert records.graph is not None
    assert records.costs is not None
    assert records.device is not None
    tracker = Tracker(Config(workload="chain", arguments={"layers": 12}, runs=str(root)), run_dir)
    tracker(Ready(records.graph, records.costs, records.device))
    assert not tracker.finish().startswith("not logged")
    made.study(root, "untold")
    patch.undo()
    return root


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_study_comes_back_with_its_winner_s_figures_in_base_units(runs: Path) -> None:
    (found,) = studies(runs)
    best = Records.load(runs / "told").best
    assert best is not None
    assert best.measurement is not None
    assert found.best["step_charged_bytes"] == best.measurement.step_charged_bytes
    assert found.best["time_ratio"] == best.measurement.time_ratio
    assert (found.workload, found.silicon, found.budget) == ("chain(layers=12)", "Test <Silicon>", "65%")


def test_its_champion_is_that_of_the_run_directory_so_that_it_is_told_once(runs: Path) -> None:
    (logged,) = map(of_logged, studies(runs))
    told, untold = of_study(runs / "told"), of_study(runs / "untold")
    assert logged is not None
    assert told is not None
    assert untold is not None
    assert once([logged], [told, untold]) == [logged, untold]


def test_the_page_links_each_study_that_mlflow_has(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), "--mlflow", "http://127.0.0.1:9"])
    test = AppTest.from_file(str(PAGE), default_timeout=60).run()
    assert not test.exception
    (found,) = studies(runs)
    links = test.dataframe[1].value.set_index("from")["MLflow"]
    assert links["told"] == f"http://127.0.0.1:9/#/experiments/{found.experiment_id}/runs/{found.run_id}"
    assert list(links.index[links.isna()]) == ["untold"]


def test_where_nothing_was_logged_no_store_is_begun(tmp_path: Path) -> None:
    assert studies(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_store_that_does_not_answer_leaves_the_page_what_lies_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.study(tmp_path, "kept")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(tmp_path)])
    with pytest.raises(ConfigError, match="MLflow does not answer"):
        studies(tmp_path)
    test = AppTest.from_file(str(PAGE), default_timeout=60).run()
    assert not test.exception
    assert test.warning[0].value.startswith("MLflow does not answer")
    assert list(test.dataframe[1].value["from"]) == ["kept"]
