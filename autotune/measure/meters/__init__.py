"""Meters: each tells the most memory that a process took while it was open. They only read.

To add one: a file with a class that keeps the `Meter` contract, and a line in `METERS`.

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
from autotune.measure.meters.held import HeldMeter
from autotune.measure.meters.nvml import NvmlMeter
from autotune.measure.meters.rss import RssMeter

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

    @property
    def unsure_bytes(self) -> int:
        """How much of the peak may be none of this process's doing; see `Repeated`."""
        ...

    def now_bytes(self) -> int: ...

    def why_not(self) -> str:
        """Why this meter cannot read here; empty if it can."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Repeated:
    """The peak of steps that all take the same, from a reading of each, where a reading may tell too much.

    No step took less than the surest part of any reading, and none more than the lowest reading, as far as page cache did not
    both come and go within one.
    """

    def __init__(self) -> None:
        self._sure = 0
        self._lowest: int | None = None

    def add(self, meter: Meter, *, same: bool = True) -> None:
        """One more reading, of such steps or (`same=False`) of what went before them and may have taken more."""
        self._sure = max(self._sure, meter.peak_bytes - meter.unsure_bytes)
        if same:
            self._lowest = min(meter.peak_bytes, self._lowest or meter.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self._sure, self._lowest or 0)


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
