"""The model of the caching allocator: its rules one by one, and as a whole against a list of blocks that is searched."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.predict.caching_allocator import MIB, CachingAllocator, MemoryBlock

KIB = 2**10
SIZES = st.one_of(
    st.integers(1, 3 * KIB),
    st.integers(1, 8).map(lambda part: part * 200 * KIB),
    st.integers(1, 30).map(lambda part: part * MIB),
    st.integers(MIB - 2, MIB + 2),
    st.integers(10 * MIB - 600, 10 * MIB + 2),
)
REQUESTS = st.lists(st.tuples(SIZES, st.integers(0, 5), st.sampled_from([0, 0, 0, 1])), max_size=60)
"""Each request: its bytes, the number of older blocks of which one is freed first, and its stream."""


def replayed(
    allocator: CachingAllocator, requests: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, MemoryBlock, list[tuple[MemoryBlock, int]]]]:
    """Run requests; yield (bytes, stream, the new block, all live blocks with their streams) after each."""
    live: list[tuple[MemoryBlock, int]] = []
    for nbytes, age, stream in requests:
        if age and live:
            allocator.free(live.pop(-age % len(live))[0])
        block = allocator.allocate(nbytes, stream)
        assert block is not None
        live.append((block, stream))
        yield nbytes, stream, block, live


@dataclass
class SearchedSegment:
    """One segment as a list of [bytes, in use]; the oracle of segments of fixed size."""

    small: bool
    stream: int
    parts: list[list[int]] = field(default_factory=list)


class SearchedAllocator:
    """The same rules, by linear search."""

    def __init__(self) -> None:
        self.segments: list[SearchedSegment] = []

    def allocate(self, nbytes: int, stream: int) -> list[int]:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        fitting = [
            (part[0], number, position)
            for number, segment in enumerate(self.segments)
            if (segment.small, segment.stream) == (small, stream)
            for position, part in enumerate(segment.parts)
            if not part[1] and part[0] >= size
        ]
        if not fitting:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append(SearchedSegment(small, stream, [[whole, 0]]))
            fitting = [(whole, len(self.segments) - 1, 0)]
        _, number, position = min(fitting)
        parts = self.segments[number].parts
        part, rest = parts[position], parts[position][0] - size
        if rest >= 512 if small else rest > MIB:
            part[0] = size
            parts.insert(position + 1, [rest, 0])
        part[1] = 1
        return part

    def free(self, part: list[int]) -> None:
        part[1] = 0
        for segment in self.segments:
            position = 0
            while position + 1 < len(segment.parts):
                first, second = segment.parts[position : position + 2]
                if first[1] or second[1]:
                    position += 1
                else:
                    first[0] += second[0]
                    del segment.parts[position + 1]

    def allocated(self) -> int:
        return sum(part[0] for segment in self.segments for part in segment.parts if part[1])

    def reserved(self) -> int:
        return sum(part[0] for segment in self.segments for part in segment.parts)


@given(REQUESTS)
def test_bytes_equal_those_of_a_search_through_all_blocks(requests: list[tuple[int, int, int]]) -> None:
    allocator, oracle = CachingAllocator(), SearchedAllocator()
    parts: list[list[int]] = []
    for nbytes, age, stream in requests:
        if age and parts:
            oracle.free(parts.pop(-age % len(parts)))
        parts.append(oracle.allocate(nbytes, stream))
    blocks = [block for *_, block, _ in replayed(allocator, requests)]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (oracle.allocated(), oracle.reserved())
    assert len(blocks) == len(requests)


@given(REQUESTS, st.booleans())
def test_blocks_tile_their_segments_without_overlap(requests: list[tuple[int, int, int]], expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for _, _, _, live in replayed(allocator, requests):
        blocks = [block for segment in allocator.segments() for block in segment]
        for segment in allocator.segments():
            for first, second in pairwise(segment):
                assert first.address + first.size == second.address
                assert first.allocated or second.allocated or first.mapped != second.mapped
        ranges = sorted((block.address, block.address + block.size) for block in blocks)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert {id(block) for block, _ in live} == {id(block) for block in blocks if block.allocated}
        assert allocator.allocated_bytes == sum(block.size for block, _ in live)
        assert allocator.reserved_bytes == sum(block.size for block in blocks if block.mapped)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes


@given(REQUESTS, st.booleans())
def test_a_block_wastes_less_than_its_pool_would_split_off(
    requests: list[tuple[int, int, int]], expandable: bool
) -> None:
    for nbytes, _, block, _ in replayed(CachingAllocator(expandable=expandable), requests):
        waste = block.size - -(-nbytes // 512) * 512
        assert waste >= 0
        assert waste < 512 if expandable or nbytes <= MIB else waste <= MIB


@given(REQUESTS)
def test_expandable_segments_allocate_exactly_the_rounded_bytes(requests: list[tuple[int, int, int]]) -> None:
    allocator = CachingAllocator(expandable=True)
    for nbytes, _, block, _ in replayed(allocator, requests):
        assert block.size == -(-nbytes // 512) * 512


@given(REQUESTS)
def test_expandable_segments_grow_only_where_no_free_block_fits(requests: list[tuple[int, int, int]]) -> None:
    allocator = CachingAllocator(expandable=True)
    live: list[MemoryBlock] = []
    for nbytes, age, stream in requests:
        if age and live:
            allocator.free(live.pop(-age % len(live)))
        small, size, before = nbytes <= MIB, -(-nbytes // 512) * 512, allocator.reserved_bytes
        pool = allocator._pools.get((small, stream))
        fits = pool is not None and any(free >= size for free, _, _ in pool.free)
        block = allocator.allocate(nbytes, stream)
        assert block is not None
        live.append(block)
        grown = allocator.reserved_bytes - before
        assert (grown == 0) == fits
        assert grown % ((2 if small else 20) * MIB) == 0


@given(REQUESTS, st.booleans())
def test_nothing_stays_reserved_when_all_is_freed_and_the_cache_emptied(
    requests: list[tuple[int, int, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable=expandable)
    held: list[tuple[MemoryBlock, int]] = []
    for *_, live in replayed(allocator, requests):
        before, held = allocator.allocated_bytes, live
        allocator.empty_cache()
        assert allocator.allocated_bytes == before <= allocator.reserved_bytes
    for block, _ in held:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest, one MiB, is not split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # a rest above one MiB is
        (100 * MIB + 1, 102 * MIB - (2 * MIB - 512), 102 * MIB),
    ],
)
def test_a_first_request_is_rounded_and_reserves_a_segment(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(requested)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_streams_do_not_reuse_each_others_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(5 * MIB, stream=0))
    allocator.allocate(5 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_limit_returns_free_segments_before_it_refuses() -> None:
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    held = allocator.allocate(30 * MIB)
    allocator.free(held)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    with pytest.raises(MemoryError, match="limit"):
        allocator.allocate(1)


def test_an_expandable_segment_serves_growing_requests_from_one_range() -> None:
    """Segments of fixed size strand the earlier ones, which is why a plan in the arena asks for expandable segments."""
    fixed, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for size in range(20, 60, 4):
        for allocator in (fixed, expandable):
            allocator.free(allocator.allocate(size * MIB))
    assert fixed.reserved_bytes == sum(range(20, 60, 4)) * MIB
    assert expandable.reserved_bytes == 60 * MIB


def test_nothing_is_allocated_for_no_bytes() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0) is None
    allocator.free(None)
    assert allocator.reserved_bytes == 0


_ON_A_GPU = """
import random, sys, torch
from autotune.predict.caching_allocator import CachingAllocator
model, rng, live = CachingAllocator(expandable=sys.argv[1] == "expandable"), random.Random(0), []
torch.cuda.init()
assert torch.cuda.memory_reserved() == 0
for number in range(400):
    if live and rng.random() < 0.5:
        tensor, block = live.pop(rng.randrange(len(live)))
        del tensor
        model.free(block)
    nbytes = rng.choice([rng.randint(1, 3000), rng.randint(1, 2**20), rng.randint(2**20, 40 * 2**20)])
    live.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), model.allocate(nbytes)))
    if number == 200:
        torch.cuda.empty_cache()
        model.empty_cache()
    real = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert real == (model.allocated_bytes, model.reserved_bytes), (number, nbytes, real, model.allocated_bytes)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("segments", ["fixed", "expandable"])
def test_the_model_has_the_bytes_of_a_real_gpu(segments: str) -> None:
    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments == 'expandable'}"}
    run = subprocess.run(
        [sys.executable, "-c", _ON_A_GPU, segments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
