"""Load of the machine beside a measurement, and the rules by which it makes the measurement disturbed."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SECONDS = 0.5
"""Duration in seconds below which shares of CPU time are too coarse: the kernel counts in hundredths of a second."""
OTHER_SHARE = 0.1
"""Share of the usable CPUs used by other processes from which a measurement is disturbed."""
STOLEN_SHARE = 0.05
"""Share of the usable CPUs given to other virtual machines from which a measurement is disturbed."""
LOAD_PER_CPU = 2.0
"""Load average per CPU of the machine from which a measurement is disturbed."""
DISK_FAULTS = 100
"""Number of page faults that read from a disk from which a measurement is disturbed."""
PAIR_CHANGE = 0.15
"""Relative change between two successive blocks of eager from which they were disturbed. On an idle machine it is 0.03."""
BASELINE_CHANGE = 0.5
"""Relative slowdown of eager since the baseline was measured from which a measurement is disturbed."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Work of the machine beside the measured processes, over the time of one measurement."""

    seconds: float
    other_share: float
    """Share of the usable CPUs that other processes used."""
    stolen_share: float
    """Share of the usable CPUs that the host gave to other virtual machines."""
    load_per_cpu: float
    """Load average of the last minute over the number of the machine's CPUs."""
    disk_faults: int = 0
    """Page faults of the measured processes that read from a disk."""


def explain_disturbance(
    load: MachineLoad | None, eager_blocks: Sequence[float] = (), baseline_seconds: float | None = None
) -> str:
    """Return the reason why a measurement is disturbed; empty if nothing indicates other work.

    Args:
        load: load of the machine during the measurement; None where it cannot be read.
        eager_blocks: mean step seconds of each of eager's blocks, in the order in which they ran.
        baseline_seconds: step seconds of the undisturbed baseline; None if there is none yet.

    >>> explain_disturbance(MachineLoad(2.0, 0.4, 0.0, 1.0))
    'other processes used 40 % of the CPUs'
    """
    reasons = [] if load is None else _explain_load(load)
    changes = [max(a, b) / min(a, b) - 1 for a, b in itertools.pairwise(eager_blocks) if min(a, b) > 0]
    # one slow block is an accident that the median of a measurement absorbs
    if changes and statistics.median(changes) > PAIR_CHANGE:
        reasons.append(f"successive blocks of eager differ by {100 * statistics.median(changes):.0f} %")
    if eager_blocks and baseline_seconds:
        slower = statistics.median(eager_blocks) / baseline_seconds - 1
        if slower > BASELINE_CHANGE:
            reasons.append(f"eager takes {100 * slower:.0f} % longer than at the baseline")
    return ", ".join(reasons)


def _explain_load(load: MachineLoad) -> list[str]:
    long = load.seconds >= MIN_SECONDS
    rules = (
        (long and load.other_share > OTHER_SHARE, f"other processes used {100 * load.other_share:.0f} % of the CPUs"),
        (
            long and load.stolen_share > STOLEN_SHARE,
            f"{100 * load.stolen_share:.0f} % of the CPUs were stolen by the host",
        ),
        (load.load_per_cpu > LOAD_PER_CPU, f"the load was {load.load_per_cpu:.1f} per CPU"),
        (load.disk_faults > DISK_FAULTS, f"{load.disk_faults} page faults read from a disk"),
    )
    return [reason for applies, reason in rules if applies]
