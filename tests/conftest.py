import gc
import os

from hypothesis import settings

# two workers on two cores: torch's threads, waiting for each other, would take many times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

# shared cores: a slow example says nothing about the code
settings.register_profile("autotune", deadline=None, derandomize=True)
settings.load_profile("autotune")

# importing and collecting makes half a million objects that stay; to look through them again and again takes seconds
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
