"""Meters measure the highest memory use of a process while they are open; they only read.

To add one: a file with a class that implements `Meter`, and a line in `METERS`. `autotune.testing.meter_contract` has the
tests that every meter must pass.

In: nothing; a meter is opened around steps.
Out: the peak bytes of a process.
Read first: this file.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from autotune.errors import ConfigError
from autotune.measure.meters.cgroup import CgroupMeter
from autotune.measure.meters.cuda import CudaMeter
from autotune.measure.meters.nvml import NvmlMeter
from autotune.measure.meters.rss import RssMeter
from autotune.measure.meters.store_bytes import StoreBytesMeter

ReadStoreBytes = Callable[[], int]
"""A function that returns the bytes of the open stores in tmpfs and page cache."""


class Meter(Protocol):
    """A context manager that measures memory; `peak_bytes` is the highest since entry and stays readable after exit."""

    @property
    def name(self) -> str:
        """Source of the bytes, for records."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Highest bytes since the meter was entered."""
        ...

    @property
    def unsure_bytes(self) -> int:
        """Part of the peak in bytes that other processes may have caused; see `Repeated`."""
        ...

    def now_bytes(self) -> int:
        """Return the bytes in use."""
        ...

    def unavailable_reason(self) -> str:
        """Return the reason why this meter cannot read here; empty if it can."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Repeated:
    """The peak of equal steps, computed from one reading of each, where a reading may be too high.

    No step used less than the certain part of any reading. No step used more than the lowest reading, unless page cache
    both grew and shrank within that reading.
    """

    def __init__(self) -> None:
        self._certain_bytes = 0
        self._lowest_bytes: int | None = None

    def add(self, meter: Meter, *, same: bool = True) -> None:
        """Add a reading of an equal step, or with `same=False` of earlier steps, which may have used more."""
        self._certain_bytes = max(self._certain_bytes, meter.peak_bytes - meter.unsure_bytes)
        if same:
            self._lowest_bytes = min(meter.peak_bytes, self._lowest_bytes or meter.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the steps read so far."""
        return max(self._certain_bytes, self._lowest_bytes or 0)


METERS: dict[str, Callable[[ReadStoreBytes], Meter]] = {
    "cgroup": lambda _: CgroupMeter(),
    "rss": RssMeter,
    "held": StoreBytesMeter,
    "cuda": lambda _: CudaMeter(),
    "nvml": lambda _: NvmlMeter(),
}
"""A factory of each meter, by the meter's name."""

_BEST = {"cpu": ("cgroup", "rss"), "cuda": ("cuda",)}


def best_meter(kind: str, store_bytes: ReadStoreBytes = lambda: 0) -> Meter:
    """Return the most accurate meter that can read here, for a device kind: `cpu` or `cuda`.

    Raises ConfigError where no meter can read.
    """
    reasons = []
    for name in _BEST.get(kind, ()):
        meter = METERS[name](store_bytes)
        if not (reason := meter.unavailable_reason()):
            return meter
        reasons.append(f"{name}: {reason}")
    raise ConfigError(
        f"no meter reads the memory of a {kind!r} device here ({'; '.join(reasons) or 'known: cpu, cuda'})"
    )
