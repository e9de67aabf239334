"""The real harness at the far end of each engine: the graph, the bits and the bytes of a harness here."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from autotune.fleet import ENGINES
from autotune.fleet.channel import Reach
from autotune.fleet.local import open_harness
from autotune.fleet.messages import DevicePromise, OpenDevice, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.ir.plan import Plan
from autotune.records.config import Config, load_config
from autotune.records.measurement import Outcome
from autotune.testing.runner_contract import wait_for_death
from tests.measure.harness.test_run import WORKLOADS

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("cluster")]


def configured(directory: Path) -> Config:
    """Return the config of a step whose tensors are as large as others', with fewer ops to profile in every process."""
    return load_config(f"{WORKLOADS}:wide", arguments={"depth": "3"}, overrides={"samples": 2, "runs": str(directory)})


def make_runner(engine: str, directory: Path) -> RemoteRunner:
    config = configured(directory)
    request = OpenDevice(code_identity(), "here", config.model_dump(mode="json"), DevicePromise("cpu"))
    reach = Reach("here", directory, command=(sys.executable, "-m", "autotune", "serve"), resource="fake")
    return RemoteRunner(lambda report: ENGINES[engine](reach, report), request, directory / "class.json")


def kill_far_end(runner: RemoteRunner, workers: list[int]) -> None:
    """Kill the far end that measures, after a note of the processes that it started."""
    assert runner.facts is not None
    pid = runner.facts.pid
    children = Path(f"/proc/{pid}/task").glob("*/children")
    workers.extend(int(number) for path in children for number in path.read_text().split())
    os.kill(pid, signal.SIGKILL)


def test_every_engine_measures_what_this_process_does_and_a_killed_far_end_leaves_no_worker_and_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with open_harness(configured(tmp_path), tmp_path / "logs") as here:
        prepared = here.prepare()
        plan = Plan.traced(prepared.graph)
        expected = here.measure(plan, budget_bytes=10**12)
    for engine in sorted(ENGINES.keys() - {"local"}):  # which opens that harness
        runner = make_runner(engine, tmp_path)
        there = runner.prepare()
        result = runner.measure(plan, budget_bytes=10**12)
        assert there.graph == prepared.graph
        assert there.device.key == prepared.device.key
        assert (result.outcome, result.max_error, result.verified) == (Outcome.OK, 0.0, expected.verified)
        assert result.step_peak_bytes == pytest.approx(expected.step_peak_bytes, rel=0.01)
        assert runner.conditions().environment["kernel"] == os.uname().release
        assert runner.facts is not None
        assert runner.facts.nice == 0
        assert "OMP_NUM_THREADS" not in {*runner.facts.environment} - {*os.environ}
        if engine != "ray":  # the contract kills far ends of each engine, without a harness behind them
            runner.close()
            continue
        runner.renew()  # the next measurement starts processes, which takes longer than the kill waits
        workers: list[int] = []
        threading.Timer(0.5, kill_far_end, (runner, workers)).start()
        elsewhere = runner.measure(plan, budget_bytes=10**12)
        runner.close()
        assert workers
        assert all(wait_for_death(pid, 2.0) for pid in workers)
        assert (elsewhere.outcome, elsewhere.lost_nodes, runner.lost) == (Outcome.OK, (os.uname().nodename,), 1)
