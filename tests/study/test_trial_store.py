"""The Optuna study beside the file of trials."""

from pathlib import Path

import optuna
import pytest
from sqlalchemy.exc import OperationalError

from autotune.study import trial_store
from autotune.study.trial_store import StudyIdentity


def test_a_broken_database_is_set_aside_and_one_that_cannot_be_made_is_its_own_error(tmp_path: Path) -> None:
    identity = StudyIdentity("some", ("time_ratio",), {}, optuna.samplers.RandomSampler())
    broken = tmp_path / "optuna.db"
    broken.write_text("no database" * 200)
    assert trial_store._open(broken, identity).trials == []
    assert (tmp_path / "optuna.db.broken").read_text() == "no database" * 200
    with pytest.raises(OperationalError, match="unable to open database file"):
        trial_store._open(tmp_path / "absent" / "optuna.db", identity)
