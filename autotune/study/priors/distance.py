"""Measure how far two settings lie from each other."""

import math
import statistics
from collections.abc import Mapping

from autotune.planners import KINDS
from autotune.planners.knobs import Choice, Knob, KnobValue, Settings


def settings_distance(left: Settings, right: Settings) -> float:
    """Return the distance of two settings: 1 for each kind with another planner, up to 1 for other knobs of the same one.

    Each knob has the same weight: the share of its range between the two values, on the scale that it is searched on.
    """
    total = 0.0
    for kind in sorted(left.keys() | right.keys()):
        first, second = left.get(kind, {}), right.get(kind, {})
        if first.get("planner") != second.get("planner"):
            total += 1
        elif planner := KINDS.get(kind, {}).get(str(first.get("planner"))):
            total += statistics.fmean(_knob_distances(planner.knobs, first, second) or [0.0])
    return total


def _knob_distances(
    knobs: Mapping[str, Knob], first: Mapping[str, KnobValue], second: Mapping[str, KnobValue]
) -> list[float]:
    distances = []
    for name, knob in knobs.items():
        left, right = first.get(name), second.get(name)
        if left == right:
            distances.append(0.0)
        elif isinstance(knob, Choice) or not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
            distances.append(1.0)
        elif knob.log:
            distances.append(abs(math.log(left / right)) / math.log(knob.high / knob.low))
        else:
            distances.append(abs(left - right) / (knob.high - knob.low))
    return distances
