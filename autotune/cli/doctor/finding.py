"""What a check finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: how it stands, and what to do where it does not stand well."""

    name: str
    status: Literal["ok", "warn", "bad"]
    detail: str
    cure: str = ""
