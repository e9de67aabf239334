"""Measure several trials at once: a thread for each device, and one queue of what has ended."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.errors import AutotuneError, DeviceLostError, DeviceRefusedError, WorkerError
from autotune.ir.plan import Plan
from autotune.measure.survey import PreparedWorkload
from autotune.records.measurement import Measurement
from autotune.study.runner import ParallelRunner, QuietRunner

CLOSE_SECONDS = 10.0
"""Maximum time in seconds that `close` waits for threads. They are daemons, so a late one does not block the exit."""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A measurement that ended, or that failed with an error."""

    number: int
    """Number of the trial."""
    result: Measurement | BaseException


@dataclass(frozen=True, slots=True)
class DeviceReady:
    """A further device that can measure now."""


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """A further device that cannot measure."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceDisturbed:
    """Other work disturbed a measurement, which is repeated."""

    reason: str


PoolEvent = TrialEnded | DeviceReady | DeviceFailed | DeviceDisturbed


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """Request to measure the plan of a trial."""

    number: int
    plan: Plan
    budget_bytes: int
    """Maximum charge of the step, without the floor."""
    stop_ratio: float | None
    """Time ratio to eager above which the measurement stops early; None to run to the end."""


@dataclass(slots=True)
class _Device:
    runner: ParallelRunner
    is_first: bool
    tasks: "queue.SimpleQueue[MeasureTask | None]" = field(default_factory=queue.SimpleQueue)
    is_free: bool = False
    is_out: bool = False
    """True if the search does not use the device any more."""
    thread: threading.Thread | None = None


class DevicePool:
    """Pool of the devices of one study. Only the study's thread may call it.

    The first device has prepared the workload, and stays open after the search. All others are *further devices*: they are
    prepared in the background, and closed at the end. If one is lost, its measurement ends with an error, and it is prepared
    again. One that cannot measure is not used any more.

    Args:
        runners: Runner of each device, the first device first.
        graph_digest: Digest of the graph that every device must capture.
        has_time: `has_time(seconds)`: return True if a disturbed measurement of so many seconds may be repeated.
    """

    def __init__(self, runners: Sequence[ParallelRunner], graph_digest: str, has_time: Callable[[float], bool]) -> None:
        self._events: queue.SimpleQueue[tuple[_Device, PoolEvent]] = queue.SimpleQueue()
        self._graph_digest, self._has_time = graph_digest, has_time
        self._devices = [_Device(runner, is_first=not number) for number, runner in enumerate(runners)]
        self._is_ended = False
        for device in self._devices:
            device.is_free = device.is_first
            device.thread = threading.Thread(target=self._serve, args=(device,), daemon=True)
            device.thread.start()

    def __len__(self) -> int:
        """Return the number of devices, also of those that are not ready."""
        return len(self._devices)

    @property
    def has_free_device(self) -> bool:
        """True if a measurement can begin now."""
        return any(device.is_free for device in self._devices)

    @property
    def has_device(self) -> bool:
        """True if a device measures, is free, or is being prepared."""
        return not all(device.is_out for device in self._devices)

    def start(self, task: MeasureTask) -> None:
        """Start a measurement on a free device. Requires `has_free_device`."""
        device = next(device for device in self._devices if device.is_free)
        device.is_free = False
        device.tasks.put(task)

    def wait(self, seconds: float | None = None) -> PoolEvent | None:
        """Wait for the next event and return it; None after `seconds`. A signal handler may raise `Stopped` here."""
        try:
            device, event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        # without a host no device of the class is left: the first one stays out of use until the search ends
        is_gone = isinstance(event, TrialEnded) and isinstance(event.result, DeviceLostError) and not event.result.host
        device.is_out = isinstance(event, DeviceFailed) or (is_gone and device.is_first)
        if device.is_out:
            return event
        # a further device that failed in a measurement is ready after it has been prepared again
        has_failed = isinstance(event, TrialEnded) and isinstance(event.result, BaseException)
        if isinstance(event, DeviceReady) or (isinstance(event, TrialEnded) and (device.is_first or not has_failed)):
            device.is_free = True
        return event

    def close_free(self) -> None:
        """Close the idle further devices, so that another study, or a replacement of the first device, can use them."""
        for device in self._devices:
            if not device.is_first and device.is_free:
                device.is_free, device.is_out = False, True
                device.tasks.put(None)
                device.runner.abort()

    def close(self) -> None:
        """End all threads. Close the further devices, busy or not, and the first device if it measures."""
        self._is_ended = True
        until = time.monotonic() + CLOSE_SECONDS
        for device in self._devices:
            device.tasks.put(None)
            if not device.is_first or not (device.is_free or device.is_out):
                device.runner.abort()
        for device in self._devices:
            assert device.thread is not None
            device.thread.join(max(0.0, until - time.monotonic()))
            if not device.thread.is_alive():
                device.runner.reset()  # a later search of the study may use it

    def _serve(self, device: _Device) -> None:
        """Measure on one device, in its thread, until the pool ends, the device is closed, or it cannot measure."""

        def report(reason: str) -> None:
            self._events.put((device, DeviceDisturbed(reason)))

        quiet = QuietRunner(device.runner, self._has_time, report)
        is_ready = device.is_first
        while not self._is_ended:
            if not is_ready:
                try:
                    self._prepare(device.runner)
                except BaseException as error:  # noqa: BLE001 - a further device is no reason to end the study
                    self._drop(device, error)
                    return
                is_ready = True
                self._events.put((device, DeviceReady()))
            if (task := device.tasks.get()) is None:
                return
            try:
                result: Measurement | BaseException = quiet.measure(
                    task.plan, budget_bytes=task.budget_bytes, beat=task.stop_ratio
                )
            except BaseException as error:  # noqa: BLE001 - the study's thread decides
                result, is_ready = error, device.is_first
            if not device.is_first and isinstance(result, DeviceRefusedError | WorkerError):
                # no evidence against the plan: another device measures it
                self._events.put((device, TrialEnded(task.number, DeviceLostError(f"{result}"))))
                self._drop(device, result)
                return
            self._events.put((device, TrialEnded(task.number, result)))

    def _drop(self, device: _Device, error: BaseException) -> None:
        """Report that a further device cannot measure, and end it."""
        self._events.put((device, DeviceFailed(_describe(error))))
        device.runner.abort()

    def _prepare(self, runner: ParallelRunner) -> None:
        prepared: PreparedWorkload = runner.prepare()
        if prepared.graph.digest != self._graph_digest:
            ours, theirs = self._graph_digest[:8], prepared.graph.digest[:8]
            raise DeviceRefusedError(f"it captures graph {theirs}, the first device {ours}; make their code equal")


def _describe(error: BaseException) -> str:
    """Return an error as one line."""
    return str(error) if isinstance(error, AutotuneError) else f"{type(error).__name__}: {error}"
