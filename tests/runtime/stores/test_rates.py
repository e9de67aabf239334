"""What the probe measures, on disks of known speed."""

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune.errors import StoreError
from autotune.runtime.stores import STORES, SwapStore, probe
from autotune.runtime.stores.probe import measure_contention, measure_speed
from autotune.runtime.stores.slab_file import padded

MIB = 2**20


def slowed(call, bytes_per_second: float):  # type: ignore[no-untyped-def]
    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        moved = call(file, buffers, offset)
        time.sleep(moved / bytes_per_second)
        return moved

    return slow


def test_the_probe_sees_which_direction_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = partial(STORES["ssd"], pwritev=slowed(os.pwritev, 400 * MIB), preadv=slowed(os.preadv, 50 * MIB))
    monkeypatch.setitem(STORES, "ssd", opener)
    cost = measure_speed("ssd", tmp_path, nbytes=4 * MIB, repeats=1)
    # sleeps are never short, so these are bounds, not timings
    assert cost.write_bytes_per_second <= 400 * MIB
    assert cost.read_bytes_per_second <= 50 * MIB
    assert cost.write_beside_read_bytes_per_second <= 400 * MIB
    assert cost.read_beside_write_bytes_per_second <= 50 * MIB
    assert min(cost.read_bytes_per_second, cost.read_beside_write_bytes_per_second) > 0


def test_the_probe_sees_what_a_transfer_takes_beyond_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(file: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.003)
        return os.pwritev(file, buffers, offset)

    monkeypatch.setitem(STORES, "ssd", partial(STORES["ssd"], pwritev=late))
    assert measure_speed("ssd", tmp_path, nbytes=4 * MIB, repeats=1).latency_seconds >= 0.003


def test_the_probe_leaves_nothing_and_reports_the_pool(tmp_path: Path) -> None:
    cost = measure_speed("ssd", tmp_path, nbytes=4 * MIB, repeats=1)
    assert list(tmp_path.iterdir()) == []
    assert cost.holds_memory == (cost.pool_bytes == 0)


def test_the_probe_names_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no directory"):
        measure_speed("ssd", tmp_path / "nowhere")


@pytest.mark.parametrize(("beside_seconds", "beside_rate", "ratios"), [(3.0, 2.0, (3.0, 4.0)), (0.5, 16.0, (1.0, 1.0))])
def test_contention_is_the_ratio_to_the_time_alone_and_never_a_gain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beside_seconds: float,
    beside_rate: float,
    ratios: tuple[float, float],
) -> None:
    now, products, is_transferring = 0.0, 0, False

    def multiply(*matrices: torch.Tensor) -> None:
        nonlocal now, products
        now += beside_seconds if is_transferring else 1.0
        products += 1

    @contextlib.contextmanager
    def running(*arguments: object) -> Iterator["Future[float]"]:
        nonlocal is_transferring
        rate, before, is_transferring = Future[float](), products, True
        yield rate
        is_transferring = False
        rate.set_result(beside_rate if products > before else 8.0)

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=lambda seconds: None)
    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(probe, "_running", running)
    monkeypatch.setattr(torch, "mm", multiply)
    assert measure_contention("ssd", tmp_path, seconds=6.0, repeats=2) == ratios


def test_the_probe_of_a_tiny_disk_takes_at_most_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def opener(directory: Path, slots: dict[int, int], device: str) -> SwapStore:
        opened.append(sum(map(padded, slots.values())))
        return plain(directory, slots, device)

    plain = STORES["ssd"]
    monkeypatch.setitem(STORES, "ssd", opener)
    monkeypatch.setattr(probe, "free_bytes", lambda directory: MIB)
    measure_speed("ssd", tmp_path, repeats=1)
    assert MIB // 4 < opened[0] <= MIB // 2
    monkeypatch.setattr(probe, "free_bytes", lambda directory: 1000)
    with pytest.raises(StoreError, match=r"1000 B free in .* are too few to measure it"):
        measure_speed("ssd", tmp_path)
