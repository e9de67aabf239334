"""Identify a device: two numbers compare only where it is the same."""

import re
from dataclasses import dataclass

_NO_SILICON = re.compile(
    r"\((?:r|tm|c)\)|@.*|\b(?:cpu|processor|nvidia|pcie|sxm\d*|hbm\w*|\d+-core|[\d.]+ ?ghz)(?![\w])"
)
"""Of a silicon's name, in small letters: marks, the pace it was sold at, and the board that it sits on."""


@dataclass(frozen=True, slots=True)
class Device:
    """What makes two numbers comparable: the silicon, its memory, and the software that drives it."""

    kind: str
    """`cpu` or `cuda`."""
    silicon: str
    memory_bytes: int
    cores: int
    torch: str
    driver: str = ""

    @property
    def key(self) -> str:
        """Name of the silicon alone, fit for file names and experiment names: makers spell one chip in several ways."""
        name = self.silicon.lower()
        name = _NO_SILICON.sub(" ", name).strip() or name
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{name}-{self.cores}").strip("-")
