"""`autotune nightly`: every entry of a config, one table, one exit code."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.commands.session import Interrupted, answering, harness, print_json, say
from autotune.nightly.config import Entry, load_night
from autotune.nightly.history import Night
from autotune.nightly.night import Job, latest, run_night
from autotune.nightly.pages import document, plain
from autotune.nightly.results import failure

if TYPE_CHECKING:
    from autotune.measure.harness import Harness
    from autotune.records.config import Config
    from autotune.report.mlflow_log import Tracker
    from autotune.study.events import Event
    from autotune.study.outcome import Result
    from autotune.study.runner import Runner


def run(path: Path, *, resume: bool, json: bool) -> None:
    """Run a night, or go on with the last one; print its table and end as its worst entry calls for."""
    options = load_night(path)
    night = latest(options) if resume else begun()
    watch = _Watch()
    with answering() as out:
        results = run_night(Job(options, path, _open, watch.search, watch.tell), night)
        if json:
            print_json(document(results), out)
        else:
            out.write(plain(results))
        say(f"results  {options.directory}/nights/{night}/")
    if results.interrupted:
        raise Interrupted(f"interrupted; go on with: autotune nightly {path} --resume", results.interrupted)
    if (error := failure(results)) is not None:
        raise error


def begun() -> str:
    """Name of a night that begins now."""
    return time.strftime("%Y-%m-%d_%H%M%S")


@contextlib.contextmanager
def _open(entry: Entry, log_dir: Path) -> Iterator["Harness"]:
    say(f"{entry.key}: {entry.ref}, budget {entry.budget}")
    with harness(entry, log_dir) as runner:
        yield runner


class _Watch:
    """Studies that are shown and logged like any other, and told what their night came to."""

    def __init__(self) -> None:
        self.trackers: dict[str, Tracker] = {}
        """By entry."""

    def search(self, config: "Config", runner: "Runner", run_dir: Path) -> "Result":
        from autotune.cli.live import watching
        from autotune.report.html import write_report
        from autotune.report.mlflow_log import Tracker
        from autotune.study import session as study

        tracker = self.trackers[run_dir.parent.name] = Tracker(config, run_dir)

        def tell(event: "Event") -> None:
            show(event)
            tracker(event)

        signal = 0
        try:
            with watching(config) as show:
                result = study.tune(config, runner, run_dir, progress=tell, write_report=write_report)
            signal = result.interrupted
        finally:
            if logged := tracker.finish(interrupted=signal):
                say(f"mlflow  {logged}")
        return result

    def tell(self, night: Night) -> None:
        say(f"{night.entry}: {night.verdict}{': ' if night.detail else ''}{night.detail}")
        if night.entry in self.trackers:
            told = {"night": night.night, "verdict": night.verdict.value, "cause": ", ".join(night.causes)}
            self.trackers[night.entry].tag({f"autotune.nightly.{key}": value for key, value in told.items() if value})
