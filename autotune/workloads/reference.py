"""Refer to a workload by name and arguments."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """How to make the workload again."""

    reference: str
    """A zoo name, `package.module:factory` or `path/file.py:factory`."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.reference}({arguments})"
