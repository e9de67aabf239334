"""Run a store through the contract that every store of the project keeps.

Subclass `StoreContract` in a test module and name how to open the store; pytest collects its tests:

    class TestNetworkStore(StoreContract):
        @pytest.fixture
        def opener(self, tmp_path: Path) -> Opener:
            return partial(NetworkStore, "network", tmp_path)
"""

import gc
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import StoreError
from autotune.runtime.stores import SwapStore
from autotune.runtime.stores.slab_file import CHUNK_BYTES, DIRECT_BYTES

Opener = Callable[..., SwapStore]
"""Opens a store for a mapping of slot keys to bytes, with the store's own options as keyword arguments."""

MIB = 2**20
SIZES = (1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 4321)
"""Bytes of tensors on both sides of a page and of one transfer of the project's own stores."""
ALIGNED_SIZES = (*SIZES, DIRECT_BYTES - 4096, DIRECT_BYTES, 2 * DIRECT_BYTES + 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8)
ENDINGS = ("closed", "closed twice", "exception", "forgotten")
"""Ways in which a store ends."""

_INHERITED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]  # one test runs in every subclass


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors have the same layout and the same bytes in their whole storages."""

    def storage(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    layouts = [(t.dtype, t.size(), t.stride(), t.storage_offset()) for t in (left, right)]
    return layouts[0] == layouts[1] and torch.equal(storage(left), storage(right))


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of `nbytes` random bytes; equal seeds give equal bytes."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def aligned_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes in memory on a page boundary, as in an arena."""
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    return tensor.copy_(random_bytes(nbytes, seed))


def open_and_end(opener: Opener, how: str) -> None:
    """Open a store of one MiB and end it in one of the ways of `ENDINGS`."""
    store: SwapStore | None = opener({0: MIB})
    assert store is not None
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


class StoreContract:
    """The contract as pytest tests; a subclass overrides `opener`."""

    verified: ClassVar[Mapping[str, Any]] = {}
    """Options with which the store verifies every transfer, if it can."""
    option_sets: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Sets of options that must all keep the contract."""

    @pytest.fixture
    def opener(self) -> Opener:
        raise NotImplementedError("override the fixture `opener`: return a function that opens the store for its slots")

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_every_size_comes_back_bit_for_bit(self, opener: Opener, nbytes: int) -> None:
        with opener({5: nbytes}, **self.verified) as store:
            tensor = random_bytes(nbytes)
            store.put(5, tensor).result()
            assert has_same_bits(store.fetch(5).result(), tensor)

    @pytest.mark.parametrize("nbytes", ALIGNED_SIZES)
    def test_every_size_comes_back_into_aligned_memory(self, opener: Opener, nbytes: int) -> None:
        with opener({5: nbytes}, **self.verified) as store:
            tensor, into = aligned_bytes(nbytes), aligned_bytes(nbytes, seed=1)
            store.put(5, tensor).result()
            assert has_same_bits(store.fetch(5, into).result(), tensor)

    @settings(max_examples=15, deadline=None, suppress_health_check=_INHERITED)
    @given(
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 9), max_size=4),
        shuffle=st.randoms(use_true_random=False),
        data=st.data(),
    )
    def test_every_dtype_shape_and_permutation_comes_back_the_same(
        self, opener: Opener, dtype: torch.dtype, shape: list[int], shuffle: Any, data: st.DataObject
    ) -> None:
        tensor = (torch.randn(shape) * 3).to(dtype)
        axes = list(range(len(shape)))
        shuffle.shuffle(axes)
        tensor = tensor.permute(axes)
        options = data.draw(st.sampled_from(self.option_sets))
        with opener({0: tensor.untyped_storage().nbytes()}, **options) as store:
            store.put(0, tensor).result()
            fetched = store.fetch(0).result()
            assert has_same_bits(fetched, tensor)
            assert fetched.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()

    def test_a_tensor_of_no_bytes_comes_back_with_its_shape(self, opener: Opener) -> None:
        with opener({0: 0}) as store:
            store.put(0, torch.empty(3, 0, 2, dtype=torch.bfloat16)).result()
            fetched = store.fetch(0).result()
            assert fetched.shape == (3, 0, 2)
            assert fetched.dtype == torch.bfloat16

    def test_channels_last_stays_channels_last(self, opener: Opener) -> None:
        tensor = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
        with opener({0: 2 * 3 * 5 * 7 * 4}) as store:
            store.put(0, tensor).result()
            assert has_same_bits(store.fetch(0).result(), tensor)

    def test_a_fetch_right_after_the_put_waits_for_the_write(self, opener: Opener) -> None:
        tensors = [random_bytes(3 * MIB, seed) for seed in range(6)]
        with opener(dict.fromkeys(range(6), 3 * MIB)) as store:
            fetched = []
            for key, tensor in enumerate(tensors):
                store.put(key, tensor)
                fetched.append(store.fetch(key))
            assert all(has_same_bits(future.result(), tensor) for future, tensor in zip(fetched, tensors, strict=True))

    def test_each_fetch_returns_the_put_before_it(self, opener: Opener) -> None:
        tensors = [random_bytes(2 * MIB + 7, seed) for seed in range(8)]
        with opener({0: 3 * MIB}, **self.verified) as store:
            fetched = []
            for tensor in tensors:  # without a wait: the second put must not overtake the first fetch
                store.put(0, tensor)
                fetched.append(store.fetch(0))
            assert all(has_same_bits(future.result(), tensor) for future, tensor in zip(fetched, tensors, strict=True))

    def test_a_slot_takes_another_shape_in_the_next_step(self, opener: Opener) -> None:
        with opener({0: 4096}, **self.verified) as store:
            store.put(0, torch.arange(512)).result()
            store.put(0, torch.ones(2, 3)).result()
            assert store.fetch(0).result().tolist() == [[1, 1, 1], [1, 1, 1]]

    def test_neighbouring_slots_of_odd_sizes_do_not_touch(self, opener: Opener) -> None:
        sizes = {3: 1, 1: 4097, 4: 0, 2: 4096, 9: CHUNK_BYTES + 1}
        with opener(sizes, **self.verified) as store:
            for key, nbytes in sizes.items():
                store.put(key, random_bytes(nbytes, key))
            for key, nbytes in reversed(sizes.items()):
                assert has_same_bits(store.fetch(key).result(), random_bytes(nbytes, key))

    def test_the_tensor_is_dropped_before_its_write_is_done(self, opener: Opener) -> None:
        with opener({0: MIB}) as store:
            for _ in range(20):
                tensor = random_bytes(MIB)
                storage = weakref.ref(tensor.untyped_storage())
                alive = weakref.ref(tensor)
                future = store.put(0, tensor)
                del tensor
                future.result()
                assert alive() is None
                assert storage() is None

    def test_a_fetched_tensor_belongs_to_the_caller_alone(self, opener: Opener) -> None:
        with opener({0: MIB}) as store:
            store.put(0, random_bytes(MIB)).result()
            future = store.fetch(0)
            alive = weakref.ref(future.result())
            del future
            store.fetch(0).result()  # the reading worker has gone on, so it holds the first tensor no more
            assert alive() is None

    def test_every_transfer_is_reported_once_with_its_bytes_and_its_time(self, opener: Opener) -> None:
        with opener({0: 5000, 1: MIB}) as store:
            wait([store.put(0, random_bytes(5000)), store.put(1, random_bytes(MIB))])
            assert (store.written_bytes, store.read_bytes) == (5000 + MIB, 0)
            store.fetch(0).result()
            store.fetch(0).result()
            assert (store.written_bytes, store.read_bytes) == (5000 + MIB, 10000)
            transfers = store.transfers()
            assert [direction for direction, _, _ in sorted(transfers)] == ["read", "read", "write", "write"]
            assert all(start < end for _, start, end in transfers)
            assert store.transfers() == []

    def test_a_fetch_into_a_tensor_fills_its_own_memory(self, opener: Opener) -> None:
        tensor = random_bytes(5000)
        expected, address = tensor.clone(), tensor.data_ptr()
        with opener({0: 5000}, **self.verified) as store:
            store.put(0, tensor).result()
            tensor.zero_()
            assert store.fetch(0, tensor).result() is tensor
            with pytest.raises(StoreError, match="slot 0 holds 5000 bytes, not the 4999 to fill"):
                store.fetch(0, random_bytes(4999))
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, expected)

    @pytest.mark.parametrize("how", ENDINGS)
    def test_the_threads_end_with_the_store(self, opener: Opener, how: str) -> None:
        threads = set(threading.enumerate())
        open_and_end(opener, how)
        assert set(threading.enumerate()) <= threads

    def test_a_closed_store_is_refused_by_name(self, opener: Opener) -> None:
        store = opener({0: 4096})
        store.close()
        assert store.held_bytes() == 0
        with pytest.raises(StoreError, match="is closed"):
            store.put(0, random_bytes(1))
        with pytest.raises(StoreError, match="is closed"):
            store.fetch(0)

    def test_two_stores_in_one_directory_do_not_meet(self, opener: Opener) -> None:
        with opener({0: MIB}) as first, opener({0: MIB}) as second:
            first.put(0, random_bytes(MIB, 1))
            second.put(0, random_bytes(MIB, 2))
            assert has_same_bits(first.fetch(0).result(), random_bytes(MIB, 1))
            assert has_same_bits(second.fetch(0).result(), random_bytes(MIB, 2))

    def test_wrong_keys_and_tensors_are_refused_by_name(self, opener: Opener) -> None:
        with opener({7: 4096}) as store:
            with pytest.raises(StoreError, match="no slot 8"):
                store.put(8, random_bytes(1))
            with pytest.raises(StoreError, match="slot 7 was fetched before"):
                store.fetch(7)
            with pytest.raises(StoreError, match="slot 7 has 4096 bytes; a tensor of 4097"):
                store.put(7, random_bytes(4097))
            with pytest.raises(StoreError, match="on meta"):
                store.put(7, torch.empty(1, device="meta"))

    @settings(max_examples=12, deadline=None, suppress_health_check=_INHERITED)
    @given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9000)), max_size=25))
    def test_any_series_of_puts_and_fetches_acts_like_a_dict(
        self, opener: Opener, moves: list[tuple[bool, int, int]]
    ) -> None:
        model: dict[int, torch.Tensor] = {}
        with opener({0: 9000, 1: 9000, 2: 9000}, **self.verified) as store:
            pending = []
            for number, (write, key, nbytes) in zip(itertools.count(), moves, strict=False):
                if write:
                    model[key] = random_bytes(nbytes, number)
                    store.put(key, model[key])
                elif key in model:
                    pending.append((store.fetch(key), model[key]))
            assert all(has_same_bits(future.result(), expected) for future, expected in pending)
