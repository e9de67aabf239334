"""Meters: each tells the most memory that a process took while it was open. They only read.

To add one: a file with a class that keeps the `Meter` contract, and a line in `METERS`.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from autotune.errors import ConfigError
from autotune.meters.cgroup import CgroupMeter
from autotune.meters.cuda import CudaMeter
from autotune.meters.held import HeldMeter
from autotune.meters.nvml import NvmlMeter
from autotune.meters.rss import RssMeter

Held = Callable[[], int]
"""Bytes that the open stores hold in tmpfs and page cache."""


class Meter(Protocol):
    """A context manager: `peak_bytes` is the highest since it was entered, and stays readable after its end."""

    @property
    def name(self) -> str:
        """What a record says of where its bytes come from."""
        ...

    @property
    def peak_bytes(self) -> int: ...

    def now_bytes(self) -> int: ...

    def why_not(self) -> str:
        """Why this meter cannot read here; empty if it can."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


METERS: dict[str, Callable[[Held], Meter]] = {
    "cgroup": lambda _: CgroupMeter(),
    "rss": RssMeter,
    "held": HeldMeter,
    "cuda": lambda _: CudaMeter(),
    "nvml": lambda _: NvmlMeter(),
}
"""Every meter by name."""

_BEST = {"cpu": ("cgroup", "rss"), "cuda": ("cuda",)}


def best_meter(kind: str, held: Held = lambda: 0) -> Meter:
    """The most truthful meter that can read here, for a device kind: `cpu` or `cuda`."""
    reasons = []
    for name in _BEST.get(kind, ()):
        meter = METERS[name](held)
        if not (reason := meter.why_not()):
            return meter
        reasons.append(f"{name}: {reason}")
    raise ConfigError(
        f"no meter reads the memory of a {kind!r} device here ({'; '.join(reasons) or 'known: cpu, cuda'})"
    )
