"""What a planner lets the search turn: plain descriptions, which the study translates for its sampler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Int:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def holds(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Float:
    """Real numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"a number from {self.low} to {self.high}"

    def holds(self, value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few names."""

    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.options)}"

    def holds(self, value: object) -> bool:
        return value in self.options


Knob = Int | Float | Choice
"""A knob of a planner."""

KnobValue = int | float | str
"""What a knob is set to."""


class Knobbed(Protocol):
    """A frozen dataclass whose fields are its knobs."""

    knobs: ClassVar[Mapping[str, Knob]]


Settings = dict[str, dict[str, KnobValue]]
"""Per kind of planner (`order`, `recompute`, `offload`, `update`) its name under `planner`, and its knobs.

Settings travel between devices and versions; plans do not.
"""
