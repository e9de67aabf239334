"""Freed memory returns to the kernel also where another malloc is preloaded."""

import ctypes.util
import os
import subprocess
import sys
import textwrap

import pytest

MIB = 2**20
RESIDENT_AFTER_FREE = """
    import os, sys
    from pathlib import Path
    from autotune.runtime import malloc

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if sys.argv[1] == "always_release":
        malloc.always_release()
    before = resident_bytes()
    blocks = [bytearray(2**20) for _ in range(128)]
    del blocks
    if sys.argv[1] == "trim":
        malloc.trim()
    print(resident_bytes() - before)
"""


@pytest.mark.parametrize("release", ["trim", "always_release"])
@pytest.mark.parametrize("name", ["tcmalloc_minimal", "jemalloc"])
def test_a_preloaded_malloc_returns_freed_memory_to_the_kernel(name: str, release: str) -> None:
    library = ctypes.util.find_library(name)
    if library is None:
        pytest.skip(f"there is no lib{name}")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RESIDENT_AFTER_FREE), release],
        env={**os.environ, "LD_PRELOAD": library}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 16 * MIB
