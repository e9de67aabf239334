"""Find the cause of a regression in what changed since the last good night."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.study.verdicts.statistics import percent

BUSY = 0.2
"""Share of all cores that others keep busy more than they did, from which a machine is not as quiet as it was."""
SLOWER_MACHINE = 0.1
"""Share by which plain eager itself is slower than it was, from which the machine is not what it was."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a night ran on: enough to say afterwards what changed."""

    code: dict[str, str] = field(default_factory=dict)
    """The repository's commit and uncommitted changes, autotune's version, the graph's digest."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions: kernel, driver, Python, packages."""
    device: dict[str, str] = field(default_factory=dict)
    """Silicon, memory, cores: what it is."""
    busy: float = 0.0
    """Share of all cores that others kept busy before anything of ours ran."""
    clock_mhz: float | None = None
    baseline_seconds: float | None = None
    """Of a plain eager step."""


class Cause(StrEnum):
    """What a regression comes from."""

    STALE = "plan stale"
    CODE = "code"
    ENVIRONMENT = "environment"
    DEVICE = "device state"


def cause(now: Conditions, before: Conditions | None) -> tuple[list[Cause], str]:
    """What changed since the last good night, the likeliest first, and in words. By elimination it is the device."""
    if before is None:
        return [Cause.DEVICE], "no good night to compare with"
    told = {
        Cause.DEVICE: _device(now, before),
        Cause.ENVIRONMENT: differences(now.environment, before.environment),
        Cause.CODE: differences(now.code, before.code),
    }
    # another machine explains whatever it shows; a busy one does not explain away a changed version
    order = [Cause.CODE, Cause.ENVIRONMENT, Cause.DEVICE]
    if now.device != before.device:
        order = [Cause.DEVICE, Cause.ENVIRONMENT, Cause.CODE]
    causes = [one for one in order if told[one]]
    if not causes:
        return [Cause.DEVICE], "code, packages and silicon are as in the last good night"
    return causes, "; ".join(part for one in causes for part in told[one])


def differences(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """`torch 2.12.0 -> 2.13.0` for everything that is not as it was."""
    names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def _device(now: Conditions, before: Conditions) -> list[str]:
    found = differences(now.device, before.device)
    if now.busy > before.busy + BUSY:
        found.append(f"cores busy with other work {100 * before.busy:.0f} % -> {100 * now.busy:.0f} %")
    if now.clock_mhz and before.clock_mhz and now.clock_mhz < 0.9 * before.clock_mhz:
        found.append(f"clock {before.clock_mhz:.0f} -> {now.clock_mhz:.0f} MHz")
    if now.baseline_seconds and before.baseline_seconds:
        slower = now.baseline_seconds / before.baseline_seconds
        if slower > 1 + SLOWER_MACHINE:
            found.append(f"plain eager itself {percent(slower)}")
    return found
