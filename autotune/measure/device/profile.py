"""A device's profile: what it is, and how fast it was measured to multiply, to copy and to reach its stores."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.ir.costs import StoreCost
from autotune.records.device import Device
from autotune.records.json_codec import read_whole, write_whole

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Rates are medians of repeated work; the noise is told by raw samples."""

    device: Device
    matmul_flops: dict[str, float]
    """Per dtype that the device itself computes in, operations of a product of square matrices a second."""
    copy_bytes_per_second: dict[str, float]
    """`memory` within the device's own, `to device` and `from device` over a GPU's bus."""
    noise_seconds: tuple[float, ...]
    """Of the same work, again and again."""
    stores: dict[str, StoreCost] = field(default_factory=dict)
    store_spread: dict[str, float] = field(default_factory=dict)
    """Per store, by what part its rates differed when they were measured a second time."""
    made: float = 0.0
    """Seconds since the epoch."""
    schema: int = SCHEMA

    @property
    def noise(self) -> float:
        """What two measurements of this device may differ by for no reason, as a part of them."""
        return spread(self.noise_seconds)


def spread(samples: Sequence[float]) -> float:
    """How far the middle eight tenths of samples lie apart, over their median; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(samples)


def place(runs: Path, device: Device) -> Path:
    """Where the profile of a device is kept: one for its silicon, whatever the name, the driver or torch."""
    return runs / "devices" / f"{device.key}.json"


def find(runs: Path, device: Device) -> DeviceProfile | None:
    """The profile that was made of a device, if one was."""
    path = place(runs, device)
    return read(path) if path.exists() else None


def write(path: Path, profile: DeviceProfile) -> None:
    """Write whole or not at all."""
    write_whole(path, profile, what="profile")


def read(path: Path) -> DeviceProfile:
    """Read and validate; ConfigError names the file and the first thing wrong in it."""
    return read_whole(
        DeviceProfile, path, schema=SCHEMA, what="device profile", again="make one with autotune device probe"
    )
