"""Decide whether a plan that is being timed can still become the leader: a sequential test of pairs of steps."""

import math
import statistics
from collections.abc import Sequence

MIN_STEPS = 2
"""Number of timed steps before a plan may be stopped."""
EXPECTED_NOISE = 0.03
"""Standard deviation of a step's time over that of the eager step beside it, on an idle machine."""
EXPECTED_WEIGHT = 3
"""Degrees of freedom that `EXPECTED_NOISE` stands for: three steps alone say little about their noise."""
MAX_ERROR = 0.1
"""Probability per step of stopping a plan that is exactly as fast as it has to be.

In simulated searches a smaller value leaves time for fewer plans, and the best of them are no faster
(`experiments/benchmarks/early_stop`).
"""


def cannot_beat(steps: Sequence[float], eager: Sequence[float], beat: float, max_error: float = MAX_ERROR) -> bool:
    """Return True if the plan's time over eager's is above the ratio to beat, by a one-sided test of all pairs so far.

    `max_error` is the probability of True for a plan that is exactly at that ratio. The test is Student's, of the
    logarithms of the ratios, with their variance shrunk towards the expected one. With four or more steps, a single slow
    step cannot stop a plan, because it widens the variance.

    >>> cannot_beat((1.2, 1.3, 1.2, 1.2), (1.0, 1.0, 1.0, 1.0), 1.1)
    True
    >>> cannot_beat((1.0, 1.0, 1.0, 9.0), (1.0, 1.0, 1.0, 1.0), 1.1)
    False
    """
    from scipy.special import stdtr

    count = len(steps)
    if count < MIN_STEPS or count != len(eager):
        return False
    excess = [math.log(step / (other * beat)) for step, other in zip(steps, eager, strict=True)]
    if (mean := statistics.fmean(excess)) <= 0:
        return False
    freedom = EXPECTED_WEIGHT + count - 1
    squares = sum((value - mean) ** 2 for value in excess)
    deviation = math.sqrt((EXPECTED_WEIGHT * EXPECTED_NOISE**2 + squares) / freedom)
    return bool(stdtr(freedom, -mean * math.sqrt(count) / deviation) < max_error)
