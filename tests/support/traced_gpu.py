"""Capture steps on a GPU that is not there: fake tensors of the device `cuda`, on a build of PyTorch without CUDA."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from autotune.capture.fake.fake_workload import capture_on_fake_tensors
from autotune.capture.program import Program
from autotune.native import Library
from autotune.workloads.workload import Workload

TORCH = Path(torch.__file__).parent


@cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("traced_gpu.cpp")
    links = (f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}")
    flags = ("-O0", f"-I{TORCH / 'include'}", *links)
    library = Library("traced-gpu", (source,), flags, torch.__version__).load("no GPU can be traced")
    assert library is not None
    return library


@contextmanager
def traced_gpu() -> Iterator[None]:
    """Let fake tensors be on `cuda` inside the context; its random generator has no state."""
    if torch.cuda.is_available():
        yield
        return
    library = _library()
    library.pretend(1)
    try:
        with (
            mock.patch.object(torch.cuda, "get_rng_state", return_value=torch.zeros(16, dtype=torch.uint8)),
            mock.patch.object(torch.cuda, "set_rng_state"),
        ):
            yield
    finally:
        library.pretend(0)


def capture_on_gpu(make: Callable[[], Workload]) -> Program:
    """Return the captured step of a workload whose tensors `make` creates on `cuda`."""
    with traced_gpu():
        return capture_on_fake_tensors(make, "made-up")
