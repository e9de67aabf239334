"""Model PyTorch's caching allocator of a GPU: which blocks and segments a sequence of allocations leads to.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default options, or with expandable segments. Requests are
rounded to 512 bytes. Those up to 1 MiB share segments of 2 MiB. Larger ones below 10 MiB share segments of 20 MiB. From
there on a segment is as large as its request, in whole 2 MiB. The best fit among the free blocks of the same pool and
stream is used. A block is split where the rest is useful: 512 bytes in a small or expandable segment, else over 1 MiB.

Other options of `PYTORCH_ALLOC_CONF` are not modelled, nor are events of other streams that delay a release.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from autotune.ir.allocation import GPU_BLOCK_BYTES, allocated_bytes

MIB = 2**20
"""Bytes of a mebibyte."""
SMALL_BYTES = MIB
"""Largest request in bytes that is served from the pool of small blocks."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Bytes of a segment of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Bytes of a segment for requests between 1 and 10 MiB, and of one step of an expandable segment."""
LARGE_REQUEST_BYTES = 10 * MIB
"""Bytes from which a request has a segment of its own."""
ROUND_SEGMENT_BYTES = 2 * MIB
"""Granularity in bytes of segments for one request."""
_ADDRESS_BYTES = 2**24 * LARGE_SEGMENT_BYTES
"""Address space of an expandable segment in bytes: more than the memory of any GPU."""


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment: allocated, free, or address space without memory."""

    pool: "_Pool"
    address: int
    size: int
    """Bytes."""
    expandable: bool
    mapped: bool = True
    """Memory backs the block; False only within an expandable segment."""
    allocated: bool = False
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None

    @property
    def is_whole(self) -> bool:
        """True if the block is its whole segment."""
        return self.before is None and self.after is None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one size class and stream."""

    small: bool
    free: list[tuple[int, int, MemoryBlock]] = field(default_factory=list)
    """(size, address, block), sorted: the first one that fits is the best."""
    unmapped: list[tuple[int, MemoryBlock]] = field(default_factory=list)
    """(address, block) of address space without memory, sorted."""

    @property
    def segment_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def add(self, block: MemoryBlock) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: MemoryBlock) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """Blocks and segments of one GPU in one process.

    Args:
        expandable: True for the option `expandable_segments`.
        limit_bytes: Most bytes to reserve, as `set_per_process_memory_fraction` allows them; None for no limit.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * MIB)
    >>> allocator.allocated_bytes // MIB, allocator.reserved_bytes // MIB
    (3, 20)
    """

    def __init__(self, *, expandable: bool = False, limit_bytes: int | None = None) -> None:
        self.expandable = expandable
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[bool, Hashable], _Pool] = {}
        self._heads: dict[int, MemoryBlock] = {}  # first block of each segment, by address
        self._next_address = 0

    def allocate(self, nbytes: int, stream: Hashable = 0) -> MemoryBlock | None:
        """Return a block of at least `nbytes`, which only `stream` may reuse later; None for no bytes.

        Raises MemoryError where the limit leaves no room, after all free segments were returned.
        """
        size = allocated_bytes(nbytes, "cuda")
        if not size:
            return None
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((small, stream), _Pool(small))
        block = self._take_free(pool, size) or self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            block = self._reserve(pool, size)
        if block is None:
            raise MemoryError(f"out of memory: {size} bytes beside {self.reserved_bytes}, limit {self.limit_bytes}")
        if self._is_split(block, size):
            rest = MemoryBlock(pool, block.address + size, block.size - size, block.expandable)
            _link(block, rest, block.after)
            block.size = size
            pool.add(rest)
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Release a block. Its memory stays reserved."""
        if block is None:
            return
        assert block.allocated
        block.allocated = False
        self.allocated_bytes -= block.size
        self._join_free_neighbours(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return free segments, and whole pages of free blocks in expandable segments, to the driver."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if block.expandable:
                    self._unmap(block)
                elif block.is_whole:
                    pool.remove(block)
                    del self._heads[block.address]
                    self.reserved_bytes -= block.size

    def reset_peaks(self) -> None:
        """Reset both peaks to the current bytes."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def segments(self) -> Iterator[list[MemoryBlock]]:
        """Yield the blocks of each segment in order of their addresses."""
        for head in self._heads.values():
            block: MemoryBlock | None = head
            blocks = []
            while block is not None:
                blocks.append(block)
                block = block.after
            yield blocks

    def _take_free(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """Take the best free block: the smallest that fits, in an expandable segment the one that can grow least."""
        position = bisect_left(pool.free, (size,))
        if position == len(pool.free):
            return None
        block = pool.free[position][2]
        for _, _, following in pool.free[position + 1 :]:
            if not block.expandable or _grown_size(following) >= _grown_size(block):
                break
            block = following
        pool.remove(block)
        return block

    def _is_split(self, block: MemoryBlock, size: int) -> bool:
        rest = block.size - size
        return rest >= GPU_BLOCK_BYTES if block.pool.small or self.expandable else rest > SMALL_BYTES

    def _reserve(self, pool: _Pool, size: int) -> MemoryBlock | None:
        """Return a new block that is at least as large; None where the limit forbids it."""
        segment_bytes = _segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        if self.expandable:
            return self._expand(pool, size)
        self._add_reserved(segment_bytes)
        return self._add_segment(pool, segment_bytes, expandable=False)

    def _add_segment(self, pool: _Pool, nbytes: int, *, expandable: bool) -> MemoryBlock:
        address = -(-self._next_address // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES  # a segment begins at a page
        block = MemoryBlock(pool, address, nbytes, expandable, mapped=not expandable)
        self._next_address = address + nbytes
        self._heads[block.address] = block
        return block

    def _expand(self, pool: _Pool, size: int) -> MemoryBlock:
        """Map memory at the lowest address where the request fits, and return the free block there."""
        block = next(filter(None, (_room_around(unmapped, size) for _, unmapped in pool.unmapped)), None)
        if block is None:
            block = self._add_segment(pool, _ADDRESS_BYTES, expandable=True)
            pool.add(block)
        if not block.mapped:
            block = self._map(block, min(size, block.size))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, min(size - block.size, block.after.size))
        pool.remove(block)
        return block

    def _map(self, block: MemoryBlock, nbytes: int) -> MemoryBlock:
        """Back the beginning of a block with memory, in whole pages; return it, joined with its free neighbours."""
        pool, page = block.pool, block.pool.segment_bytes
        mapped = -(-nbytes // page) * page
        pool.remove(block)
        if mapped < block.size:
            rest = MemoryBlock(pool, block.address + mapped, block.size - mapped, expandable=True, mapped=False)
            _link(block, rest, block.after)
            block.size = mapped
            pool.add(rest)
        block.mapped = True
        self._join_free_neighbours(block)
        pool.add(block)
        self._add_reserved(mapped)
        return block

    def _unmap(self, block: MemoryBlock) -> None:
        """Return the whole pages of a free block to the driver."""
        pool, page = block.pool, block.pool.segment_bytes
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if rest_bytes := block.address + block.size - end:
            rest = MemoryBlock(pool, end, rest_bytes, expandable=True)
            _link(block, rest, block.after)
            pool.add(rest)
        if front_bytes := begin - block.address:
            front = MemoryBlock(pool, block.address, front_bytes, expandable=True)
            _link(block.before, front, block)
            pool.add(front)
            if self._heads.get(block.address) is block:
                self._heads[block.address] = front
        block.address, block.size, block.mapped = begin, end - begin, False
        self._join_free_neighbours(block)
        pool.add(block)
        self.reserved_bytes -= end - begin

    def _join_free_neighbours(self, block: MemoryBlock) -> None:
        """Extend a block, which is in no list of its pool, by the free blocks beside it."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            other.pool.remove(other)
            if other is block.before:
                if other.address in self._heads:
                    self._heads[other.address] = block
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
            block.size += other.size

    def _add_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def _segment_bytes(size: int) -> int:
    """Return the bytes that are reserved for a request of so many rounded bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


def _grown_size(block: MemoryBlock) -> int:
    """Return the bytes that a block would have with the unmapped addresses after it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room_around(unmapped: MemoryBlock, size: int) -> MemoryBlock | None:
    """Return the first block of a run of free and unmapped blocks that is large enough; None if it is too short."""
    before = unmapped.before
    start = before if before is not None and not before.allocated else unmapped
    room = 0
    block: MemoryBlock | None = start
    while block is not None and not block.allocated and room < size:
        room, block = room + block.size, block.after
    return start if room >= size else None


def _link(before: MemoryBlock | None, block: MemoryBlock, after: MemoryBlock | None) -> None:
    """Insert a block between two neighbours."""
    block.before, block.after = before, after
    if before is not None:
        before.after = block
    if after is not None:
        after.before = block
