"""The Optuna study beside the file of trials."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from autotune.errors import ConfigError
from autotune.records.trial import Trial, TrialKind
from autotune.study import trial_store
from autotune.study.trial_store import StudyIdentity, TrialStore
from autotune.study.verdicts.ranking import Rules

IDENTITY = StudyIdentity("some", ("time_ratio",), {}, optuna.samplers.RandomSampler())


def test_a_broken_database_is_set_aside_and_one_that_cannot_be_made_is_its_own_error(tmp_path: Path) -> None:
    broken = tmp_path / "optuna.db"
    broken.write_text("no database" * 200)
    assert trial_store._open(broken, IDENTITY).trials == []
    assert (tmp_path / "optuna.db.broken").read_text() == "no database" * 200
    with pytest.raises(OperationalError, match="unable to open database file"):
        trial_store._open(tmp_path / "absent" / "optuna.db", IDENTITY)


CALLS: dict[str, Callable[[TrialStore, optuna.Trial], object]] = {
    "ask": lambda store, request: store.ask(),
    "suggest": lambda store, request: store.suggest(request),
    "reserve": lambda store, request: store.reserve(),
    "retry": lambda store, request: store.retry(request),
    "record_winner": lambda store, request: store.record_winner(Trial(3, TrialKind.CONFIRM, "w", "d")),
}
"""Calls that write to the database, beside that of a trial's end."""


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
def test_a_database_that_another_writer_locks_is_a_config_error_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[TrialStore, optuna.Trial], object]
) -> None:
    store = TrialStore(tmp_path, IDENTITY, {"order": {"traced": {}}}, Rules(1000, 0, None, 0.0), [])
    request = store.ask()
    storage: Any = store.study._storage
    # without waits for the lock: SQLite's are five seconds, and Optuna tries five times
    sqlalchemy.event.listen(
        storage._backend.engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=0")
    )
    storage._backend.engine.dispose()
    monkeypatch.setattr("optuna.storages._rdb.storage.time", SimpleNamespace(sleep=lambda _: None))
    with closing(sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        expected = r"optuna\.db: cannot be written \(.*database is locked\).* then: autotune resume "
        with pytest.raises(ConfigError, match=expected):
            call(store, request)
