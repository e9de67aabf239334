"""Measure a device: how fast it multiplies, copies and reaches its stores, and how much the same work varies on it."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.ir.costs import Costs, StoreCost
from autotune.measure.device.profile import DeviceProfile
from autotune.measure.device.this_device import cpu_flags, this_device
from autotune.runtime.stores import measured

SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the matrices: a product takes tens of milliseconds."""
COPIED_BYTES = {"cpu": 2**27, "cuda": 2**29}
"""More than any cache holds."""
PIECE_SECONDS = 0.02
"""Of a sample of noise, at least: shorter ones tell of the clock, not of the device."""
BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}
"""Flags of processors that compute in it; others go by way of float32."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where work is timed: the place of its tensors, how to wait for it, and by which clock."""

    kind: str
    place: str
    settle: Callable[[], object]
    """Until the device has done what it was given."""
    has_bfloat16: bool
    host: Callable[[int], Tensor]
    """So many bytes on the other side of the bus."""
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one piece of work, done."""
        self.settle()
        begun = self.clock()
        work()
        self.settle()
        return self.clock() - begun

    def median_seconds(self, work: Callable[[], object], patience: float = 0.5, fewest: int = 5) -> float:
        """Of a piece, after two unmeasured ones."""
        taken = [self.seconds(work) for _ in range(2 + fewest)][2:]
        while sum(taken) < patience:
            taken.append(self.seconds(work))
        return statistics.median(taken)


def bench(kind: str, cuda: Any = None) -> Bench:
    """The bench of this process's CPU or GPU. `cuda` stands for `torch.cuda`."""
    plain = partial(torch.zeros, dtype=torch.uint8)
    if kind == "cpu":
        return Bench("cpu", "cpu", lambda: None, bool(cpu_flags() & BFLOAT16), plain)
    cuda = cuda or torch.cuda
    bfloat16 = cuda.is_bf16_supported(including_emulation=False)
    return Bench("cuda", "cuda", cuda.synchronize, bfloat16, partial(plain, pin_memory=True))


def probe(kind: str, stores: Mapping[str, Path], on: Bench | None = None) -> DeviceProfile:
    """The profile of this device: some ten seconds, and up to twenty more for each store."""
    device = this_device(kind)
    on = on or bench(kind)
    found, apart = store_costs(stores, kind)
    return DeviceProfile(
        device=device,
        matmul_flops=matmul_flops(on),
        copy_bytes_per_second=copy_rates(on),
        noise_seconds=noise_seconds(on),
        stores=found,
        store_spread=apart,
        made=time.time(),
    )


def store_costs(stores: Mapping[str, Path], kind: str) -> tuple[dict[str, StoreCost], dict[str, float]]:
    """What each store does, measured twice: the second time, and by what part the two differ at most."""
    first, second = (measured(Costs((), ()), stores, kind).stores for _ in range(2))
    apart = {}
    for name, cost in second.items():
        rates = zip(_rates(first[name]), _rates(cost), strict=True)
        apart[name] = max(max(one, other) / min(one, other) for one, other in rates) - 1
    return second, apart


def matmul_flops(on: Bench, side: int | None = None) -> dict[str, float]:
    """Per dtype that the device itself computes in."""
    side = side or SIDE[on.kind]
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if on.has_bfloat16 else {})
    return {name: 2 * side**3 / on.median_seconds(_product(on, side, dtype)) for name, dtype in dtypes.items()}


def copy_rates(on: Bench, nbytes: int | None = None) -> dict[str, float]:
    """Bytes a second, one way."""
    nbytes = nbytes or COPIED_BYTES[on.kind]
    here, there = (torch.zeros(nbytes, dtype=torch.uint8, device=on.place) for _ in range(2))
    ways = {"memory": (there, here)}
    if on.kind == "cuda":
        host = on.host(nbytes)
        ways |= {"to device": (here, host), "from device": (host, here)}
    return {way: nbytes / on.median_seconds(partial(into.copy_, of)) for way, (into, of) in ways.items()}


def noise_seconds(on: Bench, seconds: float = 3.0, side: int | None = None, fewest: int = 5) -> tuple[float, ...]:
    """Samples of the same products of matrices, for so many seconds."""
    product = _product(on, side or SIDE[on.kind] // 2, torch.float32)
    once = on.median_seconds(product, patience=0.0, fewest=3)
    times = max(1, round(PIECE_SECONDS / once))

    def piece() -> None:
        for _ in range(times):
            product()

    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < fewest:
        taken.append(on.seconds(piece))
    return tuple(taken)


def _product(on: Bench, side: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    left = torch.full((side, side), 0.5, dtype=dtype, device=on.place)
    return partial(torch.mm, left, left, out=torch.empty_like(left))


def _rates(cost: StoreCost) -> tuple[float, ...]:
    return (
        cost.write_bytes_per_second,
        cost.read_bytes_per_second,
        cost.write_beside_read_bytes_per_second,
        cost.read_beside_write_bytes_per_second,
    )
