"""Addresses of MLflow servers: no password or token is shown, and what cannot be taken apart is refused."""

from pathlib import Path

import pytest
from sqlalchemy import make_url

from autotune.errors import ConfigError
from autotune.records.config import load_config
from autotune.records.tracking_address import (
    check_address,
    has_secret,
    mask_secrets,
    sqlite_address,
    sqlite_file,
    without_credentials,
)

SECRET = [
    "postgresql://u:S3CRET@h/db",
    "postgresql://u:S3C/S3CRET@h/db",
    "postgresql://u:S3CRET@S3CRET@h/db",
    "postgresql://h/db?password=S3CRET",
    "postgresql://h/db?user=u&password=S3CRET@S3CRET",
    "postgresql://h/db?pass%77ord=S3CRET&S3CRET",
    "postgresql://u:?S3CRET@h/db",
    "http://S3CRET@h:5000",
    "https://:S3CRET@h:5000",
    "http://h:5000/?token=S3CRET",
    "http://h:5000/#access_token=S3CRET",
]


@pytest.mark.parametrize("uri", SECRET)
def test_no_secret_is_shown_or_taken_into_a_config(uri: str) -> None:
    text = mask_secrets(f"no answer from {uri}, 'or {uri}'")
    assert "S3C" not in text
    assert "***" in text
    assert "S3C" not in without_credentials(uri)
    assert has_secret(uri)
    with pytest.raises(ConfigError) as error:
        load_config("resnet18", overrides={"tracking_uri": uri})
    assert "S3C" not in str(error.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://server:5000",
        "postgresql://me@server/runs",
        "postgresql+psycopg://server:5432/runs?sslmode=require&user=me",
        "sqlite:////runs/mlflow.db",
        "databricks",
        "http://server:5000/#/experiments/1/runs/a?workflowType=machine_learning",
    ],
)
def test_an_address_without_a_secret_is_shown_whole(uri: str) -> None:
    check_address(uri)
    assert mask_secrets(uri) == uri
    assert load_config("resnet18", overrides={"tracking_uri": uri}).tracking_uri == uri


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("postgresql://h:abc/db", "the port is no number"),
        ("http://h:70000", "the port is no number"),
        ("postgresql://u:S3C/R@ET@h/db", "cannot be told apart; write %2F"),
        ("postgresql://u:S3C@RET@h/db", "cannot be told apart; write %2F"),
        ("postgresql://u:S3C RET@h/db", "a blank or a quote"),
    ],
)
def test_an_address_that_cannot_be_taken_apart_is_refused_without_its_secret(uri: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        check_address(uri)
    assert "S3C" not in str(error.value)
    assert "RET" not in str(error.value)


@pytest.mark.parametrize("name", ["plain", "two words", "50%41", "what?", "{x}", "größer", "it's", "a@b#c=d"])
def test_the_address_of_an_sqlite_file_names_it_whatever_characters_its_path_has(name: str) -> None:
    for path in (Path("/runs") / name / "mlflow.db", Path(name) / "mlflow.db"):
        address = sqlite_address(path)
        assert make_url(address).database == str(path)
        assert address.format(SCHEMA_VERSION=1) == address, "Optuna fills in its schema's version"
        assert sqlite_file(address) == path


@pytest.mark.parametrize("address", ["http://server:5000", "postgresql://me@server/runs", "databricks", "sqlite://"])
def test_another_address_names_no_file(address: str) -> None:
    assert sqlite_file(address) is None
