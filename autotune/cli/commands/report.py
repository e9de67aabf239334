"""`autotune report`: the page of a run, written anew."""

from pathlib import Path

from autotune.cli.commands.session import answering, latest_run, print_json, say
from autotune.errors import StoreError
from autotune.records.config import load_config
from autotune.records.run_dir import runs_of
from autotune.report.html import write_pictures, write_report
from autotune.report.mlflow_log import Tracker, interrupted
from autotune.report.mlflow_store import rehome


def run(where: Path | None, *, pictures: Path | None, log: bool, json: bool) -> None:
    """Write it and print its path; StoreError where it was to be logged and MLflow does not answer."""
    run_dir = where or latest_run(Path("runs"))
    path = write_report(run_dir)
    rehome(Path(runs_of(run_dir)))
    drawn = [] if pictures is None else write_pictures(run_dir, pictures)
    with answering() as out:
        if log:
            _log(run_dir)
        if json:
            print_json({"report_path": str(path), "picture_paths": [str(picture) for picture in drawn]}, out)
        else:
            out.writelines(f"{written}\n" for written in (path, *drawn))


def _log(run_dir: Path) -> None:
    tracker = Tracker(load_config(str(run_dir / "config.yaml"), overrides={"runs": runs_of(run_dir)}), run_dir)
    logged = tracker.finish(interrupted=interrupted(run_dir))
    if tracker.problem:
        raise StoreError(logged)
    say(f"mlflow  {logged}" if logged else f"{run_dir}: no trial is recorded here, so there is nothing to log")
