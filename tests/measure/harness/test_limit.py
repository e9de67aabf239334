"""A limit lets a process have what it says and no more, and a failure for want of memory is told from a fault."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune.errors import StoreError
from autotune.measure.limits import (
    available_bytes,
    classify_error,
    limit_cgroup,
    limit_data,
    limit_fraction,
    oom_kills,
    reports_no_memory,
    start_threads,
)
from autotune.measure.meters.cgroup import Cgroup, OwnCgroup
from autotune.measure.meters.nvml import NvmlMeter
from autotune.records.measurement import Outcome
from tests.support.fake_nvml import FakeNvml, Gpu, fake_torch_cuda
from tests.support.waiting import wait_for

MIB = 2**20


def cgroups_are_writable() -> bool:
    try:
        OwnCgroup(f"{os.getpid()}-probe").remove()
    except OSError:
        return False
    return True


needs_cgroup = pytest.mark.skipif(not cgroups_are_writable(), reason="no writable memory cgroup")

TAKE = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


def take(cgroup: Cgroup, nbytes: int) -> int:
    """Exit code of a process that fills so many bytes in the cgroup."""
    script = f"bytearray({nbytes})"
    return subprocess.run(
        ["/bin/sh", "-c", TAKE, str(cgroup.path), sys.executable, "-c", script], check=False
    ).returncode


@needs_cgroup
def test_a_cgroup_kills_what_needs_more_and_counts_it() -> None:
    own = OwnCgroup(f"{os.getpid()}-limit")
    try:
        limit_cgroup(own.cgroup, 100 * MIB)
        assert take(own.cgroup, 40 * MIB) == 0
        assert oom_kills(own.cgroup) == 0
        assert take(own.cgroup, 140 * MIB) == -signal.SIGKILL
        assert oom_kills(own.cgroup) == 1
    finally:
        own.remove()


def test_v2_gets_no_swap_either(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max"):
        (tmp_path / name).write_text("max")
    limit_cgroup(Cgroup(tmp_path, 2), 7 * MIB)
    assert (tmp_path / "memory.max").read_text() == str(7 * MIB)
    assert (tmp_path / "memory.swap.max").read_text() == "0"


def test_v1_without_swap_accounting_is_limited_all_the_same(tmp_path: Path) -> None:
    limit_cgroup(Cgroup(tmp_path, 1), 7 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.limit_in_bytes"]


def test_the_stores_bytes_are_taken_off_what_the_process_may_still_have(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmData:\t 51200 kB\n")
    asked = []
    process, stores = 200 * MIB, 30 * MIB
    limit_data(300 * MIB, process + stores, tmp_path, lambda *arguments: asked.append(arguments))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # it stays, so that a later plan can have another limit
    assert asked == [(resource.RLIMIT_DATA, (50 * MIB + 70 * MIB, hard))]


def test_a_process_gets_what_is_left_and_then_a_memory_error() -> None:
    script = (
        "import psutil\n"
        "from autotune.measure.limits import limit_data\n"
        "now = psutil.Process().memory_info().rss\n"
        "limit_data(now + (100 << 20), now)\n"
        "kept = bytearray(80 << 20)\n"
        "try: bytearray(40 << 20)\n"
        "except MemoryError: print('refused')\n"
    )
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert seen.stdout == "refused\n"


def test_threads_that_start_before_a_limit_are_there_and_their_number_stays() -> None:
    usual = torch.get_num_threads()
    start_threads(usual + 1)
    assert torch.get_num_threads() == usual
    assert len(list(Path("/proc/self/task").iterdir())) > usual


def test_the_fraction_is_of_what_the_context_leaves() -> None:
    asked = []
    cuda = SimpleNamespace(
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(total_memory=1000 * MIB),
        set_per_process_memory_fraction=asked.append,
    )
    limit_fraction(600 * MIB, 100 * MIB, cuda)
    limit_fraction(50 * MIB, 100 * MIB, cuda)
    limit_fraction(5000 * MIB, 100 * MIB, cuda)
    assert asked == [0.5, 0.0, 1.0]


def test_kills_are_counted_on_the_machine_where_there_is_no_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert oom_kills(None, tmp_path) == 3


@pytest.mark.parametrize(
    ("name", "text"), [("memory.oom_control", "under_oom 0\noom_kill 4\n"), ("memory.events", "oom 9\noom_kill 4\n")]
)
def test_kills_are_read_in_both_versions(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert oom_kills(Cgroup(tmp_path, 1 if "control" in name else 2)) == 4


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MemoryError(), Outcome.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            Outcome.OUT_OF_MEMORY,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Outcome.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
            Outcome.OUT_OF_MEMORY,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Outcome.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), Outcome.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), Outcome.CRASHED),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Outcome.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), Outcome.DISK_FULL),
        (chained(StoreError("ssd store: full"), OSError(errno.ENOSPC, "No space left")), Outcome.DISK_FULL),
        (chained(RuntimeError("the user's own"), MemoryError()), Outcome.OUT_OF_MEMORY),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Outcome.CRASHED),
        (OSError(errno.EACCES, "Permission denied"), Outcome.CRASHED),
    ],
)
def test_an_error_is_the_outcome_that_it_says(error: Exception, outcome: Outcome) -> None:
    assert classify_error(error) is outcome


def test_an_error_that_is_its_own_cause_is_classified() -> None:
    script = (
        "from autotune.measure.limits import classify_error\n"
        "try:\n"
        "    try: raise ValueError('of the step')\n"
        "    except ValueError as error: raise error from error\n"
        "except ValueError as error: print(classify_error(error))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == f"{Outcome.CRASHED}\n"


def test_a_c_librarys_last_words_tell_too() -> None:
    assert reports_no_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    assert reports_no_memory("libgomp: Thread creation failed: Resource temporarily unavailable")
    assert not reports_no_memory("Segmentation fault")


def test_the_context_exists_before_its_bytes_are_taken_off_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.measure.worker import gpu_process

    gpu, order = Gpu("GPU-a"), []

    def create_context(_: object) -> None:
        order.append("context")
        gpu.processes[os.getpid()] = 300 * MIB  # the driver lists a process from here on

    monkeypatch.setattr(gpu_process, "create_context", create_context)
    monkeypatch.setattr(gpu_process.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_process.torch.cuda, "memory_reserved", lambda: 0)
    nvml = FakeNvml([gpu])
    monkeypatch.setattr(gpu_process, "NvmlMeter", lambda: NvmlMeter(nvml=nvml, cuda=fake_torch_cuda("a")))
    assert gpu_process.GpuProcess().context_bytes() == 300 * MIB
    assert order == ["context"]


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 900 * MIB), (str(400 * MIB), 100 * MIB), (str(4000 * MIB), 900 * MIB)]
)
def test_what_processes_may_still_take_is_what_machine_and_container_both_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=900 * MIB))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    box = tmp_path / "sys/fs/cgroup/box"
    box.mkdir(parents=True)
    for name, text in {"cgroup.procs": "", "memory.max": limit, "memory.current": str(300 * MIB)}.items():
        (box / name).write_text(text)
    assert available_bytes(tmp_path) == expected
    step = box / "step"  # as in a job, whose limit is that of a cgroup around the process's own
    step.mkdir()
    (step / "cgroup.procs").touch()
    (tmp_path / "proc/self/cgroup").write_text("0::/box/step\n")
    assert available_bytes(tmp_path) == expected


@needs_cgroup
def test_a_cgroup_takes_what_left_the_session_of_its_child_along() -> None:
    own = OwnCgroup(f"{os.getpid()}-left")
    left = subprocess.Popen(["/bin/sh", "-c", TAKE, str(own.cgroup.path), "sleep", "60"], start_new_session=True)
    wait_for(lambda: (own.cgroup.path / "cgroup.procs").read_text().split() == [str(left.pid)])
    own.remove()
    assert left.wait(5) == -signal.SIGKILL
    assert not own.cgroup.path.exists()
