"""A cluster of Ray with two nodes that have a device each, on this machine: what a study keeps when one of them dies."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.fleet import ray as ray_engine
from autotune.fleet.channel import Channel, Reach
from autotune.fleet.messages import FleetCall, FleetReply, MeasureCall, OpenDevice, PrepareCall, code_identity
from autotune.fleet.remote_runner import RemoteRunner
from autotune.records.measurement import Outcome
from autotune.testing.fake_far_end import OPENER
from autotune.testing.fake_runner import FakeRunner
from autotune.testing.runner_contract import make_config, run_study, without_times

pytestmark = pytest.mark.slow
STORE_BYTES = 80 << 20
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 200, "health_check_failure_threshold": 3}
"""Settings by which the head notices a dead node in a second."""


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A head without a device and two nodes with one each; Ray's object that removes nodes."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'autotune-training[fleet]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        head = {
            "num_cpus": 1,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_system_config": {"worker_niceness": 0, **QUICK},
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, resources={"fake": 1}, object_store_memory=STORE_BYTES)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def find_node(cluster: Any, worker: int) -> Any:
    """Return the node whose daemon started a worker."""
    fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
    (node,) = [
        node
        for node in cluster.worker_nodes
        if int(fields[1]) in [info.process.pid for info in node.all_processes["raylet"]]
    ]
    return node


@dataclass
class Watched:
    """Channel that notes its requests, and tells of each before it is sent."""

    channel: Channel
    calls: list[FleetCall]
    before: Callable[[FleetCall], None]

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        self.calls.append(call)
        self.before(call)
        return self.channel.ask(call, report)

    def close(self) -> None:
        self.channel.close()


def test_a_node_that_dies_while_it_measures_costs_that_trial_and_one_prepare(nodes: Any, tmp_path: Path):
    calls: list[FleetCall] = []
    removals: list[threading.Timer] = []

    def die(node: Any, worker: int) -> None:
        nodes.remove_node(node, allow_graceful=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    def remove(call: FleetCall) -> None:
        if isinstance(call, MeasureCall) and not removals and runner.facts is not None:
            worker = runner.facts.pid
            node = find_node(nodes, worker)
            os.kill(worker, signal.SIGSTOP)  # the first measurement is the one that is lost, however late its node dies
            removals.append(threading.Timer(0.1, die, (node, worker)))
            removals[0].start()

    config = make_config(tmp_path).model_dump(mode="json")
    request = OpenDevice(code_identity(), "fake", config, environment={"FAKE_SECONDS": "0.2"})
    reach = Reach("fake", tmp_path, resource="fake", opener=OPENER)
    runner = RemoteRunner(lambda report: Watched(ray_engine.open_channel(reach, report), calls, remove), request)
    here = run_study(tmp_path / "here", FakeRunner())
    there = run_study(tmp_path / "there", runner)
    removals[0].join()
    assert [without_times(trial) for trial in there] == [without_times(trial) for trial in here]
    (lost,) = [trial.measurement for trial in there if trial.measurement and trial.measurement.lost_nodes]
    assert (lost.outcome, lost.lost_nodes, runner.lost) == (Outcome.OK, (os.uname().nodename,), 1)
    assert [type(call) for call in calls].count(PrepareCall) == 2
    assert len(nodes.worker_nodes) == 1
