"""A cluster of Ray on this machine, which the tests of a module share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two devices with the resource `fake` on one node; skipped where Ray is not installed."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'autotune-training[fleet]'")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    ray.init(
        num_cpus=1,
        num_gpus=0,
        resources={"fake": 2},
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()
