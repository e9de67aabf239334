"""Tensors that a worker keeps on disk."""

import os
from pathlib import Path

import pytest
import torch

from autotune.measure.worker.reference import Reference, Writer, digest
from autotune.runtime.arena import StepArena


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(64, 512, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(3000, 500).t(),
        torch.randn(2, 300_000, 2).permute(2, 1, 0),
        torch.randn(5, 6, 7).bfloat16().permute(2, 0, 1),
        torch.randn(10, 20)[2:5, 3:9],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(7)[::2],
        torch.randn(0, 3).t(),
        torch.tensor(3.0),
        torch.randn(5, 5, dtype=torch.complex64).t(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_the_hash_of_a_tensor_is_that_of_its_elements_in_logical_order_however_they_lie(tensor: torch.Tensor):
    assert digest(tensor) == digest(tensor.clone(memory_format=torch.contiguous_format))
    changed = tensor.clone(memory_format=torch.contiguous_format)
    if changed.numel():
        changed.view(-1)[-1] += 1
        assert digest(tensor) != digest(changed)


def test_a_conjugate_or_a_negative_by_a_flag_alone_is_hashed_and_written_by_its_values(tmp_path: Path):
    value = torch.randn(3, dtype=torch.complex64)
    flagged = {"conjugate": value.conj(), "negative": value.conj().imag}
    assert (flagged["conjugate"].is_conj(), flagged["negative"].is_neg()) == (True, True)
    writer = Writer(tmp_path)
    for name, tensor in flagged.items():
        writer.add(name, tensor)
    writer.close()
    reference = Reference(tmp_path)
    assert not reference.equals("conjugate", value)
    assert not reference.equals("negative", value.imag)
    for name, tensor in flagged.items():
        plain = tensor.resolve_conj().resolve_neg()
        assert reference.equals(name, plain)
        assert reference.equals(name, tensor)
        assert torch.equal(reference.load(name), plain)


def test_hashing_within_a_step_shifts_no_slot_of_its_arena():
    arena = StepArena()
    if not arena.works:
        pytest.skip("no g++")
    kept = torch.randn(256, 256).t()
    for number in range(4):
        with arena.step():
            first = torch.empty(1 << 16)
            if number == 3:
                digest(kept)
            second = torch.empty(1 << 18)
            del first, second
    assert (arena.bytes > 0, arena.misses) == (True, 0)
