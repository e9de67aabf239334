"""Counters of the kernel before and after a measurement, from which the load beside it follows."""

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.records.machine_load import MachineLoad

_BUSY, _STOLEN = (0, 1, 2), 7
"""Columns of a CPU in /proc/stat: user, nice and system; steal. Interrupts are left out: a plan that offloads causes its own."""
_DISK_FAULTS, _OWN_TICKS = 9, slice(11, 13)
"""Fields of /proc/PID/stat behind the command: major faults; user and system time."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineCounters:
    """Counters at one moment, in seconds of CPU time."""

    pids: tuple[int, ...]
    """Measured processes."""
    moment: float
    """Seconds on the monotonic clock."""
    cpus: int
    """Number of CPUs that this process may use; the counters are of these."""
    busy_seconds: float
    stolen_seconds: float
    own_seconds: float
    """CPU time of the coordinator and of its children."""
    disk_faults: int
    """Page faults of the children that read from a disk."""
    load_per_cpu: float


def read_counters(pids: Sequence[int], proc: Path = PROC) -> MachineCounters | None:
    """Read the counters; `pids` are the measured processes. None where the kernel does not report them."""
    usable, ticks = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    try:
        rows = [
            line.split() for line in (proc / "stat").read_text(encoding="utf-8").splitlines() if line.startswith("cpu")
        ]
        counts = [[int(word) for word in row[1:]] for row in rows if row[0][3:] and int(row[0][3:]) in usable]
        processes = [_process_fields(pid, proc) for pid in (os.getpid(), *pids)]
        return MachineCounters(
            pids=tuple(pids),
            moment=time.monotonic(),
            cpus=len(counts),
            busy_seconds=sum(row[column] for row in counts for column in _BUSY) / ticks,
            stolen_seconds=sum(row[_STOLEN] for row in counts) / ticks,
            own_seconds=sum(int(word) for fields in processes for word in fields[_OWN_TICKS]) / ticks,
            disk_faults=sum(int(fields[_DISK_FAULTS]) for fields in processes[1:]),
            load_per_cpu=os.getloadavg()[0] / (os.cpu_count() or 1),
        )
    except (OSError, ValueError, IndexError):
        return None


def machine_load(before: MachineCounters | None, after: MachineCounters | None) -> MachineLoad | None:
    """Return the load between two readings; None without both of them, or where a process ended in between."""
    if before is None or after is None or before.pids != after.pids:
        return None
    if not after.cpus or after.moment <= before.moment:
        return None
    available = (after.moment - before.moment) * after.cpus
    other = (after.busy_seconds - before.busy_seconds) - (after.own_seconds - before.own_seconds)
    return MachineLoad(
        seconds=after.moment - before.moment,
        other_share=min(1.0, max(0.0, other / available)),
        stolen_share=min(1.0, max(0.0, (after.stolen_seconds - before.stolen_seconds) / available)),
        load_per_cpu=after.load_per_cpu,
        disk_faults=max(0, after.disk_faults - before.disk_faults),
    )


def count_page_faults() -> int:
    """Return the page faults of this process so far, without those that read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _process_fields(pid: int, proc: Path) -> list[str]:
    # the command may contain blanks and brackets; everything else stands behind its last bracket
    return (proc / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
