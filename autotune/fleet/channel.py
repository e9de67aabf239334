"""Define the channel to a far end: what an engine provides, and what its loss looks like."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.fleet.messages import FleetCall, FleetReply


class FarEndLostError(Exception):
    """The far end ended, or stopped to answer; `RemoteRunner` finds another device, so that nobody else sees this."""


class Channel(Protocol):
    """Conversation with one far end: requests one after the other, each with one reply."""

    def ask(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        """Send a request and return its reply; `report` receives lines of progress.

        Any exception, an interrupt included, makes the channel useless: close it. Raises FarEndLostError where the far end is
        gone.
        """
        ...

    def close(self) -> None:
        """End the far end with all its processes; returns within some seconds, whatever the far end does."""
        ...


@dataclass(frozen=True, slots=True)
class Reach:
    """Everything by which an engine reaches a device of a class."""

    device_class: str
    """Name of the class, for messages."""
    log_dir: Path
    """Directory for the output of far ends."""
    command: tuple[str, ...] = ()
    """Command whose standard streams are those of `autotune serve`; engine `command`."""
    resource: str = ""
    """Custom resource that each device of the class has one of; engine `ray`."""
    uses_gpu: bool = False
    address: str = "auto"
    """Address of the cluster; engine `ray`."""
    code: str | None = None
    """Directory of the user's code that is copied to the nodes; engine `ray`."""
    code_digest: str = ""
    """Digest of that code when the study began; empty to accept any."""
    opener: str = ""
    """`module:function` that opens the runner at the far end; empty for the real one."""


OpenChannel = Callable[[Reach, Callable[[str], None]], Channel]
"""`open_channel(reach, report)`: reach a device that is free, and wait for one if all are in use.

Raises FarEndLostError where it was lost before it answered, and DeviceRefusedError where it cannot be reached at all.
"""
