"""Result of one check of this machine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Status of one property of this machine, and the fix where the status is not ok."""

    name: str
    status: Literal["ok", "warn", "bad"]
    detail: str
    fix: str = ""
    """Action that improves the status; empty where none is needed."""
