"""Serve optuna-dashboard over copies of all studies below `runs/`, so that no action on its pages changes a run.

optuna-dashboard shows one storage, and every run has its own. Version 0.21 also ignores Optuna 5's constraints, so that
plans over the budget would rank first. In a copy, a study has its run's name, and such trials are pruned. Pruned are also
plans that were stopped early, and trials whose value is lower than the confirmed winner's: the confirmation decides. The
run's own study keeps them complete, because Optuna's samplers ignore what a pruned trial measured.
"""

import argparse
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from autotune.records.measurement import Outcome
from autotune.records.run_dir import RunDir, find_active_process
from autotune.study.trial_store import WINNER
from dashboards.discovery import Unreadable, find_runs, relative_name, try_read

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

PAUSE_SECONDS = 5.0
UNFINISHED = "unfinished"
"""User attribute of a failed trial that stands for one without a result."""


class StudyCopies:
    """Copies of all runs' studies in one storage, updated by `refresh`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = optuna.storages.InMemoryStorage()
        self._copied: dict[Path, tuple[float, bool]] = {}
        """Modification time of each run's file when it was last copied, and true if a process worked in the run."""
        self._names: dict[Path, set[str]] = {}
        """Names of the copies of each run's studies."""

    def refresh(self) -> list[Unreadable]:
        """Copy the studies that changed; return those that cannot be read, once per change.

        The copies of a run that was deleted are deleted, too.
        """
        unreadable = []
        runs = find_runs(self.root).runs
        for run_dir in self._copied.keys() - set(runs):
            del self._copied[run_dir]
            for name in self._names.pop(run_dir, ()):
                with suppress(KeyError):  # somebody deleted the copy on a page
                    optuna.delete_study(study_name=name, storage=self.storage)
        for run_dir in runs:
            path = RunDir(run_dir).optuna
            is_active = find_active_process(run_dir) is not None
            changed = (path.stat().st_mtime if path.exists() else 0.0, is_active)
            if changed == self._copied.get(run_dir, (0.0, is_active)):
                continue
            self._copied[run_dir] = changed
            result = try_read(path, partial(self._copy, is_active=is_active))
            unreadable += [result] if isinstance(result, Unreadable) else []
        return unreadable

    def _copy(self, path: Path, *, is_active: bool) -> None:
        """Copy a run's studies from a snapshot, so that a running study does not wait for this process."""
        with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
            snapshot = RunDir(Path(directory)).optuna
            source = f"{path.resolve().as_uri()}?mode=ro"
            with closing(sqlite3.connect(source, uri=True)) as original, closing(sqlite3.connect(snapshot)) as copy:
                original.backup(copy)
            storage = optuna.storages.RDBStorage(f"sqlite:///{snapshot}")
            for number, name in enumerate(optuna.get_all_study_names(storage)):
                study = optuna.load_study(study_name=name, storage=storage)
                # a run resumed with another search space has a second study
                suffix = f" ({number + 1})" if number else ""
                title = relative_name(path.parent, self.root) + suffix
                self._add(study, title, is_active=is_active)
                self._names.setdefault(path.parent, set()).add(title)
            storage.engine.dispose()

    def _add(self, study: optuna.Study, name: str, *, is_active: bool) -> None:
        winner = study.user_attrs.get(WINNER)
        if name in optuna.get_all_study_names(self.storage):
            earlier = optuna.load_study(study_name=name, storage=self.storage)
            # the state of a finished trial cannot change
            if earlier.user_attrs.get(WINNER) != winner or not _continues(study, earlier):
                with suppress(KeyError):  # somebody deleted the copy on a page
                    optuna.delete_study(study_name=name, storage=self.storage)
        copy = optuna.create_study(
            storage=self.storage, study_name=name, directions=study.directions, load_if_exists=True
        )
        if names := study.metric_names:
            copy.set_metric_names(names)
        for key, value in study.user_attrs.items():
            copy.set_user_attr(key, value)
        trials = study.get_trials(deepcopy=False)
        is_single = len(study.directions) == 1
        limit = trials[winner].value if is_single and winner is not None and winner < len(trials) else None
        missing = trials[len(copy.get_trials(deepcopy=False)) :]
        for trial in missing[: _count_ready(missing, is_active=is_active)]:
            if trial.state.is_finished():
                copy.add_trial(_prune(trial, None if trial.number == winner else limit))
            else:  # the copy must keep the study's trial numbers
                copy.add_trial(optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={UNFINISHED: True}))


def _count_ready(missing: "list[FrozenTrial]", *, is_active: bool) -> int:
    """Return the number of trials to copy now, from the start of those that a copy lacks.

    While a process works in the run, it may finish every trial: then the first unfinished one ends them. Otherwise the
    last finished one does. An unfinished trial before it may be the repeat of an interrupted one, which no session ran.
    """
    finished = [trial.state.is_finished() for trial in missing]
    if is_active:
        return len(list(takewhile(bool, finished)))
    return max((count for count, is_finished in enumerate(finished, 1) if is_finished), default=0)


def _continues(study: optuna.Study, copy: optuna.Study) -> bool:
    """Return whether a study has the trials of its copy, and is not a new one of a run of the same name."""
    trials, copied = study.get_trials(deepcopy=False), copy.get_trials(deepcopy=False)
    return len(trials) >= len(copied) and all(map(_is_copied, trials, copied))


def _is_copied(trial: "FrozenTrial", copied: "FrozenTrial") -> bool:
    if UNFINISHED in copied.user_attrs:
        return not trial.state.is_finished()
    return trial.datetime_start == copied.datetime_start


def _prune(trial: "FrozenTrial", limit: float | None) -> "FrozenTrial":
    """Mark a trial as pruned if it violates a constraint, was stopped early, or ranks before the winner's value `limit`."""
    violates = any(violation > 0 for violation in trial.constraints.values())
    stopped = trial.user_attrs.get("outcome") == Outcome.STOPPED_EARLY
    outranks = limit is not None and trial.values is not None and trial.values[0] <= limit
    if (violates or stopped or outranks) and trial.state is TrialState.COMPLETE:
        trial.state = TrialState.PRUNED
    return trial


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    from optuna_dashboard import run_server

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    copies = StudyCopies(arguments.runs)

    def refresh_forever() -> None:
        while True:
            for unreadable in copies.refresh():
                print(f"{unreadable.path}: {unreadable.reason}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)

    threading.Thread(target=refresh_forever, daemon=True).start()
    run_server(copies.storage, host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
