"""Choose, open and relocate the store that MLflow logs to."""

import hashlib
import logging
import os
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from autotune.errors import ConfigError, install_command
from autotune.records.run_dir import RunsDir, lock_file
from autotune.records.tracking_address import check_address, sqlite_address, sqlite_file
from autotune.report.tracking.deadline import CALL_LIMIT_SECONDS, LimitedClient, call_within

if TYPE_CHECKING:
    from mlflow import MlflowClient

_logger = logging.getLogger(__name__)

MLFLOW_VIEW = "?workflowType=machine_learning"
"""End of an address in MLflow 3, which otherwise opens its pages for language models."""

BEST_TRIAL = "autotune.best_trial"
"""Tag of a study's run with the number of its best trial; a study without one has no plan."""
ENVIRONMENT = {
    # set_terminated prints to stdout, which is reserved for the command's output
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # an unreachable server must cost seconds, not the minutes of the default eight attempts
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Environment variables of MLflow, set unless the user set them."""


def tracking_uri(runs: Path, configured: str | None = None) -> str:
    """Return the configured URI, else `MLFLOW_TRACKING_URI`, else that of an SQLite file for all runs of a directory."""
    return configured or os.environ.get("MLFLOW_TRACKING_URI") or _sqlite_uri(runs)


def relocate_artifacts(runs: Path) -> None:
    """Update the artifact addresses in the SQLite store of `runs` to the directory's current place.

    MLflow stores absolute addresses, which are wrong after the directory is moved. An unreadable store is left unchanged,
    with a warning.
    """
    if not RunsDir(runs).mlflow_store.exists():
        return
    root = (runs.resolve() / "mlruns").as_uri()
    # names that end with a digest are experiments of other directories, which log here
    moved = (
        "name LIKE 'autotune.%' AND artifact_location LIKE 'file:%/mlruns' AND artifact_location <> :root "
        f"AND name NOT GLOB '*.{8 * '[0-9a-f]'}'"
    )
    try:
        with closing(sqlite3.connect(RunsDir(runs).mlflow_store, timeout=10)) as store, store:
            store.execute(
                "UPDATE runs SET artifact_uri = :root || '/' || run_uuid || '/artifacts' "
                f"WHERE experiment_id IN (SELECT experiment_id FROM experiments WHERE {moved})",
                {"root": root},
            )
            store.execute(f"UPDATE experiments SET artifact_location = :root WHERE {moved}", {"root": root})
    except sqlite3.DatabaseError as error:
        _logger.warning("%s/mlflow.db cannot be read, so artifacts may not be found (%s)", runs, error)


def connect(uri: str, runs: Path) -> "MlflowClient":
    """Return a client of the store at `uri`; raise one of `store_errors` if it does not answer.

    An SQLite store in `runs` is created under a lock: two processes that create one file at once would both fail.
    """
    set_environment()
    is_own = uri == _sqlite_uri(runs)
    if not is_own:  # blanks and quotes of a path are no mistake
        try:
            check_address(uri)
        except ConfigError as error:
            raise OSError(str(error)) from None
    _check_reachable(uri)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # both set their levels when they are imported
        logging.getLogger(name).setLevel(logging.WARNING)
    is_local = uri.startswith(("sqlite:", "sqlite+"))
    try:
        seconds = None if is_local else CALL_LIMIT_SECONDS
        client = call_within(seconds, MlflowClient, tracking_uri=uri, registry_uri=uri)
    except ModuleNotFoundError as error:
        raise OSError(f"{error}; install the PostgreSQL driver: {install_command('postgres')}") from None
    if not is_local:
        return cast("MlflowClient", LimitedClient(client))
    runs.mkdir(parents=True, exist_ok=True)
    with lock_file(RunsDir(runs).mlflow_lock, wait=True):
        client.search_experiments(max_results=1)
        if is_own:
            relocate_artifacts(runs)
    return client


def experiment_name(workload: str, device_key: str, device_class: str | None = None) -> str:
    """Return the experiment of a workload on a device, and of the class that a fleet has it in.

    It has no slashes: MLflow's pages show only the last part of a path.

    >>> experiment_name("models/net.py:tiny", "cpu-x")
    'autotune.models-net.py-tiny.cpu-x'
    """
    place = device_key if device_class is None else f"{device_key}@{device_class}"
    return f"autotune.{re.sub(r'[^A-Za-z0-9_.-]+', '-', workload).strip('-.')}.{place}"


def find_experiment(client: "MlflowClient", name: str, uri: str, runs: Path) -> tuple[str, str]:
    """Return name and id of the experiment of this name for a directory of runs; create it where there is none.

    The name gets a digest where another directory has the experiment, and a number where it was deleted: MLflow keeps the
    name of a deleted experiment, and accepts no run for it.
    """
    # a server chooses the artifacts' place; a database that is used directly needs one beside it
    location = None if uri.startswith("http") else (runs.resolve() / "mlruns").as_uri()
    existing = client.get_experiment_by_name(name)
    is_taken = existing is not None and existing.artifact_location not in (None, location)
    # a database of another directory: it updates the artifacts' places of experiments without a digest to its own
    file, near = sqlite_file(uri), RunsDir(runs.resolve()).mlflow_store
    is_foreign = existing is None and file is not None and file.resolve() != near
    digest, plain, number = "", name, 1
    if location is not None and (is_taken or is_foreign):
        digest = f".{hashlib.sha256(location.encode()).hexdigest()[:8]}"
        existing = client.get_experiment_by_name(name := f"{plain}{digest}")
    while existing is not None and existing.lifecycle_stage == "deleted":
        number += 1
        existing = client.get_experiment_by_name(name := f"{plain}.{number}{digest}")
    if existing is not None:
        return name, str(existing.experiment_id)
    return name, client.create_experiment(name, artifact_location=location)


def store_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that an unreachable or broken MLflow store raises."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError, ValueError


def set_environment() -> None:
    """Set `ENVIRONMENT` where the user did not; call it before MLflow is imported."""
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})


def _sqlite_uri(runs: Path) -> str:
    return sqlite_address(RunsDir(runs.resolve()).mlflow_store)


def _check_reachable(uri: str) -> None:
    """Raise OSError if nothing listens at a PostgreSQL address: MLflow would retry ten times, for minutes."""
    address = urlsplit(uri)
    if address.scheme.startswith("postgresql") and address.hostname:
        socket.create_connection((address.hostname, address.port or 5432), timeout=5).close()
