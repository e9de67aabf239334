"""Answer a study's requests with a runner: the far end of every engine, apart from how messages travel."""

import contextlib
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, assert_never

from autotune.errors import AutotuneError, ConfigError
from autotune.fleet.far_end.inspection import inspect_device
from autotune.fleet.messages import (
    BaselineCall,
    CallFailed,
    ConditionsCall,
    FleetCall,
    FleetReply,
    InspectDevice,
    MeasureCall,
    OpenDevice,
    PrepareCall,
    RenewCall,
    Renewed,
    decode_call,
    encode_message,
    is_timeout,
)
from autotune.fleet.node import read_node_facts
from autotune.measure.device.conditions import MachineConditions
from autotune.study.runner import Runner


class DeviceRunner(Runner, Protocol):
    """Runner that also describes the machine of its device."""

    def conditions(self) -> MachineConditions:
        """Collect software and load of the device's machine."""
        ...


OpenDeviceRunner = Callable[[OpenDevice, Callable[[str], None]], AbstractContextManager[DeviceRunner]]
"""`open_runner(request, report)`: context manager of the runner; it may wait for the device, and reports progress."""


class DeviceServer:
    """One session of a study on this machine's device. Use it from one thread, which must live until `close`."""

    def __init__(self, open_runner: OpenDeviceRunner) -> None:
        self._open_runner = open_runner
        self._stack = contextlib.ExitStack()
        self._runner: DeviceRunner | None = None

    def answer(self, text: bytes, report: Callable[[str], None]) -> bytes:
        """Return the reply to a request, both as JSON; an exception becomes a reply too.

        The traceback of one that is not autotune's own goes to the log.
        """
        try:
            return encode_message(self._answer(decode_call(text), report))
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything, and the study must receive it
            if not isinstance(error, AutotuneError):
                traceback.print_exc()
            trace = "".join(traceback.format_exception(error)).strip()
            return encode_message(CallFailed(type(error).__name__, f"{error}", trace, is_timeout(error)))

    def close(self) -> None:
        """End the runner with all its processes."""
        self._runner = None
        self._stack.close()

    def _answer(self, call: FleetCall, report: Callable[[str], None]) -> FleetReply:
        if isinstance(call, OpenDevice):
            self.close()
            self._runner = self._stack.enter_context(self._open_runner(call, report))
            return read_node_facts()
        if isinstance(call, InspectDevice):
            return inspect_device(call.kind, call.stores, call.environment)
        if self._runner is None:
            raise ConfigError(f"{type(call).__name__} came before a device was open; open one first")
        match call:
            case PrepareCall():
                return self._runner.prepare()
            case BaselineCall():
                return self._runner.baseline()
            case MeasureCall(plan, budget_bytes, beat):
                return self._runner.measure(plan, budget_bytes=budget_bytes, beat=beat)
            case RenewCall():
                self._runner.renew()
                return Renewed()
            case ConditionsCall():
                return self._runner.conditions()
        assert_never(call)
