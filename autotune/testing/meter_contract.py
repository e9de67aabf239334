"""Run a meter through the contract that every meter of the project keeps, on a machine with known memory use.

Subclass `MeterContract` in a test module and create the meter on the fake machine; pytest collects its tests:

    class TestMyMeter(MeterContract):
        def make_meter(self, machine):
            return MyMeter(read=machine.read_bytes)
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from autotune.measure.meters import Meter
from autotune.measure.meters.cgroup import Cgroup

MIB = 2**20


class FakeMachine:
    """A machine that uses a known number of bytes, with the files and modules from which meters read that number."""

    def __init__(self, root: Path, *, sampled: bool = False) -> None:
        self.root = root
        """Root of the file system, with `proc` and two cgroups."""
        self.sampled = sampled
        """Make `use_bytes` wait until a thread has read the new number."""
        self.cgroup_v1 = Cgroup(root / "autotune-1", 1)
        self.cgroup_v2 = Cgroup(root / "autotune-2", 2)
        self._reads = 0
        self._now = self._peak = 100 * MIB
        self._write_files()

    def use_bytes(self, nbytes: int) -> None:
        """Use so many bytes from now on."""
        self.reset_peak_if_requested()
        self._now, self._peak = nbytes, max(self._peak, nbytes)
        self._write_files()
        reads = self._reads
        while self.sampled and self._reads == reads:
            time.sleep(0.001)

    def read_bytes(self) -> int:
        """Return the bytes in use."""
        self._reads += 1
        return self._now

    def reset_peak_if_requested(self) -> None:
        """Reset the peak if a meter wrote to a file as the kernel requires it for a reset."""
        resets = {
            self._file(path).read_text(encoding="utf-8")
            for path in ("autotune-1/memory.max_usage_in_bytes", "proc/self/clear_refs")
        }
        if (
            "0" in resets
            or "5" in resets
            or self._file("autotune-2/memory.peak").read_text(encoding="utf-8").startswith("reset")
        ):
            self._peak = self._now
            self._write_files()

    def cuda(self, cached_bytes: int = 0) -> Any:
        """Return the functions of `torch.cuda` that a meter calls; the allocator reserves `cached_bytes` more."""

        def reset() -> None:
            self._peak = self._now

        return SimpleNamespace(
            is_available=lambda: True,
            synchronize=lambda: None,
            reset_peak_memory_stats=reset,
            memory_allocated=lambda: self._now,
            max_memory_allocated=lambda: self._peak,
            memory_reserved=lambda: self._now + cached_bytes,
            max_memory_reserved=lambda: self._peak + cached_bytes,
        )

    def nvml(self, pid: int, *, hidden: bool = False) -> Any:
        """Return the functions of `pynvml` that a meter calls; `hidden`: processes are not listed by their numbers."""
        process = SimpleNamespace(pid=4711 if hidden else pid, usedGpuMemory=None if hidden else 0)

        def list_processes(_: object) -> list[Any]:
            if not hidden:
                process.usedGpuMemory = self.read_bytes()
            return [SimpleNamespace(pid=1, usedGpuMemory=7), process]

        return SimpleNamespace(
            NVMLError=RuntimeError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetComputeRunningProcesses=list_processes,
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=self.read_bytes()),
        )

    def _write_files(self) -> None:
        for name, number in (
            ("autotune-1/memory.usage_in_bytes", self._now),
            ("autotune-1/memory.max_usage_in_bytes", self._peak),
            ("autotune-2/memory.current", self._now),
            ("autotune-2/memory.peak", self._peak),
        ):
            self._file(name).write_text(f"{number}\n", encoding="utf-8")
        self._file("autotune-1/memory.stat").write_text(
            "cache 1\nshmem 1\ntotal_cache 0\ntotal_shmem 0\n", encoding="utf-8"
        )
        self._file("autotune-2/memory.stat").write_text("file 0\nshmem 0\n", encoding="utf-8")
        self._file("proc/self/status").write_text(f"VmPeak:\t9 kB\nVmHWM:\t{self._peak // 1024} kB\n", encoding="utf-8")
        self._file("proc/self/clear_refs").write_text("", encoding="utf-8")

    def _file(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class MeterContract:
    """Tests that hold for every meter. Define `make_meter` in a subclass whose name begins with `Test`."""

    sampled: ClassVar[bool] = False
    """True if a thread of the meter samples, so that a test must wait for it."""

    def make_meter(self, machine: FakeMachine) -> Meter:
        """Return the meter under test, which reads the fake machine."""
        raise NotImplementedError

    @pytest.fixture
    def machine(self, tmp_path: Path) -> FakeMachine:
        """Create a machine that waits for a sampling meter."""
        return FakeMachine(tmp_path, sampled=self.sampled)

    @pytest.fixture
    def meter(self, machine: FakeMachine) -> Meter:
        """Create the meter under test."""
        return self.make_meter(machine)

    def test_peak_is_of_the_time_since_entering_and_stays(self, machine: FakeMachine, meter: Meter) -> None:
        machine.sampled = False  # nobody samples before the meter is entered
        machine.use_bytes(900 * MIB)
        machine.use_bytes(100 * MIB)
        machine.sampled = self.sampled
        with meter:
            machine.use_bytes(300 * MIB)
            machine.use_bytes(200 * MIB)
            assert meter.peak_bytes == 300 * MIB
            assert meter.now_bytes() == 200 * MIB
        machine.sampled = False
        machine.use_bytes(500 * MIB)
        assert meter.peak_bytes == 300 * MIB

    def test_entering_again_starts_from_what_is_used_then(self, machine: FakeMachine, meter: Meter) -> None:
        for nbytes, peak in ((300 * MIB, 300 * MIB), (50 * MIB, 300 * MIB), (60 * MIB, 60 * MIB)):
            with meter:
                machine.use_bytes(nbytes)
            assert meter.peak_bytes == peak

    def test_it_has_a_name_and_no_reason_not_to_read(self, meter: Meter) -> None:
        assert meter.name
        assert meter.unavailable_reason() == ""

    def test_a_part_of_the_peak_is_unsure_at_most(self, machine: FakeMachine, meter: Meter) -> None:
        with meter:
            machine.use_bytes(300 * MIB)
        assert 0 <= meter.unsure_bytes <= meter.peak_bytes
