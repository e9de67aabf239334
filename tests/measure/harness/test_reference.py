"""Tensors that a worker keeps on disk."""

import os
from pathlib import Path

import pytest
import torch

from autotune.measure.worker.reference import Reference, Writer


def cached_bytes(path: Path) -> int:
    """Return the bytes of a file's first MiB that the page cache holds."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(2**20)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            pytest.skip(f"this file system has no reads of the cache alone: {error.strerror}")


def test_an_evicted_file_leaves_the_page_cache_and_its_tensors_come_back(tmp_path: Path):
    tensor = torch.arange(2**19, dtype=torch.float32)
    writer = Writer(tmp_path)
    writer.add("weight", tensor)
    writer.close()
    assert cached_bytes(tmp_path / "tensors.bin") == 2**20
    reference = Reference(tmp_path)
    assert torch.equal(reference.load("weight"), tensor)
    reference.evict()
    if (tmp_path / "tensors.bin").stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("a tmpfs has no disk to drop its pages to")
    assert cached_bytes(tmp_path / "tensors.bin") == 0
    assert torch.equal(reference.load("weight"), tensor)
