"""`autotune report`: regenerate the report of a run from its records."""

from pathlib import Path

from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import LockedError, StoreError
from autotune.records.config import load_config
from autotune.records.run_dir import RunDir, find_active_process, find_latest_run, find_runs_dir, with_name
from autotune.records.trial import load_trials
from autotune.report.html import write_charts, write_report
from autotune.report.mlflow_log import Tracker
from autotune.report.mlflow_store import relocate_artifacts
from autotune.study.recorded_run import read_session_end


def run(run_dir: Path | None, *, pictures: Path | None, log: bool, json: bool) -> None:
    """Write a run's report and print its path.

    Raises:
        LockedError: `log` is true, and the study still runs.
        StoreError: `log` is true, and MLflow does not answer.
    """
    run_dir = with_name(run_dir or find_latest_run(Path("runs")))
    path = write_report(run_dir)
    relocate_artifacts(Path(find_runs_dir(run_dir)))
    charts = [] if pictures is None else write_charts(run_dir, pictures)
    with answer_stream() as out:
        if log:
            _log(run_dir)
        if json:
            print_json({"report_path": str(path), "picture_paths": [str(chart) for chart in charts]}, out)
        else:
            out.writelines(f"{written}\n" for written in (path, *charts))


def _log(run_dir: Path) -> None:
    if (process := find_active_process(run_dir)) is not None:
        raise LockedError(
            f"{run_dir}: process {process} runs this study, and logs it itself; log it again when that has ended"
        )
    tracker = Tracker(load_config(str(RunDir(run_dir).config), overrides={"runs": find_runs_dir(run_dir)}), run_dir)
    end = read_session_end(run_dir, len(load_trials(RunDir(run_dir).trials)))
    message = tracker.finish(interrupted=end.get("interrupted"))
    if tracker.problem:
        raise StoreError(message)
    print_note(f"mlflow  {message}" if message else f"{run_dir}: no trial is recorded here, so there is nothing to log")
