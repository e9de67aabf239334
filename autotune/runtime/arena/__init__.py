"""Place a training step's tensors at planned offsets in one block of memory.

glibc keeps memory that a step frees, so that the kernel charges the process for up to twice its live bytes. An arena
records the allocations of one step, computes a layout, and replays it in later steps. Allocations that differ from the
recording go to malloc.

The allocator is C++ (`arena.cpp`), which `build` compiles with the user's g++ at first use, through `autotune.native`.
Without g++ there is one warning, and all steps use malloc.

In: the allocations of one step.
Out: the same step in one block of memory.
Read first: this file.
"""

import ctypes
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import UntypedStorage

from autotune.layout import Buffers, Layout, lay_out
from autotune.runtime import malloc
from autotune.runtime.arena.build import library
from autotune.units import fmt_bytes

MAX_MISS_SHARE = 0.02
"""Largest share of a step's allocations that may miss their slot; with more the step is recorded again."""
MAX_RECORDINGS = 4
"""Number of recordings after which a step that keeps changing is left to malloc."""
FAULTLESS_STEPS = 100
"""Number of steps without a miss after which earlier recordings count no more."""
_TOO_MANY = -2  # answer of `arena_create`, as in arena.cpp

_log = logging.getLogger(__name__)


class _Event(ctypes.Structure):
    _fields_ = (("size", ctypes.c_int64), ("born", ctypes.c_int64), ("died", ctypes.c_int64))


@dataclass
class SharedBlock:
    """One block of memory for the arenas of several steps that never run at once; as large as the largest of them."""

    group: int = -1
    """The allocator's number of the block; -1 before the first layout."""


@dataclass
class StepArena:
    """The arena of one step: `with arena.step(): ...` around each step, always on the same thread.

    Two steps are recorded in a heap that returns freed pages at once. The second one, which creates no optimizer state,
    is laid out and replayed from then on. Too many misses cause another recording, and after `MAX_RECORDINGS` the step
    uses malloc. Steps beside the recording of another step use malloc, too.
    """

    replays: bool = True
    """False runs all steps in the heap, without a layout."""
    misses: int = 0
    """Allocations of the last step that went to malloc although they had a slot."""
    bytes: int = 0
    """Size of the layout; 0 before it is computed."""
    block: SharedBlock = field(default_factory=SharedBlock)
    """Memory that the step's tensors are placed in."""
    _id: int | None = None
    _slot_count: int = 0
    _steps: int = 0
    _recordings: int = 0
    _faultless: int = 0
    """Number of replayed steps without a miss since the last recording."""
    _library: ctypes.CDLL | None = field(default_factory=library)

    @property
    def works(self) -> bool:
        """True if the allocator could be compiled; otherwise all steps use malloc."""
        return self._library is not None

    @contextmanager
    def step(self, *, lays_out: bool = True) -> Iterator[None]:
        """Record or replay the allocations of this thread inside the context.

        With `lays_out=False` a recording is dropped: the step allocates less than others of its loop.
        """
        lib = self._library
        if lib is None or (self._id is None and self._recordings >= MAX_RECORDINGS):
            yield
            return
        if self._id is not None:
            lib.arena_replay(self._id)
        elif not lib.arena_record():  # another step is recorded now
            yield
            return
        self._steps += lays_out
        is_complete = False
        try:
            with malloc.eager_release(self._id is None):
                yield
            is_complete = True
        finally:
            self.misses = int(lib.arena_stop())
        if is_complete and self.replays and lays_out and self._id is None and self._steps > 1:
            self._lay_out(lib)
        elif is_complete and not self.misses and self._id is not None:
            self._faultless += 1
            if self._faultless == FAULTLESS_STEPS:  # what made earlier steps differ, such as a kept traceback, is over
                self._recordings = 1
        elif is_complete and self.misses > MAX_MISS_SHARE * max(1, self._slot_count):
            action = "it is recorded again" if self._recordings < MAX_RECORDINGS else "it uses malloc from now on"
            _log.warning(
                "%d of %d allocations differ from the recorded step; %s", self.misses, self._slot_count, action
            )
            self._faultless = 0
            self.close()

    def limit_resident(self, step_bytes: int, offloaded_bytes: int) -> None:
        """Cap resident memory at `step_bytes` plus the static bytes that are offloaded now.

        If an earlier step needed more at its fullest, that is the cap. Live slots stay; idle pages are released, those
        needed last first.
        """
        if self._library is not None and self._id is not None:
            self._library.arena_limit_resident(self._id, step_bytes, offloaded_bytes)

    def map_storage(self, storage: UntypedStorage, nbytes: int) -> None:
        """Allocate `nbytes` for a CPU storage without memory.

        From 64 KiB on it gets a mapping of its own, which returns to the kernel as soon as it is freed. Raises MemoryError if there is no memory.
        """
        if self._library is None:
            storage.resize_(nbytes)
        elif not self._library.arena_map_storage(storage._cdata, nbytes):
            raise MemoryError(f"no {fmt_bytes(nbytes)} available for a weight or its optimizer state that is read back")

    def can_follow(self, other: "StepArena") -> bool:
        """Return True if the next step replays in the block that the other arena's step used."""
        return self._id is not None and self.block is other.block

    def release(self) -> None:
        """Release the memory until the next step; the layout stays."""
        if self._library is not None and self._id is not None:
            self._library.arena_release(self._id)

    def close(self) -> None:
        """Release the memory and drop the layout; a later step is recorded again."""
        self.release()
        self._id, self._steps, self.bytes = None, 1, 0

    def _lay_out(self, lib: ctypes.CDLL) -> None:
        self._recordings += 1
        count = int(lib.arena_recorded(None, 0))
        events = (_Event * count)()
        lib.arena_recorded(events, count)
        inside = [index for index, event in enumerate(events) if event.died >= 0]
        offsets = [-1] * count
        lives = [(events[i].size, events[i].born, events[i].died) for i in inside]
        layout = lay_out(Buffers.from_lives(*zip(*lives, strict=True))) if lives else Layout((), 0, 0)
        self.bytes = layout.bytes
        for index, offset in zip(inside, layout.offsets, strict=True):
            offsets[index] = offset
        numbers = ctypes.c_int64 * count
        arena_id = lib.arena_create(
            self.bytes, numbers(*offsets), numbers(*(event.size for event in events)), count, self.block.group
        )
        self._id, self._slot_count = (arena_id, count) if arena_id >= 0 else (None, 0)
        if arena_id >= 0:
            self.block.group = int(lib.arena_group(arena_id))
            weakref.finalize(self, lib.arena_release, arena_id).atexit = False
        else:
            reason = (
                "no memory" if arena_id != _TOO_MANY else "this process has laid out too many steps, start it again"
            )
            _log.warning("no arena of %s (%s); tensors stay with malloc", fmt_bytes(self.bytes), reason)
            self.bytes, self._recordings = 0, MAX_RECORDINGS
        del events, inside, offsets, lives, layout
        malloc.trim()  # these lists take a few MiB, which would be charged to the next step


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep memory that this thread frees, with its pages, for its next request of the same size.

    Allocations then cost as little as in a replayed step. At the end everything is released. Without g++ nothing
    changes.
    """
    lib = library()
    if lib is None:
        yield
        return
    lib.arena_keep()
    try:
        yield
    finally:
        lib.arena_stop_keeping()
