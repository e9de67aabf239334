"""`autotune nightly`: run every entry of a config, print one table and exit with one code."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.launch import run_tracked
from autotune.cli.output import answer_stream, print_json, print_note
from autotune.errors import ConfigError, StudyInterruptedError, nearest
from autotune.fleet.far_end.device_lock import lock_device
from autotune.fleet.local import LocalRunner
from autotune.fleet.open_runner import StudyRunner, apply_class, find_class, open_runner
from autotune.measure.parent import end_with_parent
from autotune.nightly.config import NightlyConfig, NightlyEntry, load_nightly_config
from autotune.nightly.history import NightRecord
from autotune.nightly.night import NightJob, find_entry_log, is_complete, latest_night, run_entry, run_night
from autotune.nightly.parallel import EntryTime
from autotune.nightly.result_files import format_text, to_document
from autotune.nightly.results import worst_error

if TYPE_CHECKING:
    from autotune.records.config import Config
    from autotune.report.mlflow_log import Tracker
    from autotune.study.outcome import StudyResult
    from autotune.study.runner import Runner

NIGHT_VARIABLE = "AUTOTUNE_NIGHT"
"""Environment variable for the process of an entry. Four words: the night's name, the entry's seconds, the seconds until the
night ends, and the id of the night's process."""


def run(
    path: Path, *, resume: bool, fleet: str | None = None, on: str | None = None, only: str | None = None, json: bool
) -> None:
    """Run a new night, or continue the last one, and print its table; then raise the error of its worst entry."""
    options = load_nightly_config(path, fleet=fleet, on=on)
    # a class that the fleet lacks is refused before the night
    options = options.model_copy(update={"entries": _share_devices([apply_class(entry) for entry in options.entries])})
    studies = _TrackedStudies()
    if only is not None and NIGHT_VARIABLE in os.environ:  # a process that the night itself has started
        name, seconds, latest, parent = os.environ[NIGHT_VARIABLE].split()
        end_with_parent(int(parent))
        job = NightJob(options, path, _open_runner, studies.search, studies.report)
        run_entry(job, only, name, EntryTime(float(seconds), float(latest)))
        return
    asked = options if only is None else _select(options, only, path)
    if not resume:  # a night that goes on keeps the results of its other entries
        options = asked
    night = latest_night(options) if resume else name_night()
    if resume and is_complete(asked, night):
        what = f"night {night} is complete: every entry" if only is None else f"night {night}: {only}"
        print_note(f"{what} has a result; start a new night without --resume")
    chosen = {"--fleet": fleet, "--on": on, "--only": only}
    arguments = tuple(part for name, value in chosen.items() if value is not None for part in (name, value))
    job = NightJob(options, path, _open_runner, studies.search, studies.report, arguments=arguments, only=only)
    if only is None and any(entry.on is not None for entry in options.entries) and len(options.entries) > 1:
        start = _start_entry(path, options, night, fleet, on)
        job = replace(job, devices=_count_devices(options), start_entry=start, on_result=_print_result)
    with answer_stream() as out:
        results = run_night(job, night)
        if only is not None:  # entries that were not asked for may be left
            results = replace(results, left=tuple(key for key in results.left if key == only))
        if json:
            print_json(to_document(results), out)
        else:
            out.write(format_text(results))
        print_note(f"results  {options.directory}/nights/{night}/")
    if results.interrupted:
        raise StudyInterruptedError(f"interrupted; continue with: {results.resume_command}", results.interrupted)
    if (error := worst_error(results)) is not None:
        raise error


def name_night() -> str:
    """Return the name of a night that starts now."""
    return time.strftime("%Y-%m-%d_%H%M%S")


def _select(options: NightlyConfig, only: str, path: Path) -> NightlyConfig:
    """Return the config of one entry; ConfigError for an unknown one."""
    entries = [entry for entry in options.entries if entry.key == only]
    if not entries:
        raise ConfigError(f"--only {only}: {path} has no such entry{nearest(only, [e.key for e in options.entries])}")
    return options.model_copy(update={"entries": entries})


def _share_devices(entries: list[NightlyEntry]) -> list[NightlyEntry]:
    """Return the entries, with `parallel` limited to each entry's share of the devices of its class, at least one.

    The share is the number of devices divided by the number of entries on that class, rounded down.
    """
    used = Counter(entry.on for entry in entries)
    shared = []
    for entry in entries:
        selected = find_class(entry)
        share = 1 if selected is None else max(1, selected[1].devices // used[entry.on])
        shared.append(entry.model_copy(update={"parallel": min(entry.parallel, share)}))
    return shared


def _count_devices(options: NightlyConfig) -> dict[str | None, int]:
    """Return the number of devices of each class; this machine is one."""
    devices: dict[str | None, int] = {None: 1}
    for entry in options.entries:
        if (selected := find_class(entry)) is not None:
            devices[entry.on] = selected[1].devices
    return devices


def _start_entry(
    path: Path, options: NightlyConfig, night: str, fleet: str | None, on: str | None
) -> Callable[[NightlyEntry, EntryTime], "subprocess.Popen[bytes]"]:
    """Return a function that runs an entry of a night in a process of its own, with a log beside its records."""

    def start(entry: NightlyEntry, entry_time: EntryTime) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "autotune", "nightly", str(path), "--only", entry.key]
        for option, value in (("--fleet", fleet), ("--on", on)):
            command += [option, value] if value is not None else []
        log = find_entry_log(options, entry.key, night)
        log.parent.mkdir(parents=True, exist_ok=True)
        print_note(f"{entry.key}: {entry.ref}, budget {entry.budget}, log {log}")
        times = f"{entry_time.seconds} {entry_time.latest_seconds}"
        environment = {NIGHT_VARIABLE: f"{night} {times} {os.getpid()}"}
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal reaches the night, which passes it on
                env=os.environ | environment,
            )

    return start


def _print_result(night: NightRecord) -> None:
    print_note(f"{night.entry}: {night.verdict}{': ' if night.detail else ''}{night.detail}")


@contextlib.contextmanager
def _open_runner(entry: NightlyEntry, log_dir: Path) -> Iterator[StudyRunner]:
    print_note(f"{entry.key}: {entry.ref}, budget {entry.budget}")
    with contextlib.ExitStack() as stack, open_runner(entry, log_dir) as runner:
        if entry.on is not None:
            runner.listen(lambda text: print_note(f"{entry.key}: {text}"))
        if entry.on is None and NIGHT_VARIABLE in os.environ and isinstance(runner, LocalRunner):
            # the device of an entry with a class may be this machine: do not measure at the same time
            claim = functools.cache(lambda: stack.enter_context(lock_device(entry.device, print_note)))
            yield replace(runner, claim=claim)
        else:
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
        _print_result(night)
        if night.entry in self.trackers:
            tags = {"night": night.night, "verdict": night.verdict.value, "cause": ", ".join(night.causes)}
            self.trackers[night.entry].tag({f"autotune.nightly.{key}": value for key, value in tags.items() if value})
