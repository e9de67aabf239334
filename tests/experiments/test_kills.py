"""The sessions that the experiment kills: their workers answer what a study asks today."""

from pathlib import Path

import pytest

from autotune.records.measurement import Outcome
from autotune.records.trial import load_trials
from tests.support.checkout import run_python

SESSIONS = """
import sys
from pathlib import Path
from experiments.benchmarks.kills.sessions import import_everything
import_everything(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_study_and_a_night_with_simulated_workers_end_by_themselves(tmp_path: Path):
    done = run_python("-c", SESSIONS, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    studies = list(tmp_path.rglob("trials.jsonl"))
    assert len(studies) > 1
    for path in studies:
        outcomes = {trial.measurement.outcome for trial in load_trials(path) if trial.measurement}
        assert Outcome.OK in outcomes <= {Outcome.OK, Outcome.OVER_BUDGET}, path
