"""Describe the knobs that planners expose to the search, without depending on a sampler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Int:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int
    log: bool = False
    """Sample on a logarithmic scale."""

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def contains(self, value: object) -> bool:
        """Return true for an integer in the range; a bool is no integer here."""
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Float:
    """Real numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Sample on a logarithmic scale."""

    def __str__(self) -> str:
        return f"a number from {self.low} to {self.high}"

    def contains(self, value: object) -> bool:
        """Return true for an int or float in the range; a bool is no number here."""
        return isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few strings."""

    options: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.options)}"

    def contains(self, value: object) -> bool:
        """Return true for one of the options."""
        return value in self.options


Knob = Int | Float | Choice
"""Range of one planner parameter."""

KnobValue = int | float | str
"""Value of one planner parameter."""


Settings = dict[str, dict[str, KnobValue]]
"""Planner name (key `planner`) and knob values, per planner kind (`order`, `recompute`, `offload`, ...).

Settings are portable between devices and versions; plans are not.
"""
