"""Compilation of regions: in processes of its own, once per machine, and without a trace of an interrupted one."""

import errno
import fcntl
import functools
import gc
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

from autotune.capture.tracer import capture
from autotune.errors import CaptureError, ConfigError
from autotune.kernels import compile_pool, compile_worker, compiled_region, kernel_cache, region_program
from autotune.kernels.compile_pool import compile_in_pool
from autotune.kernels.compile_worker import encode_request
from autotune.kernels.compiled_region import CompiledRegion
from autotune.kernels.region_program import fuse, list_regions, load_variants
from autotune.workloads.workload import Workload
from tests.support.waiting import wait_for


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled_region, "_KERNELS", {})
    return tmp_path / "autotune" / "kernels"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use one cache, whose precompiled header takes 20 s, and a compiler that logs calls and sleeps while `slow` exists."""
    directory = tmp_path_factory.mktemp("shared")
    compiler = directory / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {directory}/calls\n[ -e {directory}/slow ] && exec sleep 60\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setattr(compiled_region, "_KERNELS", {})
        yield directory


@functools.cache
def make_regions(width: int = 64) -> list[CompiledRegion]:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Tanh())
    workload = Workload(model, lambda model, x: model(x).sin().sum(), None, torch.ones(8, width))
    return list_regions(fuse(capture(workload)))


_ANOTHER_PROCESS = """
    from tests.kernels.test_compilation import make_regions
    import torch
    for region in make_regions():
        tensors = [torch.ones(meta.shape, dtype=meta.dtype) for meta in region._inputs]
        print([float(out.double().sum()) for out in region(*tensors)])
"""


@pytest.mark.slow
def test_a_second_process_calls_no_compiler_and_computes_the_same(shared: Path):
    compiler_log = shared / "calls"
    regions = make_regions()
    compile_in_pool(regions)
    assert all(region.is_cached and not region.is_loaded for region in regions)
    calls = compiler_log.read_text().splitlines()
    assert any("-shared" in call for call in calls)
    sums = []
    for region in regions:
        tensors = [torch.ones(meta.shape, dtype=meta.dtype) for meta in region._inputs]
        sums.append(str([float(out.double().sum()) for out in region(*tensors)]))
        expected = region.region(*tensors)
        for actual, each in zip(region(*tensors), expected, strict=True):
            torch.testing.assert_close(actual, each)
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ANOTHER_PROCESS)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.stdout.splitlines() == sums
    assert compiler_log.read_text().splitlines() == calls
    assert not list(shared.rglob("unfinished-*"))


@pytest.mark.slow
def test_a_killed_compiler_leaves_no_entry_and_the_next_process_compiles_it(
    shared: Path,
):
    region, cache, slow = make_regions(48)[0], shared / "autotune" / "kernels", shared / "slow"
    slow.touch()

    def kill_worker() -> None:
        wait_for(lambda: any(cache.glob("inductor/unfinished-*")))
        (marker,) = cache.glob("inductor/unfinished-*")
        os.killpg(int(marker.name.rpartition("-")[2]), signal.SIGKILL)

    killer = threading.Thread(target=kill_worker, daemon=True)
    killer.start()
    with pytest.raises(CaptureError, match="killed by SIGKILL"):
        compile_in_pool([region])
    killer.join()
    slow.unlink()
    assert not region.is_cached
    (cache / "inductor" / "incomplete.so").touch()
    compile_in_pool([region])
    assert region.is_cached
    assert not (cache / "inductor" / "incomplete.so").exists(), "files beside a killed compiler may be incomplete"


def test_what_a_killed_process_left_is_removed_unless_another_one_compiles(cache: Path):
    scratch, unfinished = cache / "inductor", cache / "entries" / "unfinished-x"
    for directory in (scratch, unfinished):
        directory.mkdir(parents=True)
    with scratch.with_suffix(".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        compile_pool._remove_incomplete(scratch)
        assert unfinished.exists()
    compile_pool._remove_incomplete(scratch)
    assert not unfinished.exists()
    assert scratch.exists(), "no compiler was killed"


def test_a_process_says_that_it_waits_and_compiles_nothing_that_the_one_before_it_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    region, compiled, locked = make_regions()[0], list[object](), threading.Event()
    entry = kernel_cache.entry_path(region.signature)
    monkeypatch.setattr(compile_pool, "_compile", lambda regions, listen: compiled.extend(regions))

    def compile_as_another_process() -> None:
        with compile_pool._lock_compilation():
            locked.set()
            time.sleep(0.2)
            kernel_cache.write_failure(entry, "compiled")

    other = threading.Thread(target=compile_as_another_process, daemon=True)
    other.start()
    assert locked.wait(60)
    compile_in_pool([region])
    other.join()
    assert not compiled
    assert "waiting for another process of this machine, which compiles regions" in capsys.readouterr().err


def test_a_compiling_process_may_be_ended_once_it_replied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scratch, markers = tmp_path / "inductor", list[list[Path]]()
    scratch.mkdir()
    requests = [encode_request(make_regions()[0], 1, torch.float32)]

    class Pipe:
        def recv_bytes(self) -> bytes:
            if not requests:
                raise EOFError
            return requests.pop()

        def send_bytes(self, reply: bytes) -> None:
            markers.append(list(scratch.glob("unfinished-*")))

    monkeypatch.setattr(compile_worker, "Connection", lambda number: Pipe())
    monkeypatch.setattr(compile_worker, "_compile", lambda *_: ("", ""))
    monkeypatch.setattr(sys, "argv", ["compile_worker", "1", "2"])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(scratch / "machine"))
    compile_worker.main()
    assert markers == [[]]


def test_inductors_files_are_of_one_torch_and_one_cpu(cache: Path, monkeypatch: pytest.MonkeyPatch):
    directories = [kernel_cache.compiler_directory()]
    monkeypatch.setattr(kernel_cache, "_cpu", lambda: "another CPU")
    directories.append(kernel_cache.compiler_directory())
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    directories.append(kernel_cache.compiler_directory())
    assert len(set(directories)) == 3
    assert {directory.parent for directory in directories} == {cache / "inductor"}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            CppCompileError(["g++"], "a.cpp:1:10: fatal error: Python.h: No such file"),
            r"error: Python\.h.*; install Python's headers",
        ),
        (InvalidCxxCompiler(), r"No working C\+\+ compiler found.*; install or repair g\+\+, or use --kernels aten"),
        (
            CppCompileError(["g++"], "a.cpp: Fatal error: can't close a.o: No space left on device"),
            r"a\.o: No space left on device; free space in .*inductor.*, or set XDG_CACHE_HOME",
        ),
    ],
)
def test_what_the_c_compiler_lacks_is_named(cause: Exception, words: str, monkeypatch: pytest.MonkeyPatch):
    def fail(region: CompiledRegion) -> Any:
        raise InductorError(cause, None) from cause

    monkeypatch.setattr(CompiledRegion, "_trace", fail)
    with pytest.raises(ConfigError, match=words):
        make_regions()[0]._generate()


def test_another_number_of_threads_or_another_signature_is_another_entry(cache: Path):
    threads = torch.get_num_threads()
    entry = kernel_cache.entry_path("a")
    assert entry.is_relative_to(cache)
    try:
        torch.set_num_threads(threads + 1)
        other = kernel_cache.entry_path("a")
    finally:
        torch.set_num_threads(threads)
    assert len({entry, other, kernel_cache.entry_path("b")}) == 3
    assert kernel_cache.entry_path("a") == entry


def test_a_region_is_compiled_once_for_each_default_dtype(cache: Path, monkeypatch: pytest.MonkeyPatch):
    region, kernel = make_regions()[0], object()
    monkeypatch.setattr(CompiledRegion, "_load", lambda region: kernel)
    region.compile()
    entry = kernel_cache.entry_path("a")
    torch.set_default_dtype(torch.float64)
    try:
        assert kernel_cache.entry_path("a") != entry
        assert not region.is_loaded
    finally:
        torch.set_default_dtype(torch.float32)
    assert region.is_loaded


def test_another_version_of_the_code_that_is_compiled_is_another_entry(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = kernel_cache.entry_path("a")
    assert kernel_cache.entry_path("a") == entry
    monkeypatch.setattr(kernel_cache, "_SOURCES", (tmp_path / "batch_norm.py",))
    (tmp_path / "batch_norm.py").write_text("scale = weight / deviation")
    kernel_cache._digest_sources.cache_clear()
    try:
        assert kernel_cache.entry_path("a") != entry
    finally:
        kernel_cache._digest_sources.cache_clear()


@pytest.mark.parametrize("damaged", ["kernel.so", "constants.pt", "region.py"])
def test_a_damaged_entry_is_named_with_its_remedy(cache: Path, damaged: str):
    path = kernel_cache.entry_path("a")
    path.mkdir(parents=True)
    (path / "region.py").write_text("def call(tensors): ...")
    (path / damaged).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"delete {path}"):
        kernel_cache.load_entry(path)


def test_an_entry_that_a_purged_file_system_damaged_is_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_region, "compile_in_pool", lambda regions: [write(each) for each in regions])
    writes = []

    def write(region: CompiledRegion) -> None:
        path = kernel_cache.entry_path(region.signature)
        path.mkdir(parents=True)
        (path / "kernels.txt").write_text("" if writes else "cpp_fused_add_0")  # whose library a purge has taken
        (path / "region.py").write_text("def call(tensors): return tensors")
        writes.append(path)

    region = make_regions()[0]
    write(region)
    assert region.compile()([1]) == [1]
    assert len(writes) == 2
    assert (cache / "inductor" / "unfinished-load").exists(), "or inductor would copy the same library again"


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"), [("max", 10, 0, None), ("3000", 2500, 0, 500), ("3000", 2500, 2000, 2500)]
)
def test_compiling_processes_stay_within_the_limit_of_a_container(
    limit: str, used: int, cached: int, free: int | None, tmp_path: Path
):
    (tmp_path / "own").write_text("0::/pod/step\n")
    (tmp_path / "groups" / "pod" / "step").mkdir(parents=True)
    pod = tmp_path / "groups" / "pod"
    (pod / "memory.max").write_text(limit)
    (pod / "memory.current").write_text(str(used))
    (pod / "memory.stat").write_text(f"anon 1\nactive_file {cached}\ninactive_file 0\n")
    found = compile_pool.free_memory(tmp_path / "groups", tmp_path / "own")
    assert found == free if free is not None else found > 10 * 2**20


def test_a_file_system_without_locks_compiles_without_them(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with compile_pool._lock_compilation():
        assert (cache / "compile.lock").exists()


@pytest.mark.parametrize("name", ["compile.lock", "inductor"])
def test_a_directory_of_compiled_kernels_that_cannot_be_written_is_named(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compile_pool, "_Worker", lambda *_: pytest.fail("a compiling process starts"))
    kernel_cache.kernel_directory()
    if name == "compile.lock":
        (cache / name).mkdir()
    else:
        (cache / name).touch()
    with pytest.raises(ConfigError, match=rf"cannot write {cache}/{name}.*; free space .*, or set XDG_CACHE_HOME"):
        compile_in_pool(make_regions())


def test_an_entry_that_cannot_be_written_is_named_and_a_damaged_entry_is_discarded_all_the_same(cache: Path):
    kernel_cache.kernel_directory()
    for name in ("entries", "inductor"):
        (cache / name).touch()
    with pytest.raises(ConfigError, match=rf"cannot write {cache}/entries/a.*, or set XDG_CACHE_HOME"):
        kernel_cache.write_failure(cache / "entries" / "a", "no kernel")
    kernel_cache.discard_entry(cache / "entries" / "a")


def test_generated_code_that_compiles_anything_but_kernels_is_refused(cache: Path):
    with pytest.raises(CaptureError, match="use --kernels aten"):
        kernel_cache.write_entry(cache / "entries" / "a", "def call(args):\n    return async_compile.triton()", {}, {})
    assert not list(cache.glob("entries/*"))


@pytest.mark.usefixtures("cache")
def test_an_error_of_inductor_arrives_with_the_region_s_name(monkeypatch: pytest.MonkeyPatch):
    region = make_regions()[0]
    monkeypatch.setattr(CompiledRegion, "_trace", lambda self: (_ for _ in ()).throw(RuntimeError("no kernel")))
    with pytest.raises(CaptureError, match=r"inductor cannot compile .* no kernel; use --kernels aten"):
        region.write()


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_an_error_in_a_compiling_process_is_raised_in_this_one():
    region = make_regions(32)[0]
    region._inputs = ()  # fewer than its ops read
    with pytest.raises(CaptureError, match="inductor cannot compile fused"):
        compile_in_pool([region])


def test_a_region_that_cannot_write_over_its_input_is_compiled_once_and_copies(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    region, attempts = make_regions()[0].over(0), []

    def generate(region: CompiledRegion) -> None:
        attempts.append(region.signature)
        raise CaptureError("a loop reads what it wrote")

    monkeypatch.setattr(CompiledRegion, "_generate", generate)
    monkeypatch.setattr(compiled_region, "compile_in_pool", lambda regions: [each.write() for each in regions])
    for kernels in ({}, {}):  # the second time as in another process
        monkeypatch.setattr(compiled_region, "_KERNELS", kernels)
        for _ in range(2):
            with pytest.raises(CaptureError, match="reads what it wrote"):
                region.compile()
    assert attempts == [region.signature]
    assert [path.name for path in cache.glob("entries/*/*")] == ["failure.txt"]


@pytest.mark.usefixtures("cache")
def test_a_region_that_cannot_write_over_its_input_holds_no_tensor_of_its_calls(monkeypatch: pytest.MonkeyPatch):
    def generate(region: CompiledRegion) -> None:
        raise CaptureError("a loop reads what it wrote")

    plain = make_regions()[0]

    def kernel(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = list(plain.region(*tensors))
        tensors.clear()  # as those of inductor do
        return outputs

    monkeypatch.setitem(compiled_region._KERNELS, plain._key, kernel)
    region = plain.over(0)
    monkeypatch.setattr(CompiledRegion, "_generate", generate)
    monkeypatch.setattr(compiled_region, "compile_in_pool", lambda regions: [each.write() for each in regions])
    held = []
    gc.disable()
    try:
        for _ in range(2):
            tensors = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in plain._inputs]
            held.append(weakref.ref(tensors[0]))
            region(*tensors)
            del tensors
    finally:
        gc.enable()
    assert held[1]() is None


@pytest.mark.usefixtures("cache")
def test_a_lack_of_memory_is_not_recorded_as_a_property_of_the_region(monkeypatch: pytest.MonkeyPatch):
    region = make_regions()[0].over(0)
    error = RuntimeError("C++ compile error: cc1plus: out of memory allocating 65536 bytes")
    monkeypatch.setattr(CompiledRegion, "_trace", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(MemoryError):  # it ends the compiling process
        region.write()
    assert not region.is_cached


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: InductorError(error, None)])
def test_a_full_disk_is_named_and_not_recorded_as_a_property_of_the_region(
    wrap: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    region = make_regions()[0].over(0)
    error = wrap(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(CompiledRegion, "_trace", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(ConfigError, match=rf"in {cache}/inductor/.*No space left on device; .* set XDG_CACHE_HOME"):
        region.write()
    assert not region.is_cached


@pytest.mark.usefixtures("cache")
def test_a_plan_runs_without_the_variants_whose_compiler_was_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def kill(*_: object) -> None:
        raise CaptureError("the process that compiled fused1 ended: killed by SIGKILL")

    region = make_regions()[0].over(0)
    for module in (region_program, compiled_region):
        monkeypatch.setattr(module, "compile_in_pool", kill)
    load_variants([region])
    assert region.is_loaded, "it copies, and no step tries again"
    assert "1 regions copy an output over their input" in capsys.readouterr().err
    with pytest.raises(CaptureError, match="SIGKILL"):
        region.compile()


def test_kernels_that_others_could_write_are_refused(cache: Path):
    directory = kernel_cache.kernel_directory()
    assert directory == cache
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        kernel_cache.kernel_directory()


def test_a_region_arrives_in_a_compiling_process_with_the_same_ops():
    region = make_regions()[0]
    copied, *settings = pickle.loads(encode_request(region, 3, torch.float64))
    assert settings == [3, torch.float64]
    assert (copied.signature, copied.region.source) == (region.signature, region.region.source)
    assert copied.region.calls == region.region.calls


def test_a_region_with_a_batch_norm_arrives_in_a_compiling_process():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    workload = Workload(model, lambda model, x: model(x).square().sum(), None, torch.rand(2, 2, 6, 6))
    for region in list_regions(fuse(capture(workload))):
        arrived, *_ = pickle.loads(encode_request(region, 2, torch.float32))
        assert (arrived.signature, arrived.region.source) == (region.signature, region.region.source)
