"""Compare tonight's ratios with the record and the past nights."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.study.verdicts.statistics import Change, change

ASSUMED_SPREAD = 0.02
"""How far nights lie apart, relative, until enough of them were seen."""
LEAST_SPREAD = 0.005
"""The same at least: a few nights that happen to agree say no more than that."""
ENOUGH_NIGHTS = 3
FAR = 2.0
"""Spreads from the middle of the past nights, beyond which a night is none of them."""
NOTABLE_BYTES = 0.01
"""Share of a step's charge: it hardly varies, so a little more of it is a change of the plan or of the code."""


def spread(nights: Sequence[float]) -> float:
    """How far past nights' ratios lie from their median, relative, whatever a few bad ones did."""
    if len(nights) < ENOUGH_NIGHTS:
        return ASSUMED_SPREAD
    middle = statistics.median(nights)
    return max(LEAST_SPREAD, 1.4826 * statistics.median(abs(math.log(night / middle)) for night in nights))


class Standing(StrEnum):
    """How a plan stands beside what it did before."""

    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Finding:
    """What tonight's turns say."""

    standing: Standing
    change: Change
    spreads: float
    """How many spreads of the past nights above their median tonight lies."""


def look(now: Sequence[float], record: Sequence[float], nights: Sequence[float], slower: float) -> Finding:
    """Tonight's ratios against those on record, and their median against the past nights'.

    Worse where both say so: the interval lies above the record, the estimate by more than half of `slower` (the change
    that is to be found), and the night lies far from the others. Same where the interval excludes `slower`.
    """
    found = change(now, record)
    spreads = math.log(statistics.median(now) / statistics.median(nights)) / spread(nights)
    if found.low > 1 and found.ratio >= 1 + slower / 2 and spreads > FAR:
        return Finding(Standing.WORSE, found, spreads)
    standing = Standing.SAME if found.high < 1 + slower else Standing.UNCLEAR
    return Finding(standing, found, spreads)


def better(challenger: Sequence[float], champion: Sequence[float], gain: float) -> tuple[bool, Change]:
    """Whether the challenger takes notably less time than the champion did in the same night."""
    found = change(challenger, champion)
    return found.high < 1 and found.ratio <= 1 - gain, found


def decided(found: Change, gain: float) -> bool:
    """Whether more turns would not change who is faster: the interval is clear of a tie, or too narrow for the gain."""
    return not found.tie or found.low > 1 - gain


def more_bytes(now: int, nights: Sequence[int]) -> bool:
    """Whether a step is charged notably more than in any night on record."""
    return bool(nights) and now > (1 + NOTABLE_BYTES) * max(nights)
