"""Every store keeps the contract, and those over a file leave nothing of it behind."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch

from autotune.errors import ConfigError, StoreError
from autotune.runtime.stores import DEVICE_KINDS, STORES, open_store
from autotune.runtime.stores import slab_file as slab
from autotune.testing.store_contract import (
    ENDINGS,
    MIB,
    Opener,
    StoreContract,
    has_same_bits,
    open_and_end,
    random_bytes,
)

TMPFS = Path("/dev/shm")
KINDS = [*(name for name in STORES if "cpu" in DEVICE_KINDS[name]), "ssd without O_DIRECT", "ssd without O_TMPFILE"]


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


def opener_of(request: pytest.FixtureRequest, directory: Path) -> Opener:
    return partial(open_store, request.node.callspec.params["directory"].split()[0], directory)


@pytest.fixture
def opener(request: pytest.FixtureRequest, directory: Path) -> Opener:
    return opener_of(request, directory)


class TestStores(StoreContract):
    verified: ClassVar = {"checksums": "all"}
    option_sets: ClassVar = [{"checksums": checksums} for checksums in ("all", "sampled", "off")]

    @pytest.fixture
    def opener(self, request: pytest.FixtureRequest, directory: Path) -> Opener:
        return opener_of(request, directory)

    def test_a_tensor_that_is_not_dense_is_refused_with_its_layout(self, opener: Opener) -> None:
        with opener({7: 4096}) as store, pytest.raises(StoreError, match=r"not torch\.strided on meta"):
            store.put(7, torch.empty(1, device="meta"))


class DictStore:
    """A third party's store: copies in a dictionary, made at once."""

    name, direct, holds_memory, pool_bytes = "dict", False, True, 0

    def __init__(self, slots: Mapping[int, int]) -> None:
        self.directory = Path()
        self.written_bytes = self.read_bytes = 0
        self._sizes: Mapping[int, int] | None = slots
        self._copies: dict[int, torch.Tensor] = {}
        self._transfers: list[tuple[str, float, float]] = []

    def put(self, key: int, tensor: torch.Tensor) -> "Future[None]":
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes > self._slot(key):
            raise StoreError(f"slot {key} has {self._slot(key)} bytes; a tensor of {nbytes} does not fit")
        if tensor.device.type != "cpu":
            raise StoreError(f"slot {key} takes no tensor on {tensor.device}")
        start = time.perf_counter()
        self._copies[key] = self._copy(tensor)
        self._transfers.append(("write", start, time.perf_counter()))
        self.written_bytes += nbytes
        return self._done(None)

    def fetch(self, key: int, into: torch.Tensor | None = None) -> "Future[torch.Tensor]":
        self._slot(key)
        if key not in self._copies:
            raise StoreError(f"slot {key} was fetched before anything was put there")
        start, nbytes = time.perf_counter(), self._copies[key].untyped_storage().nbytes()
        if into is None:
            into = self._copy(self._copies[key])
        elif into.untyped_storage().nbytes() != nbytes:
            raise StoreError(f"slot {key} holds {nbytes} bytes, not the {into.untyped_storage().nbytes()} to fill")
        else:
            into.untyped_storage().copy_(self._copies[key].untyped_storage())
        self._transfers.append(("read", start, time.perf_counter()))
        self.read_bytes += nbytes
        return self._done(into)

    def transfers(self) -> list[tuple[str, float, float]]:
        transfers, self._transfers = self._transfers, []
        return transfers

    def held_bytes(self) -> int:
        return sum(copy.untyped_storage().nbytes() for copy in self._copies.values())

    def close(self) -> None:
        self._sizes, self._copies = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _slot(self, key: int) -> int:
        if self._sizes is None:
            raise StoreError("dict store is closed")
        if key not in self._sizes:
            raise StoreError(f"no slot {key}")
        return self._sizes[key]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _done(self, result: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(result)
        return future


class TestStoreOfAThirdParty(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        return DictStore


class Forgetful(DictStore):
    """A store whose slots keep their first tensor."""

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return next(iter(self._copies.values()), super()._copy(tensor))


def test_a_store_that_keeps_an_old_tensor_breaks_the_contract() -> None:
    with pytest.raises(AssertionError):
        StoreContract().test_each_fetch_returns_the_put_before_it(Forgetful)


def test_the_tensor_lives_until_its_write_is_done(opener: Opener) -> None:
    gate = threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return os.pwritev(file, buffers, offset)

    with opener({0: MIB}, pwritev=slow) as store:
        tensor = random_bytes(MIB)
        alive = weakref.ref(tensor)
        future = store.put(0, tensor)
        del tensor
        assert not future.done()
        gate.set()
        future.result()
        assert alive() is None
        assert has_same_bits(store.fetch(0).result(), random_bytes(MIB))


def test_memory_for_a_fetch_is_taken_in_the_calling_thread(opener: Opener) -> None:
    gate = threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait(10)
        return os.preadv(file, buffers, offset)

    with opener({0: 7 * MIB}, preadv=slow) as store:
        store.put(0, random_bytes(7 * MIB)).result()
        with torch.profiler.profile(profile_memory=True) as profiler:
            future = store.fetch(0)
        gate.set()
        future.result()
    assert sum(event.self_cpu_memory_usage for event in profiler.events()) == 7 * MIB


def test_nothing_is_ever_seen_in_the_directory(opener: Opener, directory: Path) -> None:
    with opener({0: MIB}) as store:
        assert list(directory.iterdir()) == []
        store.put(0, random_bytes(MIB)).result()
        assert list(directory.iterdir()) == []
    assert list(directory.iterdir()) == []


def slab_files() -> list[os.stat_result]:
    """Of this process: open regular files that no directory names."""
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
            files.append(status)
    return files


def test_the_file_is_allocated_in_full_at_opening_and_private(opener: Opener) -> None:
    earlier = {status.st_ino for status in slab_files()}
    with opener({0: 5 * MIB, 1: 1, 2: 4097}):
        (file,) = [status for status in slab_files() if status.st_ino not in earlier]
        assert file.st_size == 5 * MIB + 4096 + 2 * 4096
        assert file.st_blocks * 512 >= file.st_size
        assert stat.S_IMODE(file.st_mode) == 0o600


@pytest.mark.parametrize("how", ENDINGS)
def test_the_file_is_gone_after(opener: Opener, how: str) -> None:
    before = len(slab_files())
    open_and_end(opener, how)
    assert len(slab_files()) == before


def test_closing_fails_what_is_not_begun_and_hangs_on_nothing(opener: Opener) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        gate.wait(10)
        return os.pwritev(file, buffers, offset)

    store = opener(dict.fromkeys(range(4), 4096), pwritev=slow)
    puts = [store.put(key, random_bytes(4096)) for key in range(4)]
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


def test_naming_the_stores_imports_no_torch() -> None:
    code = "import sys; from autotune.runtime.stores import STORES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_store_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown store 'sdd'; known: host, ramdisk, ssd"):
        open_store("sdd", tmp_path, {})
