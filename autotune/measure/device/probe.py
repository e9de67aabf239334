"""Measure a device: rates of multiplying, copying and reaching its stores, and the noise of repeated work."""

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
from autotune.runtime.stores import measure_stores

SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices, by device kind; a product takes tens of milliseconds."""
COPIED_BYTES = {"cpu": 2**27, "cuda": 2**29}
"""Bytes of a copy, by device kind: more than any cache holds."""
PIECE_SECONDS = 0.02
"""Least duration of a noise sample; shorter ones measure the clock instead of the device."""
BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16"}
"""Flags of processors that compute in bfloat16; others convert to float32."""


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """Timer of work on a device."""

    kind: str
    place: str
    """Torch device of the tensors."""
    synchronize: Callable[[], object]
    """Function that waits until the device has finished its work."""
    has_bfloat16: bool
    host: Callable[[int], Tensor]
    """Function that allocates a number of bytes on the host, for copies over the bus."""
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the duration of one piece of work, until the device has finished it."""
        self.synchronize()
        begin = self.clock()
        work()
        self.synchronize()
        return self.clock() - begin

    def median_seconds(self, work: Callable[[], object], patience: float = 0.5, fewest: int = 5) -> float:
        """Return the median duration of a piece of work, after two unmeasured ones."""
        samples = [self.seconds(work) for _ in range(2 + fewest)][2:]
        total = sum(samples)
        while total < patience:
            samples.append(self.seconds(work))
            total += samples[-1]
        return statistics.median(samples)


def device_timer(kind: str, cuda: Any = None) -> DeviceTimer:
    """Return the timer of this process's CPU or GPU; `cuda` replaces `torch.cuda` in tests."""
    plain = partial(torch.zeros, dtype=torch.uint8)
    if kind == "cpu":
        return DeviceTimer("cpu", "cpu", lambda: None, bool(cpu_flags() & BFLOAT16), plain)
    cuda = cuda or torch.cuda
    bfloat16 = cuda.is_bf16_supported(including_emulation=False)
    return DeviceTimer("cuda", "cuda", cuda.synchronize, bfloat16, partial(plain, pin_memory=True))


def probe(kind: str, stores: Mapping[str, Path], timer: DeviceTimer | None = None) -> DeviceProfile:
    """Measure the profile of this device; it takes ten seconds, and up to twenty more for each store.

    Raises ConfigError for a store that takes no tensors of the device.
    """
    device = this_device(kind)
    timer = timer or device_timer(kind)
    costs, spreads = store_costs(stores, kind)
    return DeviceProfile(
        device=device,
        matmul_flops=matmul_flops(timer),
        copy_bytes_per_second=copy_rates(timer),
        noise_seconds=noise_seconds(timer),
        stores=costs,
        store_spread=spreads,
        made=time.time(),
    )


def store_costs(stores: Mapping[str, Path], kind: str) -> tuple[dict[str, StoreCost], dict[str, float]]:
    """Measure each store twice; return the second costs, and the largest relative difference of the two."""
    first, second = (measure_stores(Costs((), ()), stores, kind).stores for _ in range(2))
    spreads = {}
    for name, cost in second.items():
        rates = zip(_rates(first[name]), _rates(cost), strict=True)
        spreads[name] = max(max(pair) / min(pair) for pair in rates) - 1
    return second, spreads


def matmul_flops(timer: DeviceTimer, side: int | None = None) -> dict[str, float]:
    """Return the operations per second of a matrix product, by dtype that the device computes in."""
    side = side or SIDE[timer.kind]
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if timer.has_bfloat16 else {})
    return {name: 2 * side**3 / timer.median_seconds(_product(timer, side, dtype)) for name, dtype in dtypes.items()}


def copy_rates(timer: DeviceTimer, nbytes: int | None = None) -> dict[str, float]:
    """Return the bytes per second of copies, by direction."""
    nbytes = nbytes or COPIED_BYTES[timer.kind]
    near, other = (torch.zeros(nbytes, dtype=torch.uint8, device=timer.place) for _ in range(2))
    ways = {"memory": (other, near)}
    if timer.kind == "cuda":
        host = timer.host(nbytes)
        ways |= {"to device": (near, host), "from device": (host, near)}
    return {way: nbytes / timer.median_seconds(partial(target.copy_, source)) for way, (target, source) in ways.items()}


def noise_seconds(
    timer: DeviceTimer, seconds: float = 3.0, side: int | None = None, fewest: int = 5
) -> tuple[float, ...]:
    """Return times of equal pieces of matrix products, sampled for so many seconds."""
    product = _product(timer, side or SIDE[timer.kind] // 2, torch.float32)
    once = timer.median_seconds(product, patience=0.0, fewest=3)
    times = max(1, round(PIECE_SECONDS / once))

    def piece() -> None:
        for _ in range(times):
            product()

    samples: list[float] = []
    while sum(samples) < seconds or len(samples) < fewest:
        samples.append(timer.seconds(piece))
    return tuple(samples)


def _product(timer: DeviceTimer, side: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    left = torch.full((side, side), 0.5, dtype=dtype, device=timer.place)
    return partial(torch.mm, left, left, out=torch.empty_like(left))


def _rates(cost: StoreCost) -> tuple[float, ...]:
    return (
        cost.write_bytes_per_second,
        cost.read_bytes_per_second,
        cost.write_beside_read_bytes_per_second,
        cost.read_beside_write_bytes_per_second,
    )
