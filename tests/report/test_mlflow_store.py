"""The choice of MLflow's store, and errors of a store that cannot be used."""

import contextlib
import socket
import threading
from typing import Any

import pytest

from autotune.report.mlflow_store import connect, relocate_artifacts, store_errors, tracking_uri
from autotune.report.tracking import deadline


def test_the_address_given_comes_before_the_users_and_that_before_our_file(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert tracking_uri(tmp_path) == "http://tracker:5000"
    assert tracking_uri(tmp_path, "postgresql://me@server/runs") == "postgresql://me@server/runs"


def test_a_store_that_is_no_database_is_left_as_it_is(tmp_path, capfd):
    (tmp_path / "mlflow.db").write_text("not a database at all, but long enough to be read as one" * 20)
    before = (tmp_path / "mlflow.db").read_bytes()
    relocate_artifacts(tmp_path)
    relocate_artifacts(tmp_path / "nowhere")
    assert (tmp_path / "mlflow.db").read_bytes() == before
    assert "artifacts may not be found" in capfd.readouterr().err


def test_postgresql_without_its_driver_is_told_what_brings_it(tmp_path, monkeypatch):
    def missing(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'")

    monkeypatch.setattr("mlflow.MlflowClient", missing)
    with pytest.raises(
        OSError,
        match=r"No module named 'psycopg'; install the PostgreSQL driver: pip install 'autotune-training\[postgres\]'",
    ):
        connect("postgresql+psycopg:///runs", tmp_path)


class Dripping:
    """A server that sends headers, then one byte after another without an end."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not self._ended.wait(0.05):
                connection.sendall(b" ")

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


def test_a_server_that_drips_bytes_ends_the_call_and_is_not_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, "CALL_LIMIT_SECONDS", 0.3)
    with Dripping() as uri:
        client = connect(uri, tmp_path)
        with pytest.raises(deadline.UnansweredError, match="no complete answer within"):
            client.get_experiment_by_name("x")


@pytest.mark.parametrize("uri", ["postgresql://h:abc/db", "postgresql://u:S3C/R@ET@h/db"])
def test_an_address_that_cannot_be_taken_apart_is_an_error_of_the_store(uri, tmp_path):
    with pytest.raises(store_errors()) as error:
        connect(uri, tmp_path)
    assert "S3C" not in str(error.value)
