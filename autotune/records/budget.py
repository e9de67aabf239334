"""Parse a budget: bytes of the process, bytes of the step, or a share of the baseline's step bytes."""

import re
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.units import parse_bytes

STEP_TOLERANCE = 0.005
"""Share by which the charge may exceed a budget of the step; a budget of the whole process has no tolerance."""
MAX_PERCENT = 1000
"""Largest budget in percent of the baseline's bytes."""
STEP_PREFIX = "step:"
"""Prefix of a budget in bytes of the step."""


def format_step_budget(nbytes: int) -> str:
    """Return the budget of a step with these bytes, rounded down to KiB.

    >>> format_step_budget(8_342_592)
    'step:8147KiB'
    """
    return f"{STEP_PREFIX}{nbytes // 1024}KiB"


def tolerated_bytes(budget_bytes: int, tolerance: float) -> int:
    """Return the highest charge that a budget with this tolerance accepts.

    >>> tolerated_bytes(1000, 0.005)
    1005
    """
    return budget_bytes + int(max(budget_bytes, 0) * tolerance)


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum charge: bytes of the process, bytes of the step, or a share of the baseline's step bytes.

    Bytes of the step are the bytes above the idle process. The idle process itself differs slightly between processes.

    >>> Budget.parse("65%").share
    0.65
    >>> Budget.parse("6GiB").step_bytes(floor_bytes=2**30, baseline_step_bytes=0) == 5 * 2**30
    True
    >>> Budget.parse("step:6GiB").step_bytes(floor_bytes=2**30, baseline_step_bytes=0) == 6 * 2**30
    True
    """

    text: str
    nbytes: int | None = None
    """Bytes of the process."""
    share: float | None = None
    """Share of the baseline's step bytes."""
    nbytes_of_step: int | None = None
    """Bytes of the step."""

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse `65%` of the baseline's step bytes, `6GiB` or `123456B` of the process, or `step:6GiB` of the step.

        Raises ConfigError for other text, for zero, and for more than 1000%.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
        if match is None:
            is_of_step = text.strip().startswith(STEP_PREFIX)
            try:
                nbytes = parse_bytes(text.strip().removeprefix(STEP_PREFIX))
            except ConfigError:
                raise ConfigError(
                    f"cannot read {text!r} as a budget; write 65%, 6GiB, 512MiB, 123456B or step:512MiB"
                ) from None
            if nbytes == 0:
                raise ConfigError(f"budget {text!r} is zero; write 65% or 512MiB")
            return cls(text.strip(), nbytes_of_step=nbytes) if is_of_step else cls(text.strip(), nbytes=nbytes)
        share = float(match[1]) / 100
        if not 0 < 100 * share <= MAX_PERCENT:
            raise ConfigError(
                f"budget {text!r} must lie above 0% and at most {MAX_PERCENT}% of the baseline's step bytes"
            )
        return cls(text.strip(), share=share)

    @property
    def tolerance(self) -> float:
        """Share by which the charge may exceed the budget.

        >>> Budget.parse("65%").tolerance, Budget.parse("step:4GiB").tolerance, Budget.parse("6GiB").tolerance
        (0.005, 0.005, 0.0)
        """
        return 0.0 if self.is_of_process else STEP_TOLERANCE

    @property
    def is_of_process(self) -> bool:
        """True if the budget limits the whole process, the idle process included."""
        return self.nbytes is not None

    def step_bytes(self, *, floor_bytes: int, baseline_step_bytes: int) -> int:
        """Return the bytes for the training step itself, without the process's floor; may be negative."""
        if self.share is not None:
            return int(self.share * baseline_step_bytes)
        if self.nbytes_of_step is not None:
            return self.nbytes_of_step
        assert self.nbytes is not None
        return self.nbytes - floor_bytes
