"""The heap that an arena's first steps allocate from, asked through torch."""

import itertools
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.runtime.arena import StepArena

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the arena is compiled with g++")

KIB, MIB = 2**10, 2**20
SIZES = st.one_of(st.integers(1, 64), st.integers(1, 3 * 4096), st.sampled_from([48 * KIB, 192 * KIB, MIB, MIB + 1]))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 7)), min_size=1, max_size=60))
def test_tensors_lie_apart_aligned_and_keep_their_content(requests: list[tuple[int, int]]) -> None:
    alive: list[tuple[torch.Tensor, int]] = []
    with StepArena().step():
        for number, (size, drop) in enumerate(requests):
            tensor = torch.empty(size, dtype=torch.uint8).fill_(number % 251)
            assert tensor.data_ptr() % 64 == 0
            alive.append((tensor, number % 251))
            if drop < len(alive) and drop % 2:
                gone, byte = alive.pop(drop)
                assert (gone == byte).all()
                del gone
            spans = sorted(span(tensor) for tensor, _ in alive)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all((tensor == byte).all() for tensor, byte in alive)  # the step is over, they live on


STEP = """
    import ctypes, random
    from pathlib import Path
    import torch
    from autotune.runtime.arena import StepArena

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    def step():
        # as an LSTM's: tensors of 49 KB, some of four times that, most die young, in any order
        order, alive, live, most = random.Random(0), [], 0, 0
        for number in range(3000):
            size = 192 * 1024 if number % 5 == 0 else 48 * 1024
            alive.append(torch.empty(size, dtype=torch.uint8).fill_(1))
            live += size
            most = max(most, live)
            while len(alive) > 100 + number % 400:
                live -= alive.pop(order.randrange(len(alive))).nbytes
        return most

    with StepArena().step():
        step()
    ctypes.CDLL(None).malloc_trim(0)
    rest, data = status("VmRSS"), status("VmData")
    Path("/proc/self/clear_refs").write_text("5")
    with StepArena().step():
        most = step()
    print(most, status("VmHWM") - rest, status("VmRSS") - rest, status("VmData") - data)
"""


def test_a_step_is_charged_what_lives_and_keeps_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STEP)], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    most, charged, kept, data = map(int, done.stdout.split())
    assert charged - kept == pytest.approx(most, rel=0.01)  # the kernel counts up to 64 pages late
    assert kept < 2 * MIB  # Python's own: the recorded events, the random numbers
    assert data < 8 * MIB  # a limit on data is not used up by what has been given back
