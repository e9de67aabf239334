"""Give a training step's tensors planned places in one block of memory, so that malloc keeps nothing back.

glibc holds on to what a step frees: the kernel charges the process for up to twice the bytes that live. An arena records
the allocations of one step and replays them from a layout in the next; what does not match goes to malloc as before.

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

MANY_MISSES = 0.02
"""Share of a step's allocations; above it the step is not the one that was recorded."""
MANY_RECORDINGS = 4
"""A step that differed as often is never the same."""

_log = logging.getLogger(__name__)


class _Event(ctypes.Structure):
    _fields_ = (("size", ctypes.c_int64), ("born", ctypes.c_int64), ("died", ctypes.c_int64))


@dataclass
class Arena:
    """One step's arena: `with arena.step(): ...` around each step, always on the same thread.

    Two steps are recorded, in a heap that keeps nothing back; the second, which makes no optimizer state any more, is
    laid out, and later ones are replayed. Too many misses make it record again, and after a few recordings leave the
    step to malloc.
    """

    replays: bool = True
    """Whether steps are laid out and replayed; else all of them run in the heap."""
    misses: int = 0
    """Of the last step: allocations that went to malloc although they had a slot."""
    bytes: int = 0
    """Size of the block; 0 before there is a layout."""
    _id: int | None = None
    _slots: int = 0
    _steps: int = 0
    _recordings: int = 0
    _library: ctypes.CDLL | None = field(default_factory=library)

    @property
    def works(self) -> bool:
        """Whether there is a compiled allocator; without one steps use malloc."""
        return self._library is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step; what it allocates on this thread is recorded or replayed."""
        lib = self._library
        if lib is None or (self._id is None and self._recordings >= MANY_RECORDINGS):
            yield
            return
        self._steps += 1
        if self._id is not None:
            lib.arena_replay(self._id)
        else:
            lib.arena_record()
        whole = False
        try:
            with malloc.returning(self._id is None):
                yield
            whole = True
        finally:
            self.misses = int(lib.arena_stop())
        if whole and self.replays and self._id is None and self._steps > 1:
            self._lay_out(lib)
        elif whole and self.misses > MANY_MISSES * max(1, self._slots):
            again = "recording it again" if self._recordings < MANY_RECORDINGS else "malloc serves it from now on"
            _log.warning("%d of %d allocations differ from the recorded step; %s", self.misses, self._slots, again)
            self.close()

    def hold(self, most: int, away: int) -> None:
        """From now on take no more memory than `most` bytes and those of the user's own that are away, or than the step took
        beyond these at its fullest: what lives stays, and of the rest as far as that goes what is needed soon.
        """
        if self._library is not None and self._id is not None:
            self._library.arena_hold(self._id, most, away)

    def map(self, storage: UntypedStorage, nbytes: int) -> None:
        """Give a CPU storage that has no memory so many bytes, from 64 KiB on in a mapping of its own: they go back as soon as
        they are freed, whatever holes malloc's heap has. MemoryError where there are none.
        """
        if self._library is None:
            storage.resize_(nbytes)
        elif not self._library.arena_map(storage._cdata, nbytes):
            raise MemoryError(f"no {fmt_bytes(nbytes)} to be had for a weight or its optimizer state that comes back")

    def rest(self) -> None:
        """Give the memory back until the next step; the layout stays."""
        if self._library is not None and self._id is not None:
            self._library.arena_rest(self._id)

    def close(self) -> None:
        """Give the memory back; a later step records anew."""
        self.rest()
        self._id, self._steps, self.bytes = None, 1, 0

    def _lay_out(self, lib: ctypes.CDLL) -> None:
        self._recordings += 1
        count = int(lib.arena_recorded(None, 0))
        events = (_Event * count)()
        lib.arena_recorded(events, count)
        inside = [index for index, event in enumerate(events) if event.died >= 0]
        offsets = [-1] * count
        lives = [(events[i].size, events[i].born, events[i].died) for i in inside]
        layout = lay_out(Buffers.of(*zip(*lives, strict=True))) if lives else Layout((), 0, 0)
        self.bytes = layout.bytes
        for index, offset in zip(inside, layout.offsets, strict=True):
            offsets[index] = offset
        numbers = ctypes.c_int64 * count
        made = lib.arena_create(self.bytes, numbers(*offsets), numbers(*(event.size for event in events)), count)
        self._id, self._slots = (made, count) if made >= 0 else (None, 0)
        if made >= 0:
            weakref.finalize(self, lib.arena_rest, made).atexit = False
        else:
            _log.warning("no arena of %s to be had, tensors stay with malloc", fmt_bytes(self.bytes))
            self.bytes, self._recordings = 0, MANY_RECORDINGS
        del events, inside, offsets, lives, layout
        malloc.trim()  # a few MiB, which the next step would be charged beside the block


@contextmanager
def kept_memory() -> Iterator[None]:
    """Meanwhile what is freed serves this thread's next request of as many bytes, its pages in place, as in a step that is
    replayed; afterwards it goes back. Without a compiler nothing changes.
    """
    lib = library()
    if lib is None:
        yield
        return
    lib.arena_keep()
    try:
        yield
    finally:
        lib.arena_let_go()
