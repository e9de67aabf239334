"""The profile of a device: its identity, and its measured rates of multiplying, copying and reaching its stores."""

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
    """Measured rates of a device. Rates are medians of repeated work; the noise is kept as raw samples."""

    device: Device
    matmul_flops: dict[str, float]
    """Operations per second of a product of square matrices, by dtype that the device computes in."""
    copy_bytes_per_second: dict[str, float]
    """Copy rate: `memory` within the device's memory, `to device` and `from device` over a GPU's bus."""
    noise_seconds: tuple[float, ...]
    """Times of the same work, repeated."""
    stores: dict[str, StoreCost] = field(default_factory=dict)
    store_spread: dict[str, float] = field(default_factory=dict)
    """Relative difference of two measurements of a store's rates, by store."""
    made: float = 0.0
    """Seconds since the epoch."""
    schema: int = SCHEMA

    @property
    def noise(self) -> float:
        """Relative difference that two measurements of this device may have by chance."""
        return spread(self.noise_seconds)


def spread(samples: Sequence[float]) -> float:
    """Return the width of the middle 80 % of samples over their median; 0 for fewer than two.

    >>> spread([2.0, 2.0, 2.0])
    0.0
    """
    if len(samples) < 2:
        return 0.0
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(samples)


def profile_path(runs: Path, device: Device) -> Path:
    """Return the file of a device's profile; it depends on the silicon, not on the driver or torch."""
    return runs / "devices" / f"{device.key}.json"


def find(runs: Path, device: Device) -> DeviceProfile | None:
    """Return the stored profile of a device; None if there is none."""
    path = profile_path(runs, device)
    return read(path) if path.exists() else None


def write(path: Path, profile: DeviceProfile) -> None:
    """Write the profile whole or not at all."""
    write_whole(path, profile, what="profile")


def read(path: Path) -> DeviceProfile:
    """Read and validate a profile; ConfigError names the file and the first fault in it."""
    return read_whole(
        DeviceProfile, path, schema=SCHEMA, what="device profile", again="make one with autotune device probe"
    )
