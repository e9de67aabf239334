"""optuna-dashboard over all studies of `runs/`: copies in memory, so that nothing done on its pages reaches a run.

Every run has a file of its own, which optuna-dashboard could show one at a time; and 0.21 does not know the constraints of
Optuna 5: plans over their budget would lead. In a copy a study has its run's name and such trials are pruned.
"""

import argparse
import sqlite3
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState

from dashboards.found import Broken, attempt, called, look

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

PAUSE_SECONDS = 5.0


class Copies:
    """Studies of a directory's runs in one storage, brought up to date by `refresh`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.storage = optuna.storages.InMemoryStorage()
        self._seen: dict[Path, float] = {}
        """When each file had changed last that was copied."""

    def refresh(self) -> list[Broken]:
        """Copy what has changed since; what could not be read, once for each change."""
        broken = []
        for run_dir in look(self.root).runs:
            path = run_dir / "optuna.db"
            changed = path.stat().st_mtime if path.exists() else 0.0
            if changed == self._seen.get(run_dir, 0.0):
                continue
            self._seen[run_dir] = changed
            found = attempt(path, self._copy)
            broken += [found] if isinstance(found, Broken) else []
        return broken

    def _copy(self, path: Path) -> None:
        """From a snapshot, so that the study that is being written waits for nobody."""
        with tempfile.TemporaryDirectory(prefix="autotune-") as directory:
            snapshot = Path(directory) / "optuna.db"
            source = f"{path.resolve().as_uri()}?mode=ro"
            with closing(sqlite3.connect(source, uri=True)) as live, closing(sqlite3.connect(snapshot)) as copy:
                live.backup(copy)
            storage = optuna.storages.RDBStorage(f"sqlite:///{snapshot}")
            for number, name in enumerate(optuna.get_all_study_names(storage)):
                study = optuna.load_study(study_name=name, storage=storage)
                # a run that was gone on with in another search space has a second study
                self._add(study, called(path.parent, self.root) + (f" ({number + 1})" if number else ""))
            storage.engine.dispose()

    def _add(self, study: optuna.Study, name: str) -> None:
        copy = optuna.create_study(
            storage=self.storage, study_name=name, directions=study.directions, load_if_exists=True
        )
        if names := study.metric_names:
            copy.set_metric_names(names)
        for key, value in study.user_attrs.items():
            copy.set_user_attr(key, value)
        for trial in study.get_trials(deepcopy=False)[len(copy.get_trials(deepcopy=False)) :]:
            if not trial.state.is_finished():
                return  # numbers are to stay the study's own
            copy.add_trial(_shown(trial))


def _shown(trial: "FrozenTrial") -> "FrozenTrial":
    """Pruned where a constraint is violated."""
    if any(violation > 0 for violation in trial.constraints.values()) and trial.state is TrialState.COMPLETE:
        trial.state = TrialState.PRUNED
    return trial


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    from optuna_dashboard import run_server

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    copies = Copies(given.runs)

    def keep_up() -> None:
        while True:
            for one in copies.refresh():
                print(f"{one.path}: {one.why}", file=sys.stderr, flush=True)
            time.sleep(PAUSE_SECONDS)

    threading.Thread(target=keep_up, daemon=True).start()
    run_server(copies.storage, host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
