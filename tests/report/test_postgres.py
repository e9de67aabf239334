"""Tracking in a real PostgreSQL, which the test starts: several studies at once, and a server that goes away meanwhile."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import ABSENT, Postgres, find_programs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STUDY = """
import sys
from pathlib import Path
from autotune.api.launch import run_tracked
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import make_config
name = sys.argv[2]
storage, trials = sys.argv[4] or None, int(sys.argv[5])
config = make_config(Path(sys.argv[1]), tracking_uri=sys.argv[3], optuna_storage=storage, trials=trials)
run_tracked(config, FakeRunner(), Path(sys.argv[1]) / name, lambda event: print(event, file=sys.stderr))
"""


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    programs = find_programs()
    if programs is None:
        pytest.skip(ABSENT)
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'autotune-training[postgres]'")
    directory = Path("/tmp") / f"autotune-postgres-{os.getpid()}"  # the user postgres cannot enter pytest's directories
    directory.mkdir(mode=0o755)
    server = Postgres(programs, directory)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory)


def start_study(directory: Path, name: str, uri: str, storage: str = "", trials: int = 3) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", STUDY, str(directory), name, uri, storage, str(trials)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def logged(uri: str, directory: Path) -> dict[str, int]:
    """Return the number of logged trials of each study, by the study's name."""
    from autotune.report.mlflow_store import connect

    client = connect(uri, directory)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    parents = {
        run.info.run_id: run.info.run_name.split()[0] for run in runs if "mlflow.parentRunId" not in run.data.tags
    }
    counts = dict.fromkeys(parents.values(), 0)
    for run in runs:
        if (parent := run.data.tags.get("mlflow.parentRunId")) is not None:
            counts[parents[parent]] += 1
    return counts


def test_studies_of_several_processes_share_a_database_and_survive_its_restart(postgres: Postgres, tmp_path: Path):
    first = start_study(tmp_path, "first", postgres.uri)  # creates the tables
    _, told = first.communicate(timeout=300)
    assert first.returncode == 0, told
    both = [start_study(tmp_path, name, postgres.uri) for name in ("second", "third")]
    for study in both:
        _, told = study.communicate(timeout=300)
        assert study.returncode == 0, told
    counts = logged(postgres.uri, tmp_path)
    assert set(counts) == {"first", "second", "third"}
    assert len(set(counts.values())) == 1
    assert min(counts.values()) >= 3

    postgres.stop()
    alone = start_study(tmp_path, "fourth", postgres.uri)
    _, told = alone.communicate(timeout=300)
    assert alone.returncode == 0, told
    assert "not logged to postgresql://autotune@127.0.0.1" in told
    postgres.start()
    time.sleep(0.1)
    command = [sys.executable, "-m", "autotune", "report", str(tmp_path / "fourth"), "--log"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    counts = logged(postgres.uri, tmp_path)
    assert counts["fourth"] == counts["first"]


def test_optuna_studies_are_copied_to_the_database_also_after_an_outage(postgres: Postgres, tmp_path: Path):
    import optuna

    uri = postgres.create_database("optuna")

    def run(trials: int) -> str:
        study = start_study(tmp_path, "copied", f"sqlite:///{tmp_path}/mlflow.db", uri, trials)
        _, told = study.communicate(timeout=300)
        assert study.returncode == 0, told
        return told

    def count() -> int:
        summaries = optuna.get_all_study_summaries(uri)
        return sum(summary.n_trials for summary in summaries if ".copied." in summary.study_name)

    records = tmp_path / "copied" / "trials.jsonl"
    assert f"trials copied to {uri}" in run(3)
    assert count() == len(records.read_bytes().splitlines())
    postgres.stop()
    assert f"not copied to {uri}" in run(6)
    postgres.start()
    assert f"trials copied to {uri}" in run(8)
    assert count() == len(records.read_bytes().splitlines())
