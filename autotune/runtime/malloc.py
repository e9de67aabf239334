"""Control when malloc returns freed memory to the kernel: that of glibc, or a tcmalloc or jemalloc preloaded before it.

Nothing here has an effect on other allocators.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
RETURNED_BYTES = 64 * 2**10
"""Smallest block that can return to the kernel; smaller blocks share their pages with others."""
_IMMEDIATE = RETURNED_BYTES, RETURNED_BYTES
_LONG_LIVED = 64 * 2**20, 32 * 2**20  # the limits of glibc's own adjustment
_is_permanent = False


def always_release() -> None:
    """Return every freed block of 64 KiB or more at once, from now on: for a process whose bytes are measured.

    Call it before other threads start. A preloaded tcmalloc still caches some blocks of up to 256 KiB.
    """
    global _is_permanent  # noqa: PLW0603 - the setting belongs to the process
    _is_permanent = True
    _set(*_IMMEDIATE)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "MallocExtension_SetNumericProperty"):  # tcmalloc
        libc.MallocExtension_SetNumericProperty(b"tcmalloc.aggressive_memory_decommit", ctypes.c_size_t(1))
    if hasattr(libc, "mallctl"):  # jemalloc: the main thread's arena, and those of threads to come
        delay = ctypes.c_ssize_t(0)
        for name in (b"arena.0.dirty", b"arena.0.muzzy", b"arenas.dirty", b"arenas.muzzy"):
            libc.mallctl(name + b"_decay_ms", None, None, ctypes.byref(delay), ctypes.c_size_t(ctypes.sizeof(delay)))


@contextmanager
def eager_release(enabled: bool = True) -> Iterator[None]:
    """Return freed blocks of 64 KiB or more at once inside the context, if enabled.

    A preloaded malloc returns them when the context ends, unless `always_release` was called.
    Afterwards malloc behaves as in a long-lived process, unless `always_release` was called.
    """
    if not enabled:
        yield
        return
    _set(*_IMMEDIATE)
    try:
        yield
    finally:
        trim()
        if not _is_permanent:
            _set(*_LONG_LIVED)


def trim() -> None:
    """Return all free pages of malloc's heap to the kernel."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if hasattr(libc, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        libc.MallocExtension_ReleaseFreeMemory()
    if hasattr(libc, "mallctl"):  # jemalloc, whose number 4096 stands for all arenas
        libc.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))


def _set(trim_threshold: int, mmap_threshold: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
