"""The probe on a clock that is made up: rates are work over time, and a GPU is waited for."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.errors import ConfigError
from autotune.ir.costs import Costs, StoreCost
from autotune.measure.device import probe as probing
from autotune.measure.device import this_device as devices
from autotune.measure.device.probe import (
    DeviceTimer,
    copy_rates,
    device_timer,
    matmul_flops,
    noise_seconds,
    probe,
    store_costs,
)
from autotune.records.device import Device


class FakeGpu:
    """A device whose clock goes on by `seconds` when what it was given is waited for, and only then."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.settled, self.now = itertools.cycle(seconds or (0.25,)), 0, 0.0

    def synchronize(self) -> None:
        self.settled += 1
        if self.settled % 2 == 0:  # every first wait is for what was there before
            self.now += next(self.seconds)

    def timer(self, *, bfloat16: bool = True) -> DeviceTimer:
        host = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)  # noqa: E731
        return DeviceTimer("cuda", "cpu", self.synchronize, bfloat16, host, lambda: self.now)


def test_a_rate_is_work_over_the_time_until_the_device_is_done() -> None:
    flops = matmul_flops(FakeGpu(0.25).timer(), side=8)
    assert flops == {"float32": 2 * 8**3 / 0.25, "bfloat16": 2 * 8**3 / 0.25}
    assert copy_rates(FakeGpu(0.5).timer(), nbytes=64) == {"memory": 128, "to device": 128, "from device": 128}


def test_a_device_without_bfloat16_has_no_rate_of_it() -> None:
    assert set(matmul_flops(FakeGpu().timer(bfloat16=False), side=8)) == {"float32"}


def test_the_first_two_pieces_are_not_measured_and_one_slow_piece_does_not_count() -> None:
    gpu = FakeGpu(9.0, 9.0, 1.0, 1.0, 7.0, 1.0, 1.0)
    assert gpu.timer().median_seconds(lambda: None, patience=0.0) == 1.0
    assert gpu.now == 29.0  # and no more was asked for


def test_noise_is_told_as_raw_samples_of_pieces_long_enough_for_the_clock() -> None:
    assert noise_seconds(FakeGpu(0.25).timer(), seconds=1.0, side=8) == (0.25,) * 5
    samples = noise_seconds(FakeGpu(0.2, 0.3).timer(), seconds=3.0, side=8)
    assert {round(sample, 6) for sample in samples} == {0.2, 0.3}
    assert sum(samples) >= 3.0
    products = []
    on = FakeGpu(0.001).timer()
    counting = lambda *_: lambda: products.append(1)  # noqa: E731
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(probing, "_product", counting)
        noise_seconds(on, seconds=0.0, side=8)
    assert len(products) == 2 + 3 + 5 * 20  # a product of a millisecond, twenty to a sample


def test_a_gpus_bench_waits_for_it_and_asks_for_bfloat16_of_its_own() -> None:
    asked: list[Any] = []
    cuda = SimpleNamespace(
        synchronize=lambda: asked.append("synchronize"),
        is_bf16_supported=lambda including_emulation: asked.append(including_emulation) or True,
    )
    on = device_timer("cuda", cuda)
    assert (on.place, on.has_bfloat16, asked) == ("cuda", True, [False])
    on.seconds(lambda: asked.append("work"))
    assert asked == [False, "synchronize", "work", "synchronize"]


@pytest.mark.parametrize(("flags", "has"), [({"avx2"}, False), ({"avx2", "amx_bf16"}, True), ({"bf16"}, True)])
def test_a_cpu_has_bfloat16_where_its_flags_say_so(monkeypatch: pytest.MonkeyPatch, flags: set[str], has: bool) -> None:
    monkeypatch.setattr(probing, "cpu_flags", lambda: frozenset(flags))
    assert device_timer("cpu").has_bfloat16 is has


def test_stores_are_measured_twice_and_what_the_two_differ_by_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = iter([StoreCost(2e9, 1e9, 1e9, 1e9), StoreCost(2e9, 1.25e9, 1e9, 0.8e9)])
    monkeypatch.setattr(probing, "measure_stores", lambda costs, stores, kind: Costs((), (), {"ssd": next(passes)}))
    found, apart = store_costs({"ssd": tmp_path}, "cpu")
    assert found["ssd"].read_bytes_per_second == 1.25e9
    assert apart == {"ssd": pytest.approx(0.25)}


def test_a_gpus_profile_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = Device("cuda", "NVIDIA H100", 80 * 2**30, 132, "2.13.0", "CUDA 13.0")
    monkeypatch.setattr(probing, "this_device", lambda kind: gpu)
    monkeypatch.setattr(probing, "SIDE", {"cuda": 16})
    monkeypatch.setattr(probing, "COPIED_BYTES", {"cuda": 64})
    cost = StoreCost(25e9, 24e9, 20e9, 20e9)
    monkeypatch.setattr(
        probing, "measure_stores", lambda costs, stores, kind: Costs((), (), dict.fromkeys(stores, cost))
    )
    profile = probe("cuda", {"host": tmp_path}, FakeGpu(0.25).timer())
    assert profile.device == gpu
    assert set(profile.matmul_flops) == {"float32", "bfloat16"}
    assert set(profile.copy_bytes_per_second) == {"memory", "to device", "from device"}
    assert (profile.stores, profile.store_spread, profile.noise) == ({"host": cost}, {"host": 0.0}, 0.0)
    assert sum(profile.noise_seconds) >= 3.0


@pytest.mark.slow
def test_this_cpu_is_probed_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probing, "SIDE", {"cpu": 64})
    monkeypatch.setattr(probing, "COPIED_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(probing, "PIECE_SECONDS", 1e-4)
    monkeypatch.setattr(probing, "noise_seconds", lambda timer: noise_seconds(timer, seconds=0.0))
    profile = probe("cpu", {})
    assert profile.device == devices.this_device("cpu")
    assert min(*profile.matmul_flops.values(), *profile.copy_bytes_per_second.values(), *profile.noise_seconds) > 0
    assert set(profile.copy_bytes_per_second) == {"memory"}


def test_a_store_of_another_kind_of_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no tensors of device cpu"):
        probe("cpu", {"host": tmp_path})
