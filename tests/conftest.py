import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.checkout import ONE_ROUND

if TYPE_CHECKING:
    from autotune.runtime.executor import Executor

LONG = ("system", "study", "api", "fleet")
"""Folders below `tests/` with tests that run whole commands for a minute or more."""

# two workers on two cores: torch's threads, waiting for each other, would take many times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a script starts its background jobs with SIGINT ignored, and tests send it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# every child process would compile the whole package again, half a second each
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# shared cores: a slow example says nothing about the code
settings.register_profile("autotune", deadline=None, derandomize=True)
settings.load_profile("autotune")

# importing and collecting makes half a million objects that stay; to look through them again and again takes seconds
gc.disable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_garbage() -> None:
    """Exclude what earlier modules left from garbage collections, which tests of measurements do often."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> "list[Executor]":
    """A list that grows by the executor of each step that runs."""
    from autotune.runtime.executor import Executor  # deferred: torch takes seconds to import

    runs: list[Executor] = []
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, inputs: (runs.append(self), run(self, inputs))[1])
    return runs


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies of this process measure each plan once and re-measure it once."""
    for (module, constant), value in ONE_ROUND.items():
        monkeypatch.setattr(f"{module}.{constant}", value)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Directory of compiled kernels that all tests of a session share, in all its processes.

    The first compilation in a directory takes 15 s more, for a precompiled header.
    """
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "compile_cache"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def compiled_kernels(compile_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile kernels, and load them, in the session's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(compile_cache))
    return compile_cache


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the folders of the longest tests: none of them should begin last, while the other worker is idle."""
    items.sort(key=lambda item: item.path.relative_to(config.rootpath).parts[1] not in LONG)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # a capture makes a hundred thousand objects and leaves few cycles
    gc.enable()
