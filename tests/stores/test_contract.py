"""What every store promises, whatever lies under it."""

import gc
import itertools
import mmap
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import ConfigError, StoreError
from autotune.runtime.stores import FOR, STORES, SwapStore, open_store
from autotune.runtime.stores import slab_file as slab

MIB = 2**20
TMPFS = Path("/dev/shm")
KINDS = [*(name for name in STORES if FOR[name] == "cpu"), "ssd without O_DIRECT", "ssd without O_TMPFILE"]

Opener = Callable[..., SwapStore]


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if request.param == "ssd without O_DIRECT":
        monkeypatch.setattr(slab, "_bypass_page_cache", lambda file: False)
    if request.param == "ssd without O_TMPFILE":
        plain_open = os.open

        def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "Operation not supported")
            return plain_open(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", refusing)
    if request.param != "ramdisk":
        yield tmp_path
        return
    if not TMPFS.is_dir():
        pytest.skip("this machine has no /dev/shm")
    memory = Path(tempfile.mkdtemp(dir=TMPFS))
    yield memory
    shutil.rmtree(memory)


@pytest.fixture
def opener(request: pytest.FixtureRequest, directory: Path) -> Opener:
    kind = request.node.callspec.params["directory"]
    return partial(open_store, kind.split()[0], directory)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    described = [(t.dtype, t.size(), t.stride(), t.storage_offset()) for t in (left, right)]
    return described[0] == described[1] and torch.equal(raw(left), raw(right))


def random_tensor(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8]
SIZES = [1, 4095, 4096, 4097, slab.CHUNK_BYTES - 1, slab.CHUNK_BYTES, slab.CHUNK_BYTES + 1, 3 * slab.CHUNK_BYTES + 4321]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_comes_back_bit_for_bit(opener: Opener, nbytes: int) -> None:
    with opener({5: nbytes}, checksums="all") as store:
        tensor = random_tensor(nbytes)
        store.put(5, tensor).result()
        assert same_bits(store.fetch(5).result(), tensor)


def lying_well(nbytes: int, seed: int = 0) -> torch.Tensor:
    """As an arena's tensors lie: on a page."""
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    return tensor.copy_(random_tensor(nbytes, seed))


@pytest.mark.parametrize("nbytes", [*SIZES, slab.DIRECT_BYTES - 4096, slab.DIRECT_BYTES, 2 * slab.DIRECT_BYTES + 4097])
def test_every_size_comes_back_where_the_disk_may_take_it_itself(opener: Opener, nbytes: int) -> None:
    with opener({5: nbytes}, checksums="all") as store:
        tensor, into = lying_well(nbytes), lying_well(nbytes, seed=1)
        store.put(5, tensor).result()
        assert same_bits(store.fetch(5, into).result(), tensor)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    shuffle=st.randoms(use_true_random=False),
    checksums=st.sampled_from(["all", "sampled", "off"]),
)
def test_every_dtype_shape_and_permutation_comes_back_the_same(
    opener: Opener, dtype: torch.dtype, shape: list[int], shuffle: Any, checksums: str
) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    axes = list(range(len(shape)))
    shuffle.shuffle(axes)
    tensor = tensor.permute(axes)
    with opener({0: tensor.untyped_storage().nbytes()}, checksums=checksums) as store:
        store.put(0, tensor).result()
        back = store.fetch(0).result()
        assert same_bits(back, tensor)
        assert back.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_a_tensor_of_no_bytes_comes_back_with_its_shape(opener: Opener) -> None:
    with opener({0: 0}) as store:
        store.put(0, torch.empty(3, 0, 2, dtype=torch.bfloat16)).result()
        back = store.fetch(0).result()
        assert back.shape == (3, 0, 2)
        assert back.dtype == torch.bfloat16


def test_channels_last_stays_channels_last(opener: Opener) -> None:
    tensor = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    with opener({0: 2 * 3 * 5 * 7 * 4}) as store:
        store.put(0, tensor).result()
        assert same_bits(store.fetch(0).result(), tensor)


def test_a_fetch_right_after_the_put_waits_for_the_write(opener: Opener) -> None:
    tensors = [random_tensor(3 * MIB, seed) for seed in range(6)]
    with opener(dict.fromkeys(range(6), 3 * MIB)) as store:
        fetched = []
        for key, tensor in enumerate(tensors):
            store.put(key, tensor)
            fetched.append(store.fetch(key))
        assert all(same_bits(future.result(), tensor) for future, tensor in zip(fetched, tensors, strict=True))


def test_each_fetch_gives_the_put_before_it(opener: Opener) -> None:
    tensors = [random_tensor(2 * MIB + 7, seed) for seed in range(8)]
    with opener({0: 3 * MIB}, checksums="all") as store:
        fetched = []
        for tensor in tensors:  # nobody waits: the second put must not overtake the first fetch
            store.put(0, tensor)
            fetched.append(store.fetch(0))
        assert all(same_bits(future.result(), tensor) for future, tensor in zip(fetched, tensors, strict=True))


def test_a_slot_takes_another_shape_in_the_next_step(opener: Opener) -> None:
    with opener({0: 4096}, checksums="all") as store:
        store.put(0, torch.arange(512)).result()
        store.put(0, torch.ones(2, 3)).result()
        assert store.fetch(0).result().tolist() == [[1, 1, 1], [1, 1, 1]]


def test_neighbouring_slots_of_odd_sizes_do_not_touch(opener: Opener) -> None:
    sizes = {3: 1, 1: 4097, 4: 0, 2: 4096, 9: slab.CHUNK_BYTES + 1}
    with opener(sizes, checksums="all") as store:
        for key, nbytes in sizes.items():
            store.put(key, random_tensor(nbytes, key))
        for key, nbytes in reversed(sizes.items()):
            assert same_bits(store.fetch(key).result(), random_tensor(nbytes, key))


def test_the_tensor_is_let_go_before_its_write_is_done(opener: Opener) -> None:
    with opener({0: MIB}) as store:
        for _ in range(20):
            tensor = random_tensor(MIB)
            gone = weakref.ref(tensor.untyped_storage())
            alive = weakref.ref(tensor)
            future = store.put(0, tensor)
            del tensor
            future.result()
            assert alive() is None
            assert gone() is None


def test_the_tensor_lives_until_its_write_is_done(opener: Opener) -> None:
    gate = threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return os.pwritev(file, buffers, offset)

    with opener({0: MIB}, pwritev=slow) as store:
        tensor = random_tensor(MIB)
        alive = weakref.ref(tensor)
        future = store.put(0, tensor)
        del tensor
        assert not future.done()
        gate.set()
        future.result()
        assert alive() is None
        assert same_bits(store.fetch(0).result(), random_tensor(MIB))


def test_a_fetched_tensor_belongs_to_the_caller_alone(opener: Opener) -> None:
    with opener({0: MIB}) as store:
        store.put(0, random_tensor(MIB)).result()
        future = store.fetch(0)
        alive = weakref.ref(future.result())
        del future
        store.fetch(0).result()  # the reading worker has gone on, so it has let go
        assert alive() is None


def test_memory_for_a_fetch_is_taken_in_the_calling_thread(opener: Opener) -> None:
    gate = threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return os.preadv(file, buffers, offset)

    with opener({0: 7 * MIB}, preadv=slow) as store:
        store.put(0, random_tensor(7 * MIB)).result()
        with torch.profiler.profile(profile_memory=True) as profiler:
            future = store.fetch(0)
        gate.set()
        future.result()
    assert sum(event.self_cpu_memory_usage for event in profiler.events()) == 7 * MIB


def test_every_transfer_is_told_once_with_its_bytes_and_its_time(opener: Opener) -> None:
    with opener({0: 5000, 1: MIB}) as store:
        wait([store.put(0, random_tensor(5000)), store.put(1, random_tensor(MIB))])
        assert (store.written_bytes, store.read_bytes) == (5000 + MIB, 0)
        store.fetch(0).result()
        store.fetch(0).result()
        assert (store.written_bytes, store.read_bytes) == (5000 + MIB, 10000)
        moved = store.transfers()
        assert [verb for verb, _, _ in sorted(moved)] == ["read", "read", "write", "write"]
        assert all(start < end for _, start, end in moved)
        assert store.transfers() == []


def test_what_comes_back_into_a_tensor_fills_its_own_memory(opener: Opener) -> None:
    tensor = random_tensor(5000)
    expected, where = tensor.clone(), tensor.data_ptr()
    with opener({0: 5000}, checksums="all") as store:
        store.put(0, tensor).result()
        tensor.zero_()
        assert store.fetch(0, tensor).result() is tensor
        with pytest.raises(StoreError, match="slot 0 holds 5000 bytes, not the 4999 to fill"):
            store.fetch(0, random_tensor(4999))
    assert tensor.data_ptr() == where
    assert torch.equal(tensor, expected)


def test_nothing_is_ever_seen_in_the_directory(opener: Opener, directory: Path) -> None:
    with opener({0: MIB}) as store:
        assert list(directory.iterdir()) == []
        store.put(0, random_tensor(MIB)).result()
        assert list(directory.iterdir()) == []
    assert list(directory.iterdir()) == []


def slab_files() -> list[os.stat_result]:
    """Of this process: open regular files that no directory names."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            found.append(status)
    return found


def test_the_file_is_allocated_in_full_at_opening_and_private(opener: Opener) -> None:
    others = {status.st_ino for status in slab_files()}
    with opener({0: 5 * MIB, 1: 1, 2: 4097}):
        (file,) = [status for status in slab_files() if status.st_ino not in others]
        assert file.st_size == 5 * MIB + 4096 + 2 * 4096
        assert file.st_blocks * 512 >= file.st_size
        assert stat.S_IMODE(file.st_mode) == 0o600


@pytest.mark.parametrize("how", ["closed", "closed twice", "exception", "forgotten"])
def test_the_file_and_the_threads_are_gone_after(opener: Opener, how: str) -> None:
    before, threads = len(slab_files()), set(threading.enumerate())
    store: SwapStore | None = opener({0: MIB})
    assert store is not None
    assert len(slab_files()) == before + 1
    match how:
        case "closed" | "closed twice":
            store.close()
            if how == "closed twice":
                store.close()
        case "exception":
            with pytest.raises(ZeroDivisionError), store:
                raise ZeroDivisionError
        case "forgotten":
            store = None
            gc.collect()
    assert len(slab_files()) == before
    assert set(threading.enumerate()) <= threads


def test_closing_fails_what_is_not_begun_and_hangs_on_nothing(opener: Opener) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        gate.wait(10)
        return os.pwritev(file, buffers, offset)

    store = opener(dict.fromkeys(range(4), 4096), pwritev=slow)
    puts = [store.put(key, random_tensor(4096)) for key in range(4)]
    fetches = [store.fetch(key) for key in range(4)]
    begun.wait(10)
    closing = threading.Thread(target=store.close)
    closing.start()
    while closing.is_alive() and not store._reader._stopping:  # type: ignore[attr-defined]
        time.sleep(0.001)
    gate.set()
    closing.join(10)
    assert puts[0].exception(10) is None
    for future in [*puts[1:], *fetches[1:]]:
        assert "closed" in str(future.exception(10))


def test_a_closed_store_says_so(opener: Opener) -> None:
    store = opener({0: 4096})
    store.close()
    assert store.held_bytes() == 0
    with pytest.raises(StoreError, match="is closed"):
        store.put(0, random_tensor(1))
    with pytest.raises(StoreError, match="is closed"):
        store.fetch(0)


def test_two_stores_in_one_directory_do_not_meet(opener: Opener) -> None:
    with opener({0: MIB}) as first, opener({0: MIB}) as second:
        first.put(0, random_tensor(MIB, 1))
        second.put(0, random_tensor(MIB, 2))
        assert same_bits(first.fetch(0).result(), random_tensor(MIB, 1))
        assert same_bits(second.fetch(0).result(), random_tensor(MIB, 2))


def test_wrong_keys_and_tensors_are_refused_by_name(opener: Opener) -> None:
    with opener({7: 4096}) as store:
        with pytest.raises(StoreError, match="no slot 8"):
            store.put(8, random_tensor(1))
        with pytest.raises(StoreError, match="slot 7 was fetched before"):
            store.fetch(7)
        with pytest.raises(StoreError, match="slot 7 has 4096 bytes; a tensor of 4097"):
            store.put(7, random_tensor(4097))
        with pytest.raises(StoreError, match=r"not torch\.strided on meta"):
            store.put(7, torch.empty(1, device="meta"))


def test_naming_the_stores_imports_no_torch() -> None:
    code = "import sys; from autotune.runtime.stores import STORES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_store_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown store 'sdd'; known: host, ramdisk, ssd"):
        open_store("sdd", tmp_path, {})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9000)), max_size=25),
    sizes=st.just({0: 9000, 1: 9000, 2: 9000}),
)
def test_any_series_of_puts_and_fetches_acts_like_a_dict(
    opener: Opener, moves: list[tuple[bool, int, int]], sizes: Mapping[int, int]
) -> None:
    model: dict[int, torch.Tensor] = {}
    with opener(sizes, checksums="all") as store:
        pending = []
        for number, (write, key, nbytes) in zip(itertools.count(), moves, strict=False):
            if write:
                model[key] = random_tensor(nbytes, number)
                store.put(key, model[key])
            elif key in model:
                pending.append((store.fetch(key), model[key]))
        assert all(same_bits(future.result(), expected) for future, expected in pending)
