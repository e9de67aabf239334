"""The choice of MLflow's store, and errors of a store that cannot be used."""

from typing import Any

import pytest

from autotune.report.mlflow_store import connect, relocate_artifacts, tracking_uri


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
    with pytest.raises(OSError, match=r"No module named 'psycopg'; pip install 'autotune-training\[postgres\]'"):
        connect("postgresql+psycopg:///runs", tmp_path)
