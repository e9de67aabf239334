"""What the coordinator and a child say to each other: JSON lines over two pipes of their own."""

from dataclasses import dataclass, field
from typing import Any

from autotune import errors
from autotune.errors import AutotuneError
from autotune.records.measurement import Outcome

FLOAT64, *MOVED = WITNESSES = ("float64", "moved 0", "moved 1")
"""Further runs of eager that show its rounding error: in float64, and from weights moved by one rounding, twice."""
CARRIED = "carried"
"""A run of eager whose gradients are moved by what is admitted of them."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a child is for; it does nothing before it has read this."""

    reference: str
    arguments: dict[str, Any]
    scratch: str = ""
    """A directory for its files, which the coordinator removes."""
    stores: dict[str, str] = field(default_factory=dict)
    device_kind: str = "cpu"
    seed: int = 0
    return_memory: bool = False
    """Whether malloc gives memory back at once: for bytes, not for seconds."""
    limit_bytes: int | None = None
    """A limit that the child must put on itself; None where its cgroup has one, or there is none."""
    profile_cache: str = ""
    memory_format: str = ""
    """What plans and their reference run in; the baseline is timed and weighed as the factory makes it."""


class Failed(Exception):
    """A request that a child did not answer with a result; it ends here, in the coordinator, as an Outcome."""

    def __init__(self, outcome: Outcome, detail: str, error: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.error = error
        """Name of the exception, where there was one."""

    def ours(self) -> AutotuneError | None:
        """The error to raise in the coordinator, if the child raised one of autotune's own."""
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, AutotuneError) and self.outcome is Outcome.CRASHED:
            return kind(self.detail)
        return None
