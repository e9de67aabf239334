"""Diagnose the cause of a regression from the conditions that changed since the last good night."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from autotune.records.speed_environment import list_changes
from autotune.study.verdicts.statistics import format_percent

BUSIER = 0.2
"""Increase of the share of cores used by other processes above which the load explains a regression."""
SLOWER_MACHINE = 0.1
"""Relative slowdown of eager itself above which the state of the device explains a regression."""
SLOWER_CLOCK = 0.1
"""Relative decrease of the cores' clock above which the state of the device explains a regression."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a night, recorded so that a later change can be named."""

    code: dict[str, str] = field(default_factory=dict)
    """Commit and uncommitted changes of the repository, version of autotune, digest of the graph."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions of kernel, driver, Python and packages."""
    device: dict[str, str] = field(default_factory=dict)
    """Silicon, memory and number of cores."""
    busy: float = 0.0
    """Share of all cores that other processes used before the night began."""
    clock_mhz: float | None = None
    baseline_seconds: float | None = None
    """Time of an eager step."""
    threads: dict[str, str] = field(default_factory=dict)
    """Thread variables, thread counts and CPU affinity; empty in records of earlier versions."""
    disturbed: str = ""
    """Reason why other work disturbed the champion's measurements; empty if it did not."""


class Cause(StrEnum):
    """Cause of a regression."""

    STALE = "plan stale"
    CODE = "code"
    ENVIRONMENT = "environment"
    DEVICE = "device state"


def diagnose(now: Conditions, before: Conditions | None) -> tuple[list[Cause], str]:
    """Return (causes, explanation) of a regression, the likeliest cause first; without a change it is the device.

    Without a change, and without a device because the workload did not prepare, there is no cause.
    """
    if before is None:
        return [Cause.DEVICE], "no good night to compare with"
    lacks_device = bool(before.device) and not now.device
    if lacks_device:
        before = _without_prepared(before)
    changes = {
        Cause.DEVICE: _device_changes(now, before),
        Cause.ENVIRONMENT: [
            *list_differences(now.environment, before.environment),
            *list_changes(before.threads, now.threads),
        ],
        Cause.CODE: list_differences(now.code, before.code),
    }
    # another machine explains any change; a busy machine does not rule out a changed version
    order = [Cause.CODE, Cause.ENVIRONMENT, Cause.DEVICE]
    if now.device != before.device:
        order = [Cause.DEVICE, Cause.ENVIRONMENT, Cause.CODE]
    causes = [cause for cause in order if changes[cause]]
    if not causes:
        if lacks_device:
            return [], "code and packages are the same as in the last good night"
        return [Cause.DEVICE], "code, packages and silicon are the same as in the last good night"
    return causes, "; ".join(change for cause in causes for change in changes[cause])


def list_differences(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return every changed value as text.

    >>> list_differences({"torch": "2.13.0"}, {"torch": "2.12.0"})
    ['torch 2.12.0 -> 2.13.0']
    """
    names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def _without_prepared(conditions: Conditions) -> Conditions:
    """Return the conditions without those that only a workload that prepares has: device, driver, threads and graph."""
    return replace(
        conditions,
        code={name: value for name, value in conditions.code.items() if name != "graph"},
        environment={name: value for name, value in conditions.environment.items() if name != "driver"},
        device={},
        threads={},
    )


def _device_changes(now: Conditions, before: Conditions) -> list[str]:
    changes = list_differences(now.device, before.device)
    if now.busy > before.busy + BUSIER:
        changes.append(f"cores busy with other work {100 * before.busy:.0f} % -> {100 * now.busy:.0f} %")
    if now.disturbed and not before.disturbed:
        changes.append(f"measurements disturbed: {now.disturbed}")
    if now.clock_mhz and before.clock_mhz and now.clock_mhz < (1 - SLOWER_CLOCK) * before.clock_mhz:
        changes.append(f"clock {before.clock_mhz:.0f} -> {now.clock_mhz:.0f} MHz")
    if now.baseline_seconds and before.baseline_seconds:
        slower = now.baseline_seconds / before.baseline_seconds
        if slower > 1 + SLOWER_MACHINE:
            changes.append(f"eager step time {format_percent(slower)}")
    return changes
