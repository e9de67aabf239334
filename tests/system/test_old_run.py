"""A run directory and a plan made by commit a7ad60f open in every command of today."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from autotune.cli import main as cli
from autotune.records.trial import load_trials
from tests.support.checkout import BRIEF, run_python

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "tests" / "data" / "old_run"
RUN = Path("runs/old")
PLAN = "plans/old.json"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    printed = capfd.readouterr()
    assert not ended.value.code, printed.err
    return printed.out


def test_show_describes_the_plan(place: Path, capfd: pytest.CaptureFixture[str]):
    text = output(capfd, "show", PLAN)
    assert "75%" in text
    assert "greedy" in text


def test_its_plan_is_listed_and_laid_out_with_the_records_of_its_run(place: Path, capfd: pytest.CaptureFixture[str]):
    assert "tensors" in output(capfd, "show", PLAN, "--table")
    assert output(capfd, "layout", PLAN).startswith("buffers")


@pytest.mark.parametrize("source", [PLAN, str(RUN)])
def test_its_steps_become_a_trace(place: Path, capfd: pytest.CaptureFixture[str], source: str):
    document = json.loads(output(capfd, "trace", source, "-o", "trace.json", "--json"))
    trace = json.loads((place / "trace.json").read_text())["traceEvents"]
    assert len(trace) == document["events"]
    peaks = [
        max(sum(event["args"].values()) for event in trace if (event["ph"], event["pid"]) == ("C", process))
        for process in (1, 2)
    ]
    assert peaks == list(document["peak_bytes"].values())


def test_the_report_is_written_again_from_the_records(place: Path, capfd: pytest.CaptureFixture[str]):
    output(capfd, "report", str(RUN))
    page = (place / RUN / "report.html").read_text()
    assert page.count("<svg ") >= 2
    assert "chain.py:factory" in page


def test_a_replay_searches_the_record(place: Path, capfd: pytest.CaptureFixture[str]):
    arguments = ("--trials", "2", "--seeds", "1", "--sampler", "auto", "--json")
    replayed = json.loads(output(capfd, "replay", str(RUN), *arguments))
    assert len(replayed["replays"]) == 1
    assert replayed["known_best"] > 0


def test_the_dashboard_shows_the_run(place: Path, monkeypatch: pytest.MonkeyPatch):
    from streamlit.testing.v1 import AppTest  # deferred: the import takes seconds

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(
        sys, "argv", ["app.py", "--runs", "runs", "--experiments", "none", "--mlflow", "http://127.0.0.1:9"]
    )
    test = AppTest.from_file(str(ROOT / "dashboards" / "views" / "study.py"), default_timeout=60)
    test.query_params["study"] = "old"
    test.run()
    assert not test.exception, test.exception[0].message
    assert not test.warning
    confirmed, trials = (element.value for element in test.dataframe)
    assert list(confirmed["verdict"]) == ["baseline", "BEST"]
    assert len(trials) == len(load_trials(RUN / "trials.jsonl")) == 4


@pytest.mark.slow
def test_its_plan_is_measured_and_its_search_goes_on(place: Path):
    """In processes of their own, which capture the step again: the digest of the graph must be the recorded one."""

    def run(*arguments: str) -> str:
        done = run_python("-c", BRIEF, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(run("measure", PLAN, "--json"))["measurement"]["outcome"] == "ok"
    trials = place / RUN / "trials.jsonl"
    before = trials.read_text().splitlines(keepends=True)[:-1]
    trials.write_text("".join(before))  # as if it had been interrupted before the confirmation
    run("resume", str(RUN), "--time", "90s", "--trials", str(len(before)))
    after = trials.read_text().splitlines(keepends=True)
    assert after[: len(before)] == before
    assert json.loads(after[len(before)])["kind"] == "confirm"
