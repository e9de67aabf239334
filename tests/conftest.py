import gc
import os
import sys

import pytest
from hypothesis import settings

# two workers on two cores: torch's threads, waiting for each other, would take many times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # a capture makes a hundred thousand objects and leaves few cycles
    gc.enable()
