"""Parse a budget: bytes of the process, or a share of the baseline's step bytes."""

import re
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum charge: absolute bytes of the process, or a share of the baseline's step bytes.

    >>> Budget.parse("65%").share
    0.65
    >>> Budget.parse("6GiB").step_bytes(floor_bytes=2**30, baseline_step_bytes=0) == 5 * 2**30
    True
    """

    text: str
    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse `65%` or `45.3%` of the baseline's step bytes, or `6GiB` or `123456B` for the whole process.

        Raises ConfigError for other text, for zero, and for more than 1000%.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
        if match is None:
            try:
                nbytes = parse_bytes(text)
            except ConfigError:
                raise ConfigError(f"cannot read {text!r} as a budget; write 65%, 6GiB, 512MiB or 123456B") from None
            if nbytes == 0:
                raise ConfigError(f"budget {text!r} is zero; write 65% or 512MiB")
            return cls(text.strip(), nbytes=nbytes)
        share = float(match[1]) / 100
        if not 0 < share <= 10:
            raise ConfigError(f"budget {text!r} must lie above 0% and at most 1000% of the baseline's step bytes")
        return cls(text.strip(), share=share)

    def step_bytes(self, *, floor_bytes: int, baseline_step_bytes: int) -> int:
        """Return the bytes for the training step itself, without the process's floor; may be negative."""
        if self.share is not None:
            return int(self.share * baseline_step_bytes)
        assert self.nbytes is not None
        return self.nbytes - floor_bytes
