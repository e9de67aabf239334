"""Measure at a far end, and go on at another one where it is lost: a runner over the channels of an engine.

A lost device says nothing about the plan that it measured. The plan is measured again on another device of the class,
which costs the trial in flight and one `prepare`. A plan that takes several devices with it is a crash.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from autotune.errors import DeviceLostError, DeviceRefusedError
from autotune.fleet.channel import Channel, FarEndLostError
from autotune.fleet.messages import (
    BaselineCall,
    CallFailed,
    ConditionsCall,
    FleetCall,
    MeasureCall,
    NodeFacts,
    OpenDevice,
    PrepareCall,
    RecordedBaseline,
    RenewCall,
    Renewed,
)
from autotune.fleet.node import check_node, check_promise, check_same_device
from autotune.fleet.waiting import record_wait
from autotune.ir.plan import Plan
from autotune.measure.device.conditions import MachineConditions
from autotune.measure.survey import PreparedWorkload
from autotune.records.device import Device
from autotune.records.json_codec import read_optional, write_whole
from autotune.records.measurement import Measurement
from autotune.records.run_dir import lock_file
from autotune.study.interrupts import Expired, expire_after
from autotune.study.runner import MAX_LOSSES, make_lost_measurement

ATTEMPTS = 4
"""Number of successive attempts to reach a device, after which there is none."""
PAUSE_SECONDS = 1.0
"""Pause after a failed attempt; it doubles. A job system takes some seconds to notice a dead node."""

ReplyT = TypeVar("ReplyT")


def ignore_line(text: str) -> None:
    """Ignore a line of progress."""
    del text


@dataclass(slots=True)
class RemoteRunner:
    """Runner over a channel; `open_channel` reaches a free device of the class."""

    open_channel: Callable[[Callable[[str], None]], Channel]
    request: OpenDevice
    """Request that opens the device."""
    class_file: Path | None = None
    """File of the class's first device, which later devices must equal; None to compare within this session alone."""
    pause_seconds: float | None = None
    """Pause after a failed attempt; `PAUSE_SECONDS` by default."""
    report: Callable[[str], None] = ignore_line
    """Receives lines of progress: of the device's work, and of lost devices."""
    replaces_lost_device: bool = True
    """True if `measure` continues on another device after a loss. False for further devices of a study: `measure` raises
    DeviceLostError, and the study runs the plan on any other device."""
    wait_name: str = ""
    """Name under which waits for a device are recorded; empty to record none."""
    wait_until: float = math.inf
    """Latest end of a wait for the replacement of a lost device, on the monotonic clock."""
    lost: int = 0
    """Number of devices lost so far."""
    facts: NodeFacts | None = None
    """Far end of the device in use; None without one."""
    _channel: Channel | None = None
    _prepared: PreparedWorkload | None = None
    _is_prepared_here: bool = False
    """True if the device in use has prepared the workload."""
    _is_aborted: bool = False

    def listen(self, report: Callable[[str], None]) -> None:
        """Report lines of progress to a function."""
        self.report = report

    def reuse_baseline(self, measurement: Measurement, device: Device) -> None:
        """Use a recorded baseline where the device is the same."""
        self.request = replace(self.request, recorded=RecordedBaseline(measurement, device))

    def wait_for_device(self) -> None:
        """Return once a device of the class answers, which may take as long as others use it."""
        self._repeat(self._connect)

    def limit_waits(self, until: float) -> None:
        """Let no wait for the replacement of a lost device last beyond a time on the monotonic clock; DeviceLostError then."""
        self.wait_until = until

    def prepare(self) -> PreparedWorkload:
        """Capture and profile on the device. Raises DeviceRefusedError where it breaks what its class promises."""
        self._repeat(self._prepare_here)
        assert self._prepared is not None
        return self._prepared

    def baseline(self) -> Measurement:
        return self._repeat(self._measure_baseline)

    def conditions(self) -> MachineConditions:
        """Collect software and load of the device's machine."""
        return self._repeat(lambda: self._ask(ConditionsCall(), MachineConditions))

    def measure(self, plan: Plan, *, budget_bytes: int, beat: float | None = None) -> Measurement:
        """Measure a plan on this device, or on another one after a loss.

        After a second loss the outcome is a crash. Without `replaces_lost_device`, the first loss raises DeviceLostError.
        """
        call = MeasureCall(plan, budget_bytes, beat)
        hosts: list[str] = []
        while len(hosts) < MAX_LOSSES:
            self._repeat(self._prepare_here)
            try:
                result = self._ask(call, Measurement)
            except FarEndLostError as error:
                self._refuse_if_aborted()
                hosts.append(host := self._host)
                self._lose(error)
                if not self.replaces_lost_device:
                    text = f"lost {host or 'a device'} of class {self.request.device_class}: {error}"
                    raise DeviceLostError(text, host or "a device") from None
                continue
            return replace(result, node=self._host, lost_nodes=tuple(hosts))
        return make_lost_measurement(hosts, self._prepared.device if self._prepared is not None else None)

    def renew(self) -> None:
        """Use new processes for the next measurement; a device that is gone uses new ones anyway."""
        if self._channel is None:
            return
        try:
            self._ask(RenewCall(), Renewed)
        except FarEndLostError as error:
            self._lose(error)

    def close(self) -> None:
        """End the far end with all its processes, and free the device."""
        channel, self._channel, self._is_prepared_here, self.facts = self._channel, None, False, None
        if channel is not None:
            channel.close()

    def abort(self) -> None:
        """End the far end, from any thread: a request that waits for its reply fails, and later ones until `reset`."""
        self._is_aborted = True
        self.close()

    def reset(self) -> None:
        """Open a device again with the next request. Requires that no request waits in another thread."""
        self._is_aborted = False

    @property
    def _host(self) -> str:
        return self.facts.host if self.facts is not None else ""

    def _repeat(self, ask: Callable[[], ReplyT]) -> ReplyT:
        """Ask again on another device where one is lost; DeviceLostError after several attempts."""
        pause = PAUSE_SECONDS if self.pause_seconds is None else self.pause_seconds
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask()
            except FarEndLostError as error:
                self._refuse_if_aborted()
                self._lose(error)
                if attempt == ATTEMPTS:
                    raise DeviceLostError(
                        f"no device of class {self.request.device_class} is left after {ATTEMPTS} attempts ({error}); "
                        "start one"
                    ) from None
            time.sleep(pause)
            pause *= 2
        raise AssertionError

    def _measure_baseline(self) -> Measurement:
        self._prepare_here()  # a device in the place of a lost one is checked before it measures
        return self._ask(BaselineCall(), Measurement)

    def _lose(self, error: FarEndLostError) -> None:
        self.lost += 1
        self.report(f"lost {self._host or 'a device'} of class {self.request.device_class}: {error}")
        self.close()

    def _prepare_here(self) -> None:
        """Prepare the workload on the device in use, unless it has; the graph must be that of the device before it."""
        if self._channel is not None and self._is_prepared_here:
            return
        prepared = self._ask(PrepareCall(), PreparedWorkload)
        name, host = self.request.device_class, self._host
        check_promise(name, host, prepared.device, self.request.promise)
        if self._prepared is None:
            self._check_class(host, prepared.device)
            self._prepared = prepared
        else:
            check_same_device(name, host, prepared.device, self._prepared.device)
            if prepared.baseline_fits != self._prepared.baseline_fits:
                ours, theirs = ("fits" if each.baseline_fits else "does not fit" for each in (prepared, self._prepared))
                raise DeviceRefusedError(
                    f"plain PyTorch {ours} on {host} of class {name}, and {theirs} on the device before it, so their times "
                    f"cannot be compared; free memory on {host}, or take it out of the class"
                )
            if prepared.graph.digest != self._prepared.graph.digest:
                ours, theirs = prepared.graph.digest[:8], self._prepared.graph.digest[:8]
                raise DeviceRefusedError(
                    f"{host} of class {name} captures graph {ours}, the device before it {theirs}; make their code equal"
                )
        self._is_prepared_here = True

    def _check_class(self, host: str, device: Device) -> None:
        """Compare a device with the first one of its class, or record it as such; other studies may begin now, too."""
        if self.class_file is None:
            return
        self.class_file.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(self.class_file.with_suffix(".lock"), wait=True):
            first = read_optional(Device, self.class_file, remedy="delete the file to record the class again")
            if first is None:
                write_whole(self.class_file, device, what="class's device", remedy="name another directory as `runs`")
                return
        check_same_device(self.request.device_class, host, device, first, self.class_file)

    def _ask(self, call: FleetCall, kind: type[ReplyT]) -> ReplyT:
        """Send a request to the device in use, or to a new one; whatever goes wrong, no later reply can answer it."""
        try:
            self._connect()
            assert self._channel is not None
            reply = self._channel.ask(call, self.report)
        except FarEndLostError:
            raise
        except BaseException:  # an interrupt too: a reply that comes later would answer another request
            self.close()
            raise
        return self._expect(reply, kind)

    def _connect(self) -> None:
        """Open a channel unless there is one; after an error there is none."""
        if self._channel is not None:
            return
        seconds = self.wait_until - time.monotonic()
        try:
            with self._limit_wait(seconds):
                self._open()
        except FarEndLostError:
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, Expired) and math.isfinite(seconds):
                raise DeviceLostError(
                    f"no device of class {self.request.device_class} was free in the time that was left, to replace a lost one; "
                    "start one, or give more time"
                ) from None
            raise

    @contextmanager
    def _limit_wait(self, seconds: float) -> Iterator[None]:
        """Raise Expired after so many seconds, also outside of the main thread: there the channel is closed, which ends its wait."""
        if threading.current_thread() is threading.main_thread() or not math.isfinite(seconds):
            with expire_after(seconds):
                yield
            return
        is_done, is_expired = threading.Event(), threading.Event()

        def watch() -> None:
            if is_done.wait(max(seconds, 0.0)):
                return
            is_expired.set()
            while self._channel is None and not is_done.wait(0.1):
                pass
            if not is_done.is_set():
                self.close()

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        except BaseException:
            if is_expired.is_set():
                raise Expired from None
            raise
        finally:
            is_done.set()

    def _open(self) -> None:
        self._refuse_if_aborted()
        self._channel = self.open_channel(self.report)
        self._refuse_if_aborted()  # once more with the channel there, so that `abort` or this closes it
        with self._note_wait():
            self.facts = self._expect(self._channel.ask(self.request, self.report), NodeFacts)
        check_node(self.request.device_class, self.facts)

    def _refuse_if_aborted(self) -> None:
        if self._is_aborted:
            raise DeviceRefusedError("the study needs no further device")

    def _note_wait(self) -> AbstractContextManager[None]:
        """Record that the study has no device, until the device answers; without a name nothing is recorded."""
        if not self.wait_name or self.class_file is None:
            return nullcontext()
        return record_wait(self.class_file.parent.parent, self.wait_name, self.request.device_class)

    def _expect(self, reply: object, kind: type[ReplyT]) -> ReplyT:
        if isinstance(reply, CallFailed):
            raise reply.to_error(self._host)
        if not isinstance(reply, kind):
            raise DeviceRefusedError(f"the far end answers with {type(reply).__name__}; it must be {kind.__name__}")
        return reply
