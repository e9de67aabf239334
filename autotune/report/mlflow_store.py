"""Where MLflow keeps what is logged: which store that is, how it is reached, and that it finds its files."""

import fcntl
import logging
import os
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mlflow import MlflowClient

_logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # set_terminated prints to stdout, where the command line's answer goes
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # a server that is gone must cost seconds, not the minutes that eight attempts take
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""What this process tells MLflow, where the user said nothing else."""


def tracking_uri(runs: Path, given: str | None = None) -> str:
    """The one that was given, else the user's `MLFLOW_TRACKING_URI`, else one SQLite file for all runs of a directory."""
    return given or os.environ.get("MLFLOW_TRACKING_URI") or _own_uri(runs)


def rehome(runs: Path) -> None:
    """Let MLflow find its artifacts where `runs/` lies now: it keeps their addresses whole, those of a place it was moved from
    too. A store that cannot be read is left as it is.
    """
    if not (runs / "mlflow.db").exists():
        return
    root = (runs.resolve() / "mlruns").as_uri()
    moved = "name LIKE 'autotune.%' AND artifact_location LIKE 'file:%/mlruns' AND artifact_location <> :root"
    try:
        with closing(sqlite3.connect(runs / "mlflow.db", timeout=10)) as store, store:
            store.execute(
                "UPDATE runs SET artifact_uri = :root || '/' || run_uuid || '/artifacts' "
                f"WHERE experiment_id IN (SELECT experiment_id FROM experiments WHERE {moved})",
                {"root": root},
            )
            store.execute(f"UPDATE experiments SET artifact_location = :root WHERE {moved}", {"root": root})
    except sqlite3.DatabaseError as error:
        _logger.warning("%s/mlflow.db: artifacts may not be found, it cannot be read (%s)", runs, error)


def connect(uri: str, runs: Path) -> "MlflowClient":
    """A client of a store that is there, one of `faults` else; two processes that begin one SQLite file at once would both
    fail.
    """
    settle_environment()
    _knock(uri)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # which set their levels when they are imported
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    except ModuleNotFoundError as error:
        raise OSError(f"{error}; pip install 'autotune[postgres]' brings PostgreSQL's") from None
    if not uri.startswith("sqlite:"):
        return client
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / "mlflow.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        client.search_experiments(max_results=1)
        if uri == _own_uri(runs):
            rehome(runs)
    return client


def faults() -> tuple[type[Exception], ...]:
    """What is raised where MLflow's store does not answer."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def settle_environment() -> None:
    """Before MLflow is imported."""
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})


def _own_uri(runs: Path) -> str:
    return f"sqlite:///{runs.resolve()}/mlflow.db"


def public(uri: str) -> str:
    """Without the password that it may hold."""
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1:***@", uri)


def _knock(uri: str) -> None:
    """OSError where nobody listens: MLflow would ask a database that is gone ten times, for minutes."""
    at = urlsplit(uri)
    if at.scheme.startswith("postgresql") and at.hostname:
        socket.create_connection((at.hostname, at.port or 5432), timeout=5).close()
