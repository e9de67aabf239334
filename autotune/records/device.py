"""Identify a device; measurements are comparable only on the same device."""

import re
from dataclasses import dataclass, field

_NO_SILICON = re.compile(
    r"\((?:r|tm|c)\)|@.*|\b(?:cpu|processor|nvidia|pcie|sxm\d*|hbm\w*|\d+-core|[\d.]+ ?ghz)(?![\w])"
)
"""Parts of a chip's lower-case name that do not identify it: trade marks, nominal clock, board."""


@dataclass(frozen=True, slots=True)
class Device:
    """Device of a measurement: the chip, its memory, and the software that drives it."""

    kind: str
    """`cpu` or `cuda`."""
    silicon: str
    memory_bytes: int
    cores: int
    torch: str
    driver: str = ""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    """Thread variables, thread counts and CPU affinity of the measuring process; empty in records of earlier versions."""

    @property
    def title(self) -> str:
        """Name of the chip with its cores, for people.

        >>> Device("cpu", "AMD EPYC", 2**34, 2, "2.13.0").title
        'AMD EPYC, 2 cores'
        """
        return f"{self.silicon}, {self.cores} cores"

    @property
    def key(self) -> str:
        """Name of the chip for files and experiments; vendors spell one chip in several ways."""
        name = self.silicon.lower()
        name = _NO_SILICON.sub(" ", name).strip() or name
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{name}-{self.cores}").strip("-")
