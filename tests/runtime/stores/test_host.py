"""The slab of pinned host memory: what it gives back, and which stream waits for what, on a GPU that is made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import ConfigError, StoreError
from autotune.ir.costs import Costs
from autotune.runtime.offload.engine import OffloadEngine
from autotune.runtime.stores import DEVICE_KINDS, STORES, measure_stores, open_store
from autotune.runtime.stores.pinned_host import HostStore


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")


class FakeEvent:
    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.name, self.at = cuda, "", 0.0

    def record(self, stream: FakeStream) -> None:
        self.cuda.clock += 1.0
        self.at = self.cuda.clock
        self.name = f"{stream.name}@{self.at:g}"

    def query(self) -> bool:
        return self.at <= self.cuda.reached

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1e3 * (other.at - self.at)


class FakeCuda:
    """Streams and events that say what they were asked for; copies happen at once, on the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock, self.reached = 0.0, float("inf")
        self.compute = FakeStream(self, "compute")
        self.made = iter(("out", "back"))
        self.registered: dict[int, int] = {}
        self.error = 0

    def is_available(self) -> bool:
        return True

    def Stream(self) -> FakeStream:
        return FakeStream(self, next(self.made))

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.compute

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.compute = self.compute, stream
        yield
        self.compute = before

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def cudart(self) -> "FakeCuda":
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def opened(cuda: FakeCuda, **slots: int) -> HostStore:
    return HostStore("host", Path("/"), {int(key[1:]): nbytes for key, nbytes in slots.items()}, cuda=cuda)


def test_what_was_put_comes_back_in_fresh_memory_or_into_a_tensor(cuda: FakeCuda):
    tensor = torch.randn(3, 5).t()
    with opened(cuda, s0=60, s7=100) as store:
        store.put(7, tensor).result()
        back = store.fetch(7).result()
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.data_ptr() != tensor.data_ptr()
        into = torch.zeros(15)
        assert store.fetch(7, into).result() is into
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


def test_a_copy_out_waits_for_what_made_the_tensor_and_its_memory_is_free_only_behind_the_copy(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        cuda.log.clear()
        future = store.put(0, torch.zeros(10))
        first, *rest = cuda.log
        assert first.startswith("out waits for compute@")
        assert rest == []
        future.exception()
        assert cuda.log[-1].startswith("compute waits for out@")


def test_a_copy_back_waits_for_its_memory_and_for_the_copy_out_and_the_next_copy_out_for_it(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        store.put(0, torch.zeros(10))
        cuda.log.clear()
        store.fetch(0).result()
        assert [line.partition("@")[0] for line in cuda.log] == [
            "back waits for compute", "back waits for out", "compute waits for back",
        ]  # fmt: skip
        cuda.log.clear()
        store.put(0, torch.zeros(10))
        assert [line.partition("@")[0] for line in cuda.log] == ["out waits for compute", "out waits for back"]


def test_a_transfer_is_done_and_told_when_the_gpu_got_there(cuda: FakeCuda):
    with opened(cuda, s0=40) as store:
        cuda.reached = cuda.clock + 2
        future = store.put(0, torch.zeros(10))
        assert not future.done()
        assert store.transfers() == []
        cuda.reached = float("inf")
        assert future.done()
        ((verb, start, end),) = store.transfers()
        assert (verb, end - start) == ("write", pytest.approx(1.0))
        assert store.transfers() == []


def test_a_step_through_it_ends_right(cuda: FakeCuda):
    weight, value = torch.arange(10.0), torch.randn(7)
    with opened(cuda, s0=40, s1=28) as store:
        engine = OffloadEngine(store, {0: lambda: [weight]}, 2)
        with engine:
            engine.start_write(0)
            engine.start_write(1, value)
            engine.finish_write(0)
            engine.finish_write(1)
            assert weight.untyped_storage().nbytes() == 0
            engine.start_read(0)
            engine.start_read(1)
            engine.finish_read(0)
            assert torch.equal(engine.finish_read(1), value)
    assert torch.equal(weight, torch.arange(10.0))
    assert engine.transfer_bytes == 2 * 68


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


def test_memory_that_cannot_be_pinned_is_told_with_the_way_out(cuda: FakeCuda):
    cuda.error = 2
    with pytest.raises(StoreError, match=r"4096 B of host memory cannot be pinned \(CUDA error 2\); raise the limit"):
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
    with pytest.raises(ConfigError, match=r"'ssd' takes no tensors of device cuda; use --store host=DIR"):
        measure_stores(Costs((), ()), {"ssd": tmp_path}, "cuda")


@pytest.mark.gpu
def test_on_a_real_gpu_values_come_back_beside_computing():
    left = torch.randn(2048, 2048, device="cuda")
    values: list[Any] = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
    expected = [value.cpu() for value in values]
    with open_store("host", "/", dict.fromkeys(range(8), 4 << 20)) as store:
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
