"""Messages between a study and the far end of its device: one dataclass for each request and each reply.

A message is one JSON text with the name of its class. The first request opens the device, and names the code that
both ends must run: a far end of another version is refused by name, before anything else of the message is read.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

import autotune
from autotune import errors
from autotune.errors import AutotuneError, DeviceRefusedError, WorkerError
from autotune.fleet.far_end.inspection import DeviceInspection
from autotune.ir.plan import Plan
from autotune.measure.device.conditions import MachineConditions
from autotune.measure.messages import ChildError
from autotune.measure.survey import PreparedWorkload
from autotune.records.device import Device
from autotune.records.json_codec import from_json, parse_json, to_json
from autotune.records.measurement import Measurement, Outcome


@dataclass(frozen=True, slots=True)
class DevicePromise:
    """Properties that every device of a class has; None or empty where the class promises nothing."""

    kind: str = "cpu"
    """`cpu` or `cuda`."""
    name: str = ""
    """Part of the name of the chip, in lower case or not: `A100`."""
    memory_bytes: int | None = None
    """Memory of the device; 5 % less or more is accepted, since drivers and kernels reserve some."""
    cores: int | None = None
    """Physical cores that a process may use; multiprocessors on a GPU."""


@dataclass(frozen=True, slots=True)
class RecordedBaseline:
    """Baseline that the study measured before, and the device that measured it."""

    measurement: Measurement
    device: Device


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """Open a device for the workload of a config; the first request of a session, answered by `NodeFacts`."""

    code: str
    """Version of autotune, as `code_identity` returns it."""
    device_class: str
    config: dict[str, Any]
    """JSON of the `Config`, with the device, the limit and the stores of the class."""
    promise: DevicePromise = field(default_factory=DevicePromise)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the measuring processes."""
    recorded: RecordedBaseline | None = None


@dataclass(frozen=True, slots=True)
class InspectDevice:
    """Inspect a device without opening it."""

    code: str
    """Version of autotune, as `code_identity` returns it."""
    kind: str
    stores: dict[str, str] = field(default_factory=dict)
    """Directories of the stores on the device's machine."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of the measuring processes."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Machine and process at the far end."""

    host: str
    pid: int
    code: str
    nice: int = 0
    """Niceness of the process, which the measuring processes inherit."""
    oom_score_adj: int = 0
    """Score by which the kernel chooses a victim; the measuring processes inherit it."""
    cpus: str = ""
    """CPUs that the process may use, such as `0-7`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that thread libraries read."""


@dataclass(frozen=True, slots=True)
class PrepareCall:
    """Call `prepare`."""


@dataclass(frozen=True, slots=True)
class BaselineCall:
    """Call `baseline`."""


@dataclass(frozen=True, slots=True)
class MeasureCall:
    """Call `measure`."""

    plan: Plan
    budget_bytes: int
    beat: float | None = None


@dataclass(frozen=True, slots=True)
class RenewCall:
    """Call `renew`."""


@dataclass(frozen=True, slots=True)
class ConditionsCall:
    """Collect the conditions of the device's machine."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """Reply without content."""


@dataclass(frozen=True, slots=True)
class CallProgress:
    """Progress of the running call; any number of them may come before the reply."""

    text: str
    """Empty for a sign of life."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Reply of a call that raised an exception."""

    error: str
    """Class of the exception."""
    detail: str
    trace: str = ""
    """Traceback of the exception."""
    is_timeout: bool = False
    """True if a process that did not answer in time caused the exception."""

    def to_error(self, host: str) -> AutotuneError:
        """Return the exception to raise on this side; one that is not autotune's becomes a WorkerError.

        A note of it holds the traceback, which the command line shows under `-v`.
        """
        error = self._to_error(host)
        if self.trace:
            error.add_note(f"On {host or 'the far end'}:\n{self.trace}")
        if self.is_timeout:
            error.__cause__ = ChildError(Outcome.TIMEOUT, self.detail)
        return error

    def _to_error(self, host: str) -> AutotuneError:
        kind = getattr(errors, self.error, None)
        if isinstance(kind, type) and issubclass(kind, AutotuneError) and kind is not errors.StudyInterruptedError:
            return kind(f"{host}: {self.detail}" if host else self.detail)
        return WorkerError(f"{host or 'the far end'}: internal error: {self.error}: {self.detail}; see its log")


FleetCall = OpenDevice | InspectDevice | PrepareCall | BaselineCall | MeasureCall | RenewCall | ConditionsCall
FleetReply = (
    NodeFacts
    | DeviceInspection
    | PreparedWorkload
    | Measurement
    | Renewed
    | MachineConditions
    | CallProgress
    | CallFailed
)
_CALLS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (OpenDevice, InspectDevice, PrepareCall, BaselineCall, MeasureCall, RenewCall, ConditionsCall)
}
_REPLIES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        NodeFacts,
        DeviceInspection,
        PreparedWorkload,
        Measurement,
        Renewed,
        MachineConditions,
        CallProgress,
        CallFailed,
    )
}


def encode_message(message: FleetCall | FleetReply) -> bytes:
    """Return a message as JSON."""
    return json.dumps({"type": type(message).__name__, "fields": to_json(message)}, separators=(",", ":")).encode()


def decode_call(text: bytes) -> FleetCall:
    """Return the request in a JSON text; DeviceRefusedError for another version's and for anything that is no request."""
    name, fields = _split(text, "the study")
    if name in (OpenDevice.__name__, InspectDevice.__name__) and fields.get("code") != code_identity():
        raise DeviceRefusedError(
            f"this end runs autotune {code_identity()}, the study runs {fields.get('code') or 'another one'}; "
            "install the same version on both"
        )
    if name not in _CALLS:
        raise DeviceRefusedError(f"the study asks for {name!r}, which autotune {code_identity()} does not know")
    call: FleetCall = from_json(_CALLS[name], fields, where=f"request {name}")
    return call


def decode_reply(text: bytes) -> FleetReply:
    """Return the reply in a JSON text; DeviceRefusedError for anything that is no reply of this version."""
    name, fields = _split(text, "the far end")
    if name not in _REPLIES:
        raise DeviceRefusedError(f"the far end answers with {name!r}; install autotune {code_identity()} there")
    reply: FleetReply = from_json(_REPLIES[name], fields, where=f"reply {name}")
    return reply


def is_timeout(error: BaseException) -> bool:
    """Return True for an error that a measuring process caused, here or at a far end, because it did not answer in time."""
    cause = error.__cause__
    return isinstance(cause, ChildError) and cause.outcome is Outcome.TIMEOUT


def is_json(text: bytes) -> bool:
    """Return true if a text is a whole JSON document, whatever it says.

    >>> is_json(b'{"type": "Renewed"}'), is_json(b'{"type": "Ren')
    (True, False)
    """
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _split(text: bytes, sender: str) -> tuple[str, dict[str, Any]]:
    try:
        document = parse_json(text)
        name, fields = document["type"], document["fields"]
    except (ValueError, KeyError, TypeError):
        raise DeviceRefusedError(f"{sender} sent {text[:80]!r}, which is no message; check its command") from None
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise DeviceRefusedError(f"{sender} sent {text[:80]!r}, which is no message; check its command")
    return name, fields


@functools.cache
def code_identity() -> str:
    """Return the version of this package with a hash of its sources: two checkouts may share a version number."""
    root = Path(__file__).parents[1]
    digest = xxhash.xxh64()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cpp", ".hpp") and path.is_file():
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"{autotune.__version__} (sources {digest.hexdigest()[:8]})"
