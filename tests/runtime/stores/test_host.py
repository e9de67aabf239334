"""The slab of pinned host memory: what it gives back, and which stream waits for what, on a GPU that is made up."""

import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import ConfigError, StoreError
from autotune.ir.costs import Costs
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.stores import DEVICE_KINDS, STORES, Direction, measure_stores, open_store
from autotune.runtime.stores.pinned_host import HostStore
from autotune.runtime.stores.probe import measure_contention, measure_speed
from tests.support.fake_cuda import COPY_BYTES_PER_SECOND, FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def opened(cuda: FakeCuda, **slots: int) -> HostStore:
    return HostStore("host", Path("/"), {int(key[1:]): nbytes for key, nbytes in slots.items()}, cuda=cuda)


def test_what_was_put_comes_back_in_fresh_memory_or_into_a_tensor(cuda: FakeCuda):
    tensor = torch.randn(3, 5).t()
    with opened(cuda, s0=60, s7=100) as store:
        store.put(7, tensor).result()
        back = store.fetch(7).result()
        cuda.synchronize()
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.data_ptr() != tensor.data_ptr()
        into = torch.zeros(15)
        assert store.fetch(7, into).result() is into
        assert not into.any()  # it is only queued
        cuda.synchronize()
        assert torch.equal(into.view(3, 5).t(), tensor)
        assert (store.written_bytes, store.read_bytes) == (60, 120)


def test_the_slab_is_pinned_in_whole_pages_and_given_back_once(cuda: FakeCuda):
    store = opened(cuda, s0=4097, s1=1)
    assert list(cuda.registered.values()) == [3 * 4096]
    store.close()
    store.close()
    assert cuda.registered == {}
    with pytest.raises(StoreError, match="host store is closed; open it again"):
        store.put(0, torch.zeros(1))


def test_a_closed_store_frees_its_memory_although_executors_refer_to_it(cuda: FakeCuda):
    store = opened(cuda, s0=4096)
    slab = weakref.ref(store._slab)
    store.close()
    assert slab() is None


def logged(cuda: FakeCuda) -> list[str]:
    """Each wait as `waiter < event's stream`; the two copying streams are made when the first tensor comes."""
    names = {"stream 1": "out", "stream 2": "back", "compute": "compute"}
    parts = [line.split(" waits for ") for line in cuda.log if " waits for " in line]
    return [f"{names[waiter]} < {names[event.partition('@')[0]]}" for waiter, event in parts]


def test_a_copy_out_waits_for_what_made_the_tensor_and_its_memory_is_free_only_behind_the_copy(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        future = store.put(0, torch.zeros(10))
        assert logged(cuda) == ["out < compute"]
        future.exception()
        assert logged(cuda)[-1] == "compute < out"


def test_a_copy_out_has_what_the_computing_stream_writes_before_it_and_nothing_later(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        value = torch.zeros(10)
        cuda.current_stream().run(1e-3, lambda: value.fill_(7.0))
        written = store.put(0, value)
        written.exception()  # the memory may be used again behind this
        cuda.current_stream().run(1e-3, lambda: value.fill_(8.0))
        back = store.fetch(0).result()
        cuda.synchronize()
        assert torch.equal(back, torch.full((10,), 7.0))


def test_a_copy_back_waits_for_its_memory_and_for_the_copy_out_and_the_next_copy_out_for_it(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        store.put(0, torch.zeros(10))
        cuda.log.clear()
        store.fetch(0).result()
        assert logged(cuda) == ["back < compute", "back < out", "compute < back"]
        cuda.log.clear()
        store.put(0, torch.zeros(10))
        assert logged(cuda) == ["out < compute", "out < back"]


def test_a_transfer_is_done_and_told_when_the_gpu_got_there(cuda: FakeCuda):
    with opened(cuda, s0=4000) as store:
        future = store.put(0, torch.zeros(1000))
        assert not future.done()
        assert store.transfers() == []
        cuda.synchronize()
        assert future.done()
        ((verb, start, end),) = store.transfers()
        assert (verb, end - start) == ("write", pytest.approx(4000 / COPY_BYTES_PER_SECOND))
        assert store.transfers() == []


def test_a_step_through_it_ends_right(cuda: FakeCuda):
    weight, value = torch.arange(10.0), torch.randn(7)
    with opened(cuda, s0=40, s1=28) as store:
        engine = OffloadEngine(store, {0: lambda: [weight]}, 2)
        with engine:
            engine.start_write(0)
            engine.start_write(1, value)
            cuda.synchronize()
            engine.finish_write(0)
            engine.finish_write(1)
            assert weight.untyped_storage().nbytes() == 0
            engine.start_read(0)
            engine.start_read(1)
            engine.finish_read(0)
            back = engine.finish_read(1)
        cuda.synchronize()
    assert back is not None
    assert torch.equal(back, value)
    assert torch.equal(weight, torch.arange(10.0))
    assert engine.transfer_bytes == 2 * 68


def queue_step(cuda: FakeCuda, engine: OffloadEngine, value: torch.Tensor, beside_seconds: float) -> None:
    """Offload a value and fetch it back, with computing beside the copy out."""
    with engine:
        engine.start_write(0, value)
        cuda.current_stream().run(beside_seconds)
        engine.finish_write(0)
        engine.start_read(0)
        engine.finish_read(0)


def test_stalls_are_what_the_gpu_waited_though_the_host_only_queued_the_step(cuda: FakeCuda):
    copy = 4_000_000 / COPY_BYTES_PER_SECOND
    with opened(cuda, s0=4_000_000) as store:
        engine = OffloadEngine(store, {}, 1)
        queue_step(cuda, engine, torch.zeros(1_000_000), beside_seconds=copy / 4)
        assert cuda.now == 0.0  # nothing has run yet
        trace = engine.transfer_trace
    ((write_start, write_end),), ((read_start, read_end),) = trace.saves, trace.loads
    assert (write_start, write_end) == pytest.approx((0.0, copy))
    assert (read_start, read_end) == pytest.approx((copy, 2 * copy))
    assert trace.stall_seconds == pytest.approx(copy * 3 / 4 + copy)
    assert trace.seconds == pytest.approx(2 * copy)


def test_the_transfers_of_a_step_are_its_own_though_the_next_one_is_queued_first(cuda: FakeCuda):
    with opened(cuda, s0=4000) as store:
        engine = OffloadEngine(store, {}, 1)
        queue_step(cuda, engine, torch.zeros(1000), beside_seconds=0.0)
        first = engine.pending_trace
        queue_step(cuda, engine, torch.zeros(10), beside_seconds=0.0)
        assert [end - start for start, end in first().saves] == pytest.approx([4000 / COPY_BYTES_PER_SECOND])
        assert [end - start for start, end in engine.transfer_trace.saves] == pytest.approx(
            [40 / COPY_BYTES_PER_SECOND]
        )


def test_copies_are_queued_on_streams_of_the_tensors_gpu_and_another_gpu_is_refused(cuda: FakeCuda):
    cuda = FakeCuda(devices=2)
    with opened(cuda, s0=40) as store:
        store._streams.bind(torch.device("cuda", 1))
        assert {store._streams[direction].device for direction in Direction} == {1}
        with pytest.raises(StoreError, match="holds values of cuda:1, not of cpu; put model and batch on one GPU"):
            store.put(0, torch.zeros(10))


@pytest.fixture
def host_store(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probe open the store of the made-up GPU, with tensors that are on the CPU."""
    monkeypatch.setitem(STORES, "host", partial(STORES["host"], cuda=cuda))
    compute = cuda.default[0]
    monkeypatch.setattr(torch, "mm", lambda left, right: compute.run(20e-6))


@pytest.mark.usefixtures("host_store")
def test_the_product_beside_transfers_waits_for_none_of_them(cuda: FakeCuda):
    measure_contention("host", "/", seconds=1e-3, repeats=2, cuda=cuda)
    waits = [line for line in cuda.log if line.startswith("compute waits for")]
    assert len(waits) == 2  # each slot is filled once before anything is measured
    assert cuda.log.count("synchronize") == 1  # when the store closes


@pytest.mark.usefixtures("host_store")
def test_the_probe_of_pinned_memory_measures_the_copies_and_looks_at_no_directory(cuda: FakeCuda):
    cost = measure_speed("host", "/nowhere", nbytes=64 * 2**20, repeats=1, cuda=cuda)
    assert cost.write_bytes_per_second == pytest.approx(COPY_BYTES_PER_SECOND, rel=0.2)
    assert cost.read_bytes_per_second == pytest.approx(COPY_BYTES_PER_SECOND, rel=0.2)


def test_what_does_not_fit_or_was_never_put_is_refused(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        with pytest.raises(StoreError, match="slot 0 has 40 bytes; a tensor of 44 does not fit"):
            store.put(0, torch.zeros(11))
        with pytest.raises(StoreError, match="slot 0 was fetched before anything was put there"):
            store.fetch(0)
        with pytest.raises(StoreError, match="no slot 1; it was opened with 1 others"):
            store.put(1, torch.zeros(1))
        store.put(0, torch.zeros(10))
        with pytest.raises(StoreError, match="slot 0 holds 40 bytes, not the 44 to fill"):
            store.fetch(0, torch.zeros(11))


def test_a_fork_leaves_the_pinned_memory_out(cuda: FakeCuda):
    with opened(cuda, s0=2 * 2**20):
        (address,) = cuda.registered
        maps = Path("/proc/self/smaps").read_text().split("\n")
        start = next(i for i, line in enumerate(maps) if re.match(r"[0-9a-f]+-", line) and contains(line, address))
        flags = next(line for line in maps[start:] if line.startswith("VmFlags"))
        assert " dc" in flags  # not copied on fork
        assert " hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def contains(line: str, address: int) -> bool:
    first, _, last = line.split(maxsplit=1)[0].partition("-")
    return int(first, 16) <= address < int(last, 16)


def test_memory_that_cannot_be_pinned_is_told_with_the_way_out(cuda: FakeCuda):
    cuda.error = 2
    with pytest.raises(StoreError, match=r"4096 B of host memory cannot be pinned \(CUDA error 2\); the host's memory"):
        opened(cuda, s0=40)
    cuda.error = 999
    with pytest.raises(StoreError, match=r"\(CUDA error 999\); check the driver with nvidia-smi"):
        opened(cuda, s0=40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(StoreError, match="torch finds no GPU; use --store ssd=DIR"):
        open_store("host", "/", {0: 1})


def test_a_store_of_another_kind_of_device_is_refused_before_it_is_measured(tmp_path: Path):
    assert DEVICE_KINDS.keys() == STORES.keys()
    with pytest.raises(
        ConfigError, match=r"'host' takes no tensors of device cpu; use --store ssd=DIR, --store ramdisk"
    ):
        measure_stores(Costs((), ()), {"host": tmp_path})
    with pytest.raises(
        ConfigError, match=r"'ramdisk' takes no tensors of device cuda; use --store ssd=DIR, --store host=DIR"
    ):
        measure_stores(Costs((), ()), {"ramdisk": tmp_path}, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, kinds in DEVICE_KINDS.items() if "cuda" in kinds])
def test_on_a_real_gpu_values_come_back_beside_computing(name: str, tmp_path: Path):
    left = torch.randn(2048, 2048, device="cuda")
    values: list[Any] = [torch.randn((5 << 20) + 3, device="cuda") for _ in range(8)]
    expected = [value.cpu() for value in values]
    with open_store(name, tmp_path, dict.fromkeys(range(8), 32 << 20), "cuda") as store:
        for _ in range(3):
            written = [store.put(key, value) for key, value in enumerate(values)]
            for _ in range(20):
                left = torch.mm(left, left).div_(2048)
            for future in written:
                future.exception()
            values.clear()
            torch.randn(32 << 20, device="cuda")  # takes the memory that was given back
            values = [store.fetch(key).result() for key in range(8)]
            assert all(torch.equal(value.cpu(), true) for value, true in zip(values, expected, strict=True))
        torch.cuda.synchronize()
        assert len(store.transfers()) == 48
