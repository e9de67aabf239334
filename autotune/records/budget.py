"""Parse a budget: bytes of the process, or a share of the baseline's step bytes."""

import re
from dataclasses import dataclass

from autotune.errors import ConfigError
from autotune.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What the device may charge: absolute bytes, or a share of the baseline's step bytes above the floor."""

    text: str
    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """`65%` and `45.3%` are shares of the baseline's step bytes, `6GiB` and `123456B` the whole process."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
        if match is None:
            try:
                nbytes = parse_bytes(text)
            except ConfigError:
                raise ConfigError(f"cannot read {text!r} as a budget; write 65%, 6GiB, 512MiB or 123456B") from None
            if nbytes == 0:
                raise ConfigError(f"budget {text!r} is nothing; write 65% or 512MiB")
            return cls(text.strip(), nbytes=nbytes)
        share = float(match[1]) / 100
        if not 0 < share <= 10:
            raise ConfigError(f"budget {text!r} must lie above 0% and at most 1000% of the baseline's step bytes")
        return cls(text.strip(), share=share)

    def step_bytes(self, *, floor_bytes: int, baseline_step_bytes: int) -> int:
        """Bytes left for the training step itself once the process's floor is paid; may be negative."""
        if self.share is not None:
            return int(self.share * baseline_step_bytes)
        assert self.nbytes is not None
        return self.nbytes - floor_bytes
