"""`autotune nightly`: run every entry of a config, print one table and exit with one code."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.launch import run_tracked
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import StudyInterruptedError
from autotune.fleet.open_runner import StudyRunner, apply_class, open_runner
from autotune.nightly.config import NightlyEntry, load_nightly_config
from autotune.nightly.history import NightRecord
from autotune.nightly.night import NightJob, is_complete, latest_night, run_night
from autotune.nightly.result_files import format_text, to_document
from autotune.nightly.results import worst_error

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.report.mlflow_log import Tracker
    from autotune.study.outcome import StudyResult
    from autotune.study.runner import Runner


def run(path: Path, *, resume: bool, fleet: str | None = None, on: str | None = None, json: bool) -> None:
    """Run a new night, or continue the last one, and print its table; then raise the error of its worst entry."""
    options = load_nightly_config(path, fleet=fleet, on=on)
    # a class that the fleet lacks is refused before the night
    options = options.model_copy(update={"entries": [apply_class(entry) for entry in options.entries]})
    night = latest_night(options) if resume else name_night()
    if resume and is_complete(options, night):
        print_note(f"night {night} is complete: every entry has a result; start a new night without --resume")
    studies = _TrackedStudies()
    with answer_stream() as out:
        results = run_night(NightJob(options, path, _open_runner, studies.search, studies.report), night)
        if json:
            print_json(to_document(results), out)
        else:
            out.write(format_text(results))
        print_note(f"results  {options.directory}/nights/{night}/")
    if results.interrupted:
        raise StudyInterruptedError(
            f"interrupted; continue with: autotune nightly {path} --resume", results.interrupted
        )
    if (error := worst_error(results)) is not None:
        raise error


def name_night() -> str:
    """Return the name of a night that starts now."""
    return time.strftime("%Y-%m-%d_%H%M%S")


@contextlib.contextmanager
def _open_runner(entry: NightlyEntry, log_dir: Path) -> Iterator[StudyRunner]:
    print_note(f"{entry.key}: {entry.ref}, budget {entry.budget}")
    with open_runner(entry, log_dir) as runner:
        if entry.on is not None:
            runner.listen(lambda text: print_note(f"{entry.key}: {text}"))
        yield runner


class _TrackedStudies:
    """Studies of one night: each is shown and logged as `autotune tune` does, and tagged with its entry's verdict."""

    def __init__(self) -> None:
        self.trackers: dict[str, Tracker] = {}
        """MLflow trackers by the key of their entry."""

    def search(self, config: "Config", runner: "Runner", run_dir: Path) -> "StudyResult":
        """Run the study of an entry."""
        from autotune.cli.progress_panel import show_progress
        from autotune.report.mlflow_log import Tracker

        tracker = self.trackers[run_dir.parent.name] = Tracker(config, run_dir)
        with show_progress(config) as progress:
            return run_tracked(config, runner, run_dir, progress, tracker)

    def report(self, night: NightRecord) -> None:
        """Print the verdict of an entry, and tag its logged study with it."""
        print_note(f"{night.entry}: {night.verdict}{': ' if night.detail else ''}{night.detail}")
        if night.entry in self.trackers:
            tags = {"night": night.night, "verdict": night.verdict.value, "cause": ", ".join(night.causes)}
            self.trackers[night.entry].tag({f"autotune.nightly.{key}": value for key, value in tags.items() if value})
