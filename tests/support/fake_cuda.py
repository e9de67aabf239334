"""A made-up GPU: streams that run queued work in order, events that are late, memory, and pinned host memory.

The host's clock is virtual. Queuing work takes no time; work runs when a wait or a sleep moves the clock to its end. A copy
changes its destination only then. `install` replaces the clock of `time`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.fake_gpu_memory import FakeGpuMemory

COPY_BYTES_PER_SECOND = 20e9


class FakeStream:
    """A queue of work that runs in order."""

    def __init__(self, cuda: "FakeCuda", name: str, device: Any = None) -> None:
        self.cuda, self.name, self.device, self.free_at = cuda, name, device, 0.0

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")
        self.free_at = max(self.free_at, event.at)

    def synchronize(self) -> None:
        self.cuda.log.append(f"synchronize {self.name}")
        self.cuda.advance_to(self.free_at)

    def run(self, seconds: float, action: Callable[[], object] = lambda: None) -> None:
        """Queue work of so many seconds, whose effect appears at its end."""
        self.free_at = max(self.free_at, self.cuda.now) + seconds
        self.cuda.queue(self.free_at, action)


class FakeEvent:
    def __init__(self, cuda: "FakeCuda", *, timed: bool) -> None:
        self.cuda, self.timed, self.name, self.at = cuda, timed, "", 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        self.at = max(stream.free_at, self.cuda.now)
        self.cuda.recorded += 1
        self.name = f"{stream.name}@{self.cuda.recorded}"

    def query(self) -> bool:
        return self.at <= self.cuda.now

    def synchronize(self) -> None:
        self.cuda.advance_to(self.at)

    def elapsed_time(self, other: "FakeEvent") -> float:
        if not (self.timed and other.timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        if not (self.name and other.name):
            raise RuntimeError("both events must be recorded before calculating elapsed time")
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (other.at - self.at)


class _QueuedCopies(TorchFunctionMode):
    """Queue `copy_` on a stream instead of running it; without `non_blocking` the host waits for it."""

    def __init__(self, cuda: "FakeCuda", stream: FakeStream) -> None:
        super().__init__()
        self._cuda, self._stream = cuda, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        to, source = args[:2]
        with torch._C.DisableTorchFunction():
            self._stream.run(to.nbytes / COPY_BYTES_PER_SECOND, lambda: to.copy_(source))
            if not (kwargs or {}).get("non_blocking"):
                self._stream.synchronize()
        return to


class FakeCuda(FakeGpuMemory):
    """The part of `torch.cuda` that stores, timers, meters and limits use."""

    def __init__(self, devices: int = 1, **memory: Any) -> None:
        super().__init__(devices, **memory)
        self.log: list[str] = []
        self.now, self.recorded, self.error = 0.0, 0, 0
        self.devices, self.device_index = devices, 0
        self.default = [
            FakeStream(self, "compute" if index == 0 else f"compute {index}", index) for index in range(devices)
        ]
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._made = 0
        self._queued: list[tuple[float, int, Callable[[], object]]] = []
        self.registered: dict[int, int] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the virtual clock the one of the module `time`."""
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", lambda seconds: self.advance_to(self.now + seconds))

    def queue(self, at: float, action: Callable[[], object]) -> None:
        with self._lock:
            self._made += 1
            self._queued.append((at, self._made, action))

    def advance_to(self, seconds: float) -> None:
        """Move the clock forward and run all work that ends until then, in the order of its end."""
        with self._lock:
            self.now = max(self.now, seconds)
            due = sorted((item for item in self._queued if item[0] <= self.now), key=lambda item: item[:2])
            self._queued = [item for item in self._queued if item[0] > self.now]
            for _, _, action in due:
                action()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.device_index

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.device_index = self.device_index, self._index(device)
        yield
        self.device_index = before

    def Stream(self, device: Any = None) -> FakeStream:
        self._made += 1
        index = self._index(device)
        return FakeStream(self, f"stream {self._made}", index)

    def Event(self, *, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        del blocking  # the CPU sleeps meanwhile
        return FakeEvent(self, timed=enable_timing)

    def current_stream(self, device: Any = None) -> FakeStream:
        index = self._index(device)
        return self._streams().get(index, self.default[index])

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        streams, index = self._streams(), self._index(stream.device)
        before, streams[index] = self.current_stream(stream.device), stream
        with _QueuedCopies(self, stream):
            yield
        streams[index] = before

    def synchronize(self, device: Any = None) -> None:
        self.log.append("synchronize")
        self.advance_to(max([self.now, *(at for at, _, _ in self._queued)]))

    def _sleep(self, cycles: int) -> None:
        self.current_stream().run(cycles / 1.5e9)

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop)

    def _streams(self) -> dict[int, FakeStream]:
        """Return the current streams of this thread: each thread begins on the default stream."""
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[int, FakeStream] = self._thread.streams
        return streams

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        self.registered[address] = nbytes
        return self.error

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = getattr(device, "index", None)
        return self.device_index if index is None else int(index)
