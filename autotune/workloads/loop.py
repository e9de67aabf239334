"""Describe what a training loop does between backward and the optimizer's update."""

from dataclasses import dataclass
from typing import Self

from autotune.errors import ConfigError, nearest

WORDS = ("clip", "scaler", "accumulate=N", "gradients")
"""Words of a loop, in the order in which `str` writes them."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop's treatment of gradients. The default updates each parameter as soon as its gradient exists.

    >>> Loop.parse("scaler,clip,accumulate=4")
    Loop(clip=True, scaler=True, accumulate=4, gradients=False)
    >>> str(Loop(clip=True, accumulate=4))
    'clip,accumulate=4'

    Raises:
        ConfigError: `accumulate` is below 1, or `gradients` is combined with another word.
    """

    clip: bool = False
    """Code of the loop reads or changes all gradients before the update. Measured as clipping of their norm."""
    scaler: bool = False
    """A gradient scaler scales the loss, unscales all gradients, and may skip an update."""
    accumulate: int = 1
    """Number of micro-batches per update."""
    gradients: bool = False
    """The loop takes the gradients and updates by itself, as with `PlannedLoss`; the update is not planned."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}; it is the number of steps per update, so at least 1")
        if self.gradients and self.needs_all_gradients:
            raise ConfigError(f"loop {','.join(self._words())}: gradients leaves the update to the loop; use it alone")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the loop of a comma-separated text such as `clip,scaler,accumulate=4`; empty for the default.

        Raises:
            ConfigError: A word is unknown, is repeated, or has no valid number.
        """
        fields: dict[str, bool | int] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, equals, number = word.partition("=")
            if name in fields:
                raise ConfigError(f"loop {text!r}: {name} is repeated; write it once")
            if name == "accumulate":
                if not number.isdecimal():
                    raise ConfigError(f"loop {text!r}: {word} has no number; write accumulate=4 for 4 steps per update")
                fields[name] = int(number)
            elif name in WORDS and not equals:
                fields[name] = True
            else:
                raise ConfigError(f"loop {text!r}: no word {word!r}{nearest(name, WORDS)}")
        return cls(**fields)  # type: ignore[arg-type]

    @property
    def needs_all_gradients(self) -> bool:
        """True if no parameter can be updated before every gradient exists."""
        return self.clip or self.scaler or self.accumulate > 1

    @property
    def accumulates(self) -> bool:
        """True if gradients add up over several micro-batches."""
        return self.accumulate > 1

    @property
    def kind(self) -> str:
        """Text that is equal for loops with equal graphs: the number of micro-batches is not part of it."""
        return ",".join(word.partition("=")[0] for word in self._words())

    def _words(self) -> list[str]:
        words = {
            "clip": self.clip,
            "scaler": self.scaler,
            f"accumulate={self.accumulate}": self.accumulate > 1,
            "gradients": self.gradients,
        }
        return [word for word, is_used in words.items() if is_used]

    def __str__(self) -> str:
        return ",".join(self._words())
