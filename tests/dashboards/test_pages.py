"""Every page, run by Streamlit without a browser."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autotune.report.charts import BLACK, PointKind, TrialPoint
from autotune.report.claims import Claim, Figure, write
from autotune.study.session import tune
from autotune.testing.fake_runner import FakeRunner
from dashboards.charts import frontier_chart, memory_chart
from tests.dashboards import sample_runs
from tests.study.test_session import configured

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).parents[2] / "dashboards"
PAGES = sorted(path.stem for path in (ROOT / "views").glob("*.py"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the arguments of the pages."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root, experiments = tmp_path / "runs", tmp_path / "experiments"
    experiments.mkdir()
    mlflow = ["--mlflow", "http://127.0.0.1:9"]
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(root), "--experiments", str(experiments), *mlflow])
    return root


def load(path: Path) -> "AppTest":
    from streamlit.testing.v1 import AppTest  # deferred: the import takes seconds

    return AppTest.from_file(str(path), default_timeout=60)


def page(name: str, **query: str) -> "AppTest":
    test = load(ROOT / "views" / f"{name}.py")
    for key, value in query.items():
        test.query_params[key] = value
    test.run()
    assert not test.exception, test.exception[0].message
    return test


def charts(test: "AppTest") -> int:
    return len(test.get("vega_lite_chart"))


@pytest.mark.parametrize("name", PAGES)
def test_with_nothing_to_show_a_page_says_what_to_run(name: str, runs: Path) -> None:
    test = page(name)
    assert len(test.info) == 1
    assert test.code[0].value.startswith("autotune ")
    assert not test.dataframe


@pytest.mark.parametrize("name", PAGES)
def test_directories_that_a_crash_left_behind_crash_no_page(name: str, runs: Path) -> None:
    sample_runs.broken(runs)
    page(name)


def test_a_run_that_cannot_be_read_is_named_with_the_reason(runs: Path) -> None:
    reasons = sample_runs.broken(runs)
    sample_runs.study(runs, "good")
    assert not page("study").warning
    for name in ("cut", "wild", "other", "begun"):
        (warning,) = page("study", study=name).warning
        assert warning.value.startswith(f"{name} cannot be shown")
        assert reasons[name] in warning.value, name


def test_models_and_devices_have_the_champion_of_nights_and_studies(runs: Path) -> None:
    sample_runs.study(runs, "first")
    sample_runs.nights(runs)
    grid, every = (element.value for element in page("models").dataframe)
    assert list(grid["model"]) == ["chain()", "chain(layers=12)"]
    assert set(grid.columns) == {"model", "Fake 9000, 2 cores", "Test <Silicon>, 2 cores"}
    assert set(every["from"]) == {"night chain", "first"}


def test_a_champion_that_cannot_be_read_is_named_beside_the_others(runs: Path) -> None:
    sample_runs.study(runs, "first")
    sample_runs.broken(runs)
    test = page("models")
    assert [warning.value.split(" ")[0] for warning in test.warning] == ["other"]
    assert list(test.dataframe[0].value["model"]) == ["chain(layers=12)"]


def test_a_study_shows_headline_frontier_table_and_why_trials_failed(runs: Path) -> None:
    sample_runs.study(runs, "first")
    test = page("study")
    assert test.markdown[0].value == "**ended after 10 trials**"
    assert test.subheader[0].value.endswith("for 1 % more time (+1 % to +1 %, range of 5), not re-measured")
    assert charts(test) == 1
    (table,) = (element.value for element in test.dataframe)
    assert list(table["plan"]) == [str(number) for number in reversed(range(10))]
    assert list(table["verdict"]).count("BEST") == 1
    assert any("crashed" in element.label for element in test.expander)


def test_a_study_shows_its_confirmation_and_hands_out_its_report(runs: Path) -> None:
    tune(configured(runs.parent, trials=4), FakeRunner(), runs / "whole", lasting=False)
    assert not page("study").get("download_button")
    (runs / "whole" / "report.html").write_text("<html>")
    test = page("study")
    confirmed, _ = (element.value for element in test.dataframe)
    assert next(iter(confirmed["plan"])) == "eager"
    assert list(confirmed["verdict"]).count("BEST") == 1
    assert len(test.get("download_button")) == 1


def test_the_study_that_runs_is_shown_first_and_grows_as_it_goes_on(runs: Path) -> None:
    running = sample_runs.study(runs, "running")
    lines = (running / "trials.jsonl").read_text().splitlines(keepends=True)
    (running / "trials.jsonl").write_text("".join(lines[:2]))
    sample_runs.begin(running)
    sample_runs.study(runs, "ended")
    test = page("study")
    assert test.selectbox[0].value == "running"
    assert "running as process" in test.markdown[0].value
    assert len(test.dataframe[-1].value) == 2
    (running / "trials.jsonl").write_text("".join(lines) + '{"number": 10, "ki')
    test.run()
    assert len(test.dataframe[-1].value) == 10


def test_a_study_that_has_only_begun_is_not_called_broken(runs: Path) -> None:
    run_dir = runs / "new"
    run_dir.mkdir(parents=True)
    sample_runs.begin(run_dir)
    test = page("study")
    assert not test.warning
    assert "0 trials" in test.markdown[0].value


def test_two_plans_stand_on_one_axis_with_figures_decisions_and_layers(runs: Path) -> None:
    sample_runs.study(runs, "first")
    test = page("compare")
    assert charts(test) == 1
    figures, decisions, layers = (element.value for element in test.dataframe)
    assert "peak of the step, measured" in set(figures[""])
    assert "recompute" in set(decisions[""])
    assert {"layer", "difference MiB"} <= set(layers.columns)
    assert not test.warning


def test_a_plan_of_a_run_that_cannot_be_read_is_named(runs: Path) -> None:
    sample_runs.study(runs, "first")
    sample_runs.broken(runs)
    test = page("compare", first_study="cut")
    assert "not JSON" in test.warning[0].value
    assert not test.dataframe


def test_nights_show_the_regression_its_cause_and_every_night(runs: Path) -> None:
    sample_runs.nights(runs)
    test = page("nightly")
    (red,) = test.error
    assert "cause: **environment**" in red.value
    assert charts(test) == 1
    assert list(test.dataframe[0].value["n4"]) == ["regression 1.20x"]
    assert len(test.dataframe[2].value) == 5


def test_two_night_directories_with_one_entry_name_are_both_shown(runs: Path) -> None:
    sample_runs.nights(runs)
    sample_runs.nights(runs / "benchmark")
    test = page("nightly")
    assert list(test.dataframe[0].value["entry"]) == ["benchmark/nightly/chain", "nightly/chain"]
    assert len(test.error) == 2


def test_words_of_a_record_are_shown_as_they_are_and_not_as_markdown() -> None:
    from dashboards.page import escape_markdown

    assert escape_markdown("a_b* [c](d) -> $e$") == r"a\_b\* \[c\](d) -\> \$e\$"


def test_an_entry_whose_history_is_torn_is_named_and_the_others_stay(runs: Path) -> None:
    sample_runs.nights(runs)
    sample_runs.broken(runs)
    test = page("nightly")
    assert test.warning[0].value.startswith("nightly/torn cannot be shown")
    assert test.error


def test_the_fleet_s_page_reads_no_study_of_this_machine(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dashboards import page as pages  # deferred: it imports streamlit

    sample_runs.study(runs, "local")
    with (sample_runs.study(runs, "leased") / "config.yaml").open("a") as config:
        config.write("on: a100\n")
    loaded: list[str] = []
    load_study = pages.load_study
    monkeypatch.setattr(pages, "load_study", lambda path: (loaded.append(path.name), load_study(path))[1])
    assert list(page("fleet").dataframe[0].value["class"]) == ["a100"]
    assert loaded == ["leased"]


def test_claims_are_counted_drawn_and_told(runs: Path) -> None:
    folder = runs.parent / "experiments" / "net"
    write(folder, [Claim("a net: peak", "owner/paper#7", "simulated", "GB", Figure(10.0), Figure(10.0))])
    (folder.parent / "bad" / "results").mkdir(parents=True)
    (folder.parent / "bad" / "results" / "result.json").write_text("[")
    test = page("published")
    assert next((metric.label, metric.value) for metric in test.metric) == ("reproduced", "1")
    assert charts(test) == 1
    assert "no list of claims" in test.warning[0].value
    assert list(test.dataframe[0].value["claim"]) == ["a net: peak"]
    assert list(test.dataframe[0].value["link"]) == ["https://github.com/owner/paper/issues/7"]


def test_the_app_has_its_pages_and_says_which_servers_do_not_run(runs: Path) -> None:
    test = load(ROOT / "app.py").run()
    assert not test.exception
    captions = [caption.value for caption in test.sidebar.caption]
    assert captions[:2] == ["MLflow is not running", "optuna-dashboard is not running"]
    assert test.title[0].value == "Models and devices"


def test_no_mark_of_a_chart_is_black_which_the_dark_scheme_hides() -> None:
    points = [TrialPoint(0, 2e8, 1.0, PointKind.BASELINE), TrialPoint(1, 1e8, 1.1, PointKind.BEST, (1.0, 1.2))]
    drawn = (
        frontier_chart(points, 1.5e8, "ratio").to_json(),
        memory_chart([("eager", 0.0, 1.0), ("plan 1", 0.0, 0.5)], [("budget", 10**6)]).to_json(),
    )
    assert not any(BLACK in chart for chart in drawn)
    assert '"low"' in drawn[0]
