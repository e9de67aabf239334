"""What a store does when the disk, the directory or the process fails."""

import ctypes
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import StoreError
from autotune.measure.limits import classify_error
from autotune.records.measurement import Outcome
from autotune.runtime.stores import open_store
from autotune.runtime.stores import slab_file as slab
from autotune.runtime.stores.slab_file import Transfer
from autotune.runtime.stores.worker import TransferWorker

MIB = 2**20

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


def mount(point: Path, *arguments: str) -> Callable[[], None]:
    point.mkdir()
    done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this container may not mount: {done.stderr.strip()}")
    return lambda: subprocess.run(["umount", str(point)], check=True) and None


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    unmount = mount(tmp_path / "small", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    yield tmp_path / "small"
    unmount()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if mkfs is None:
        pytest.skip("there is no mkfs.ext4")
    subprocess.run([mkfs, "-q", "-m", "0", str(image)], check=True, capture_output=True)
    unmount = mount(tmp_path / "disk", "-o", "loop", str(image))
    yield tmp_path / "disk"
    unmount()


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("closes_in", ["its own process", "a forked process"])
def test_a_closed_store_frees_its_space_although_workers_of_a_loader_hold_its_file(
    closes_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("ssd", tmp_path, {0: MIB})
    inherited = [
        os.dup(int(link.name)) for link in list(Path("/proc/self/fd").iterdir()) if str(tmp_path) in _target(link)
    ]
    assert inherited
    if closes_in == "a forked process":
        monkeypatch.setattr(os, "getpid", lambda: 1)
    store.close()
    assert {os.fstat(number).st_size > 0 for number in inherited} == {closes_in == "a forked process"}
    for number in inherited:
        os.close(number)


def test_an_interrupt_while_a_store_closes_is_raised_once_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, join, interrupts = open_store("ssd", tmp_path, {0: MIB}), TransferWorker.join, [KeyboardInterrupt()]

    def interrupted(worker: TransferWorker) -> None:
        if interrupts:
            raise interrupts.pop()
        join(worker)

    monkeypatch.setattr(TransferWorker, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(link)]


def open_files(directory: Path) -> list[Path]:
    """Descriptors of this process whose files are in a directory."""
    return [link for link in Path("/proc/self/fd").iterdir() if str(directory) in _target(link)]


def test_a_store_that_a_signals_handler_closes_while_it_closes_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, truncate = open_store("ssd", tmp_path, {0: MIB}), os.ftruncate

    def interrupted(file: int, length: int) -> None:
        store.close()
        truncate(file, length)

    monkeypatch.setattr(os, "ftruncate", interrupted)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert not open_files(tmp_path)


def test_a_disk_that_became_read_only_does_not_end_the_training_when_its_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, length: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    store = open_store("ssd", tmp_path, {0: MIB})
    monkeypatch.setattr(os, "ftruncate", refuse)
    store.close()
    assert not open_files(tmp_path)


def test_a_process_that_may_start_no_further_thread_gets_a_store_error_and_keeps_neither_file_nor_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, start = set(threading.enumerate()), threading.Thread.start

    def refuse_second(thread: threading.Thread) -> None:
        if thread.name == "ssd-read":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_second)
    with pytest.raises(StoreError, match=r"no thread can be started .*\(can't start new thread\); raise ulimit -u"):
        open_store("ssd", tmp_path, {0: MIB})
    assert not open_files(tmp_path)
    assert set(threading.enumerate()) <= before


def test_after_an_interrupt_a_worker_is_waited_for_until_its_job_has_ended() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def job() -> None:
        started.set()
        ended.append(released.wait(60))

    started, released, ended = threading.Event(), threading.Event(), list[bool]()
    worker = TransferWorker("test")
    worker.submit(job)
    assert started.wait(60)
    worker.stop()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            worker.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.1, released.set).start()
    worker.join()
    assert ended == [True]


def _target(link: Path) -> str:
    return str(link.readlink()) if link.is_symlink() else ""


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"ssd store: no directory .*/nowhere; create it, or use another") as error:
        open_store("ssd", tmp_path / "nowhere", {0: 1})
    one_line(error)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is no directory; use another directory with --store ssd=DIR") as error:
        open_store("ssd", tmp_path / "file", {0: 1})
    one_line(error)


def test_a_directory_that_refuses_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any, **__: Any) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StoreError, match=r"is not writable \(Permission denied\); use another") as error:
        open_store("ssd", tmp_path, {0: 1})
    one_line(error)


@pytest.mark.parametrize(("owner", "call"), [(os, "open"), (Path, "exists")])
def test_a_directory_that_cannot_be_examined_is_named_with_the_reason(
    owner: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing)
        with pytest.raises(StoreError, match=r"cannot be opened \(Stale file handle\); use another") as error:
            open_store("ssd", tmp_path, {0: 1})
    one_line(error)


@root_only
def test_a_read_only_mount_is_named(tmp_path: Path) -> None:
    unmount = mount(tmp_path / "fixed", "-t", "tmpfs", "-o", "ro,size=16m", "tmpfs")
    try:
        with pytest.raises(StoreError, match=r"is not writable \(Read-only file system\); use another") as error:
            open_store("ssd", tmp_path / "fixed", {0: 1})
        one_line(error)
    finally:
        unmount()


def test_a_ramdisk_must_lie_in_memory(tmp_path: Path) -> None:
    with open_store("ssd", tmp_path, {0: 1}) as store:
        if store.holds_memory:
            pytest.skip("the temporary directory is a tmpfs here")
    with pytest.raises(StoreError, match=r"ramdisk store: .* is on a disk; .* or write --store ssd=") as error:
        open_store("ramdisk", tmp_path, {0: 1})
    one_line(error)


def test_files_lie_in_memory_on_a_tmpfs_and_not_on_a_block_device(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir():
        pytest.skip("this machine has no /dev/shm")
    assert slab.is_in_memory(shared_memory)
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("the temporary directory is on no block device here")
    assert not slab.is_in_memory(tmp_path)


@root_only
def test_an_ssd_on_a_tmpfs_is_taken_but_known_to_hold_memory(small_tmpfs: Path) -> None:
    with open_store("ssd", small_tmpfs, {0: 5 * MIB}) as store:
        assert store.holds_memory
        assert store.held_bytes() == 5 * MIB
        assert store.pool_bytes == 0


@root_only
def test_a_full_directory_is_told_with_both_numbers_and_left_as_it_was(small_tmpfs: Path) -> None:
    free = slab.free_bytes(small_tmpfs)
    with pytest.raises(StoreError, match=r"small cannot hold 17\.0 MiB, free: 16\.0 MiB .*; free space there") as error:
        open_store("ssd", small_tmpfs, {0: 16 * MIB, 1: MIB})
    one_line(error)
    assert slab.free_bytes(small_tmpfs) == free
    assert not list(small_tmpfs.iterdir())


@root_only
def test_a_disk_that_refuses_the_allocation_gets_all_back(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = slab.free_bytes(small_tmpfs)
    monkeypatch.setattr(slab, "free_bytes", lambda directory: None)
    with pytest.raises(StoreError, match=r"cannot hold 17\.0 MiB, free: unknown \(No space left on device\)"):
        open_store("ssd", small_tmpfs, {0: 17 * MIB})
    monkeypatch.undo()
    assert slab.free_bytes(small_tmpfs) == free


def test_a_store_without_room_ends_its_trial_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "free_bytes", lambda directory: 4 * MIB)
    with pytest.raises(StoreError, match=r"cannot hold 5\.0 MiB, free: 4\.0 MiB \(not attempted\)") as error:
        open_store("ssd", tmp_path, {0: 5 * MIB})
    assert classify_error(error.value) is Outcome.DISK_FULL


@root_only
def test_what_a_disk_can_take_exactly_is_taken_and_given_back(small_tmpfs: Path) -> None:
    with open_store("ssd", small_tmpfs, {0: 16 * MIB}, checksums="all") as store:
        assert slab.free_bytes(small_tmpfs) == 0
        tensor = torch.arange(2 * MIB)
        store.put(0, tensor).result()
        assert torch.equal(store.fetch(0).result(), tensor)
    assert slab.free_bytes(small_tmpfs) == 16 * MIB


@root_only
def test_a_disk_filled_by_others_does_not_stop_a_store_that_is_open(small_disk: Path) -> None:
    with open_store("ssd", small_disk, {0: 4 * MIB}, checksums="all") as store:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "greedy").write_bytes(bytes(24 * MIB))
        tensor = torch.randn(MIB)
        store.put(0, tensor).result()
        assert torch.equal(store.fetch(0).result(), tensor)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_while_writing_is_the_futures_and_the_store_goes_on(tmp_path: Path, number: int) -> None:
    broken = True

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        if broken and offset >= 4096:
            raise OSError(number, os.strerror(number))
        return os.pwritev(file, buffers, offset)

    with open_store("ssd", tmp_path, {0: 4096, 1: 4096}, pwritev=pwritev) as store:
        assert store.put(0, torch.arange(512)).exception(10) is None
        tensor = torch.arange(512)
        alive = weakref.ref(tensor)
        failed = store.put(1, tensor)
        del tensor
        with pytest.raises(StoreError, match=f"cannot write slot 1 of 4096 bytes .{os.strerror(number)}") as error:
            failed.result(10)
        assert "use another directory" in one_line(error)
        assert alive() is None, "the error keeps the tensor"
        with pytest.raises(StoreError, match="cannot write slot 1"):
            store.fetch(1).result(10)
        assert torch.equal(store.fetch(0).result(10), torch.arange(512))
        broken = False
        store.put(1, torch.arange(512)).result(10)
        assert torch.equal(store.fetch(1).result(10), torch.arange(512))


def test_an_error_while_reading_is_the_futures_and_keeps_no_tensor(tmp_path: Path) -> None:
    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store("ssd", tmp_path, {3: 4096}, preadv=preadv) as store:
        store.put(3, torch.arange(512)).result(10)
        with pytest.raises(StoreError, match=r"cannot read slot 3 of 4096 bytes .Input/output error.; check the disk"):
            store.fetch(3).result(10)


def halves(call: Callable[[int, list[memoryview], int], int]) -> Callable[[int, list[memoryview], int], int]:
    """Move at most half of what is asked for, and an odd number of bytes."""

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        (buffer,) = buffers
        if len(buffer) <= 4 * slab.PAGE_BYTES:
            return call(file, buffers, offset)
        pages = len(buffer) // 2 // slab.PAGE_BYTES * slab.PAGE_BYTES
        return call(file, [buffer[:pages]], offset) - 17

    return short


@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_are_carried_on_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(slab, "_bypass_page_cache", lambda file: False)
    tensor = torch.randn(5 * MIB // 4 + 3)
    seams = {"pwritev": halves(os.pwritev), "preadv": halves(os.preadv)}
    with open_store("ssd", tmp_path, {0: 6 * MIB}, checksums="all", **seams) as store:
        store.put(0, tensor).result()
        assert torch.equal(store.fetch(0).result(), tensor)


@pytest.mark.parametrize("seam", ["pwritev", "preadv"])
def test_a_transfer_that_never_moves_is_an_error_not_a_hang(tmp_path: Path, seam: str) -> None:
    with open_store("ssd", tmp_path, {0: 4096}, **{seam: lambda *_: 0}) as store:
        store.put(0, torch.arange(512))
        verb = {"pwritev": "write", "preadv": "read"}[seam]
        with pytest.raises(StoreError, match=f"short {verb}: only 0 of 4096 bytes"):
            store.fetch(0).result(10)


def flipping(file: int, buffers: list[memoryview], offset: int) -> int:
    """A disk that changes one bit."""
    moved = os.preadv(file, buffers, offset)
    buffers[0][0] ^= 1
    return moved


def test_a_corrupted_slot_is_named_with_its_generation(tmp_path: Path) -> None:
    with open_store("ssd", tmp_path, {3: 8000}, checksums="all", preadv=flipping) as store:
        store.put(3, torch.arange(1000)).result()
        store.put(3, torch.arange(1000)).result()
        with pytest.raises(StoreError, match="slot 3, generation 1, was read with other bytes") as error:
            store.fetch(3).result()
        one_line(error)


def test_a_stale_slot_is_told_from_a_fresh_one(tmp_path: Path) -> None:
    lost = False

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        return len(buffers[0]) if lost else os.pwritev(file, buffers, offset)

    with open_store("ssd", tmp_path, {0: 4096}, checksums="all", pwritev=pwritev) as store:
        store.put(0, torch.zeros(512)).result()
        lost = True
        store.put(0, torch.ones(512)).result()
        with pytest.raises(StoreError, match="slot 0, generation 1"):
            store.fetch(0).result()


@pytest.mark.parametrize(("checksums", "detected"), [("all", 32), ("sampled", 2), ("off", 0)])
def test_sampling_looks_at_each_slot_once_in_16_generations(tmp_path: Path, checksums: str, detected: int) -> None:
    with open_store("ssd", tmp_path, {5: 4096}, checksums=checksums, preadv=flipping) as store:
        wrong = 0
        for _ in range(32):
            store.put(5, torch.arange(512))
            wrong += store.fetch(5).exception() is not None
        assert wrong == detected


def test_only_a_file_without_o_direct_ever_fills_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("ssd", tmp_path, {0: 8 * MIB}) as store:
        if store.holds_memory:
            pytest.skip("the temporary directory is a tmpfs here")
        if not store.direct:
            pytest.skip("this file system has no O_DIRECT")
        store.put(0, torch.ones(2 * MIB)).result()
        store.fetch(0).result()
        assert store.held_bytes() == 0
    monkeypatch.setattr(slab, "_bypass_page_cache", lambda file: False)
    cached = []

    def watching(file: int, buffers: list[memoryview], offset: int) -> int:
        moved = os.pwritev(file, buffers, offset)
        cached.append(slab.page_cache_bytes(file, 14 * MIB))
        return moved

    with open_store("ssd", tmp_path, {0: 4097, 1: 3, 2: 8 * MIB, 3: 5 * MIB + 1}, pwritev=watching) as store:
        for key, nbytes in ((0, 4097), (1, 3), (2, 8 * MIB), (3, 5 * MIB + 1)):
            store.put(key, torch.ones(nbytes, dtype=torch.uint8)).result()
            store.fetch(key).result()
        assert max(cached) == slab.CHUNK_BYTES, "one chunk on its way, and no more"
        assert store.held_bytes() == 0


def test_without_o_direct_a_write_flushes_the_file_and_a_read_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(slab, "_bypass_page_cache", lambda file: False)
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    with open_store("ssd", tmp_path, {0: 4096}) as store:
        if store.holds_memory:
            pytest.skip("the temporary directory is a tmpfs here")
        store.put(0, torch.arange(512)).result()
        assert len(flushed) == 1
        store.fetch(0).result()
        assert len(flushed) == 1, "it would hide the error of a concurrent write"


def alone(part: torch.Tensor) -> torch.Tensor:
    """The same memory, as a storage of its own."""
    return torch.frombuffer((ctypes.c_uint8 * part.nbytes).from_address(part.data_ptr()), dtype=torch.uint8)


def test_the_disk_takes_memory_that_lies_well_itself_and_copies_of_other_memory(tmp_path: Path) -> None:
    calls: dict[str, list[tuple[int, int]]] = {"write": [], "read": []}

    def watching(verb: str, call: Transfer) -> Transfer:
        def watched(file: int, buffers: list[memoryview], offset: int) -> int:
            calls[verb].append((np.frombuffer(buffers[0], np.uint8).ctypes.data, len(buffers[0])))
            return call(file, buffers, offset)

        return watched

    nbytes = 3 * MIB + 5
    memory = torch.frombuffer(mmap.mmap(-1, 2 * 4 * MIB), dtype=torch.uint8)
    transfers = {"pwritev": watching("write", os.pwritev), "preadv": watching("read", os.preadv)}
    with open_store("ssd", tmp_path, {0: nbytes}, **transfers) as store:
        if not store.direct:
            pytest.skip("this file system has no O_DIRECT")
        for shift, direct in ((0, 3 * MIB), (64, 0)):
            source, target = (memory[half * 4 * MIB + shift :][:nbytes] for half in range(2))
            source, target = alone(source), alone(target)
            store.put(0, source).result()
            store.fetch(0, target).result()
            assert torch.equal(source, target)
            for verb, tensor in (("write", source), ("read", target)):
                inside = range(tensor.data_ptr(), tensor.data_ptr() + nbytes)
                assert sum(length for address, length in calls[verb] if address in inside) == direct
                calls[verb].clear()


def test_before_linux_6_5_the_disk_never_reads_or_writes_memory_that_a_fork_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryFile() as file:
        for release, safe in (
            ("6.4.99-generic", False),
            ("5.15.0", False),
            ("6.5.0", True),
            ("7.1-rc2", True),
            ("odd", False),
        ):
            monkeypatch.setattr(os, "uname", lambda release=release: SimpleNamespace(release=release))
            assert (slab._memory_alignment(file.fileno(), fork_safe=False) > 0) == safe
            assert slab._memory_alignment(file.fileno(), fork_safe=True) > 0


def test_both_ways_to_ask_for_the_page_cache_agree(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(7 * MIB)
        file.write(bytes(3 * MIB))
        file.flush()
        assert slab.page_cache_bytes_by_page(file.fileno(), 7 * MIB) == 3 * MIB
        assert slab.page_cache_bytes(file.fileno(), 7 * MIB) == 3 * MIB


WRITER = """
import sys, torch
from autotune.runtime.stores import open_store
store = open_store("ssd", sys.argv[1], {0: 12 * 2**20})
tensor = torch.ones(3 * 2**20)
store.put(0, tensor).result()
print("writing", flush=True)
while True:
    store.put(0, tensor).result()
"""


@root_only
def test_kill_9_in_the_middle_of_a_write_leaves_nothing(small_disk: Path) -> None:
    free, listed = slab.free_bytes(small_disk), sorted(small_disk.iterdir())
    with subprocess.Popen([sys.executable, "-c", WRITER, str(small_disk)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        assert slab.free_bytes(small_disk) != free
        assert sorted(small_disk.iterdir()) == listed
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    until = time.monotonic() + 10
    while slab.free_bytes(small_disk) != free and time.monotonic() < until:
        time.sleep(0.01)  # the kernel gives the space back a little after the process is gone
    assert slab.free_bytes(small_disk) == free
    assert sorted(small_disk.iterdir()) == listed


HANGING = """
import sys, threading, time, torch
from pathlib import Path
from autotune.runtime.stores.slab_store import SlabStore
begun = threading.Event()
def hang(*_):
    begun.set()
    time.sleep(600)
store = SlabStore("ssd", Path(sys.argv[1]), {0: 4096}, pwritev=hang)
store.put(0, torch.ones(1024))
begun.wait()
"""


def test_a_process_whose_disk_hangs_can_exit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGING, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
