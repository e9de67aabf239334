"""The file of a GPU's values: the contract of stores, and which copy waits for what, on a GPU that is made up."""

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from autotune.errors import StoreError
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.stores import Direction, open_store
from autotune.runtime.stores.gpu_slab_store import GpuSlabStore
from autotune.runtime.stores.slab_file import CHUNK_BYTES
from autotune.testing.store_contract import Opener, StoreContract, random_bytes
from tests.support.fake_cuda import COPY_BYTES_PER_SECOND, FakeCuda


class TestGpuSlabStore(StoreContract):
    verified: ClassVar = {"checksums": "all"}
    option_sets: ClassVar = [{"checksums": checksums} for checksums in ("all", "sampled", "off")]

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return partial(GpuSlabStore, "ssd", tmp_path, cuda=FakeCuda())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def opened(cuda: FakeCuda, directory: Path, *slots: int, **options: Any) -> GpuSlabStore:
    return GpuSlabStore("ssd", directory, dict(enumerate(slots)), cuda=cuda, checksums="all", **options)


def test_a_write_has_what_the_computing_stream_writes_before_it(cuda: FakeCuda, tmp_path: Path):
    with opened(cuda, tmp_path, 40) as store:
        value = torch.zeros(10)
        cuda.current_stream().run(1e-3, lambda: value.fill_(7.0))
        store.put(0, value).result()
        value.fill_(8.0)  # its memory may be used again
        assert torch.equal(store.fetch(0).result(), torch.full((10,), 7.0))


def test_a_read_is_not_overwritten_by_what_used_its_memory_before(cuda: FakeCuda, tmp_path: Path):
    with opened(cuda, tmp_path, 40) as store:
        store.put(0, torch.ones(10)).result()
        into = torch.zeros(10)
        cuda.current_stream().run(1e-3, lambda: into.fill_(9.0))
        assert store.fetch(0, into).result() is into
        cuda.synchronize()
        assert torch.equal(into, torch.ones(10))


def test_the_gpu_copies_the_next_part_while_the_disk_writes_one(cuda: FakeCuda, tmp_path: Path):
    queued: list[tuple[float, float]] = []

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        ends = store._streams[Direction.WRITE].free_at, cuda.now
        queued.append(tuple(round(end * COPY_BYTES_PER_SECOND / CHUNK_BYTES, 6) for end in ends))
        return os.pwritev(file, buffers, offset)

    value = random_bytes(6 * CHUNK_BYTES)
    with opened(cuda, tmp_path, value.nbytes, pwritev=pwritev) as store:
        store.put(0, value).result()
        # (copies queued, copies ended) in pieces, as the disk begins to write each
        assert queued == [(4, 1), (5, 2), (6, 3), (6, 4), (6, 5), (6, 6)]
        assert torch.equal(store.fetch(0).result(), value)


def fail(*_: object) -> int:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("seam", "verb"), [("pwritev", "write"), ("preadv", "read")])
def test_after_an_error_of_the_disk_no_copy_is_in_flight_and_the_memory_is_unpinned(
    seam: str, verb: str, cuda: FakeCuda, tmp_path: Path
):
    calls = 0
    plain: Callable[..., int] = getattr(os, seam)

    def second_fails(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return fail() if calls == 2 else plain(*arguments)

    value = random_bytes(3 * CHUNK_BYTES)
    with opened(cuda, tmp_path, value.nbytes, **{seam: second_fails}) as store:
        written = store.put(0, value)
        with pytest.raises(
            StoreError, match=rf"cannot {verb} slot 0 of .* bytes \(Input/output error\); check the disk"
        ):
            (store.fetch(0) if verb == "read" else written).result()
        assert cuda._queued == []
        assert len(cuda.registered) == 1
    assert cuda.registered == {}


def test_a_step_through_it_is_told_by_the_clock_of_the_gpu(cuda: FakeCuda, tmp_path: Path):
    weight, value = torch.arange(10.0), torch.randn(7)
    with opened(cuda, tmp_path, 40, 28) as store, OffloadEngine(store, {0: lambda: [weight]}, 2) as engine:
        cuda.current_stream().run(1e-3)
        engine.start_write(0)
        engine.start_write(1, value)
        engine.finish_write(0)
        engine.finish_write(1)
        assert weight.untyped_storage().nbytes() == 0
        cuda.current_stream().run(2e-3)
        engine.start_read(0)
        engine.start_read(1)
        engine.finish_read(0)
        assert torch.equal(engine.finish_read(1), value)
    assert torch.equal(weight, torch.arange(10.0))
    trace = engine.transfer_trace
    assert trace.seconds == pytest.approx(3e-3, rel=0.01)
    assert len(trace.saves) == len(trace.loads) == 2
    # values were computed, and memory in use, until then
    assert min(start for start, _ in trace.saves) == pytest.approx(1e-3)
    assert min(start for start, _ in trace.loads) == pytest.approx(3e-3, rel=0.01)
    assert all(start <= end <= trace.seconds for start, end in (*trace.saves, *trace.loads))
    assert trace.stall_seconds == pytest.approx(1e-6, rel=1)


def test_values_of_one_gpu_only(tmp_path: Path):
    with opened(FakeCuda(2), tmp_path, 40) as store:
        store._streams.bind(torch.device("cuda", 1))
        with pytest.raises(StoreError, match="holds values of cuda:1, not of cpu; put model and batch on one GPU"):
            store.put(0, torch.zeros(10))
        with pytest.raises(StoreError, match="slot 0 was fetched before anything was put there"):
            store.fetch(0)


def test_memory_that_cannot_be_pinned_leaves_no_open_file(cuda: FakeCuda, tmp_path: Path):
    cuda.error = 2
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StoreError, match=r"ssd store: 16.0 MiB of host memory cannot be pinned"):
        opened(cuda, tmp_path, 40)
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_closed_store_frees_its_pinned_memory_although_executors_refer_to_it(cuda: FakeCuda, tmp_path: Path):
    store = opened(cuda, tmp_path, 40)
    buffers = [weakref.ref(buffer) for buffer in store._buffers.values()]
    store.close()
    assert [buffer() for buffer in buffers] == [None, None]
    assert store._cleanups == [], "the function that unpins the memory refers to it"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path):
    with pytest.raises(
        StoreError, match="opened for values of a GPU, and torch finds no GPU; autotune doctor says why"
    ):
        open_store("ssd", tmp_path, {0: 1}, "cuda")


def test_an_error_of_the_gpu_is_that_of_the_store_and_its_slot_returns_no_other_bytes(cuda: FakeCuda, tmp_path: Path):
    value = torch.ones(10)
    with opened(cuda, tmp_path, 40) as store:
        store.put(0, value).result()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store._streams, "current", broken)
            with pytest.raises(
                StoreError, match=r"\(CUDA error: unspecified launch failure\); check the GPU with nvidia-smi"
            ):
                store.put(0, value * 2).result()
        with pytest.raises(StoreError, match="cannot write slot 0"):
            store.fetch(0).result()


def broken(direction: Direction) -> Any:
    raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")


def test_a_tensor_of_the_cpu_is_refused_and_the_store_stays_usable(cuda: FakeCuda, tmp_path: Path):
    with opened(cuda, tmp_path, 40) as store:
        store._kind = "cuda"
        with pytest.raises(StoreError, match=r"takes plain dense tensors of a GPU, not torch\.strided on cpu"):
            store.put(0, torch.zeros(10))
        assert store._streams.device is None
